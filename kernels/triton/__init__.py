"""Every operation of the model as Triton kernels, under the names of `reference.py`.

Nothing imports this package on a machine without a GPU, but the kernel tests (in Triton's interpreter) and
`kernels/ahead_of_time.py`; and nothing outside it imports Triton. To add a kernel, see `launches.py`.
"""

from d3engine.kernels.triton.copy_entries import copy_entries
from d3engine.kernels.triton.decode_rows import begin_step, decode_attention_inputs, end_step
from d3engine.kernels.triton.gate_up import gate_up
from d3engine.kernels.triton.linear_residual import linear_residual
from d3engine.kernels.triton.lm_head import lm_head, lm_head_argmax, lm_head_sample
from d3engine.kernels.triton.paged_attention import TABLE_DTYPE as TABLE_DTYPE
from d3engine.kernels.triton.paged_attention import attention_inputs, paged_attention
from d3engine.kernels.triton.qkv import qkv
from d3engine.kernels.triton.rms_norm import add_norm, rms_norm
from d3engine.kernels.triton.sample import count_tokens, sample
from d3engine.kernels.triton.unpack import embed

__all__ = [
    "add_norm",
    "attention_inputs",
    "begin_step",
    "copy_entries",
    "count_tokens",
    "decode_attention_inputs",
    "embed",
    "end_step",
    "gate_up",
    "linear_residual",
    "lm_head",
    "lm_head_argmax",
    "lm_head_sample",
    "paged_attention",
    "qkv",
    "rms_norm",
    "sample",
]
