"""Quantized matrices as the floats that they stand for, for torch's product: one pass, no float32 in memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from d3engine.kernels.matrices import Weight
from d3engine.kernels.quantized import GROUP
from d3engine.kernels.triton.launches import QUANTIZED, Launch, ModelShape, meta, meta_weight
from d3engine.kernels.triton.operations import Step
from d3engine.kernels.triton.product_kernels import is_of_bytes, is_of_groups, wait_for_previous
from d3engine.kernels.triton.products import least_capability, need_unit_stride, weight_arguments
from d3engine.kernels.triton.small_values import byte_values, int4_values

_GROUP: tl.constexpr = tl.constexpr(GROUP)


def unpack_steps(weight: Weight, dtype: torch.dtype) -> tuple[Tensor, list[Step]]:
    """`weight` [N, K] as a matrix of `dtype`, which a float matrix must be already; `dequantize`, on the device."""
    if isinstance(weight, Tensor):
        return weight, []
    need_unit_stride(weight=weight)
    out = torch.empty(weight.shape, dtype=dtype, device=weight.tensors[0].device)
    return out, [unpack_launch(weight, out)]


def unpack_launch(weight: Weight, out: Tensor) -> Launch:
    """`out` [N, K], contiguous, is written; 16 stored bytes a thread."""
    outputs, columns = weight.shape
    arguments = {**weight_arguments(weight), "out_ptr": out, "K": columns, "BLOCK_G": 16}
    grid = (outputs, triton.cdiv(columns, 16 * GROUP))
    return Launch(_unpack_kernel, grid, arguments, least_capability=least_capability(weight))


def launches(shape: ModelShape, dtype: torch.dtype, weights: str) -> Iterator[tuple[str, Launch]]:
    """What `kernels/inspect.py` compiles."""
    if weights in QUANTIZED:
        weight = meta_weight(shape.hidden_size, shape.intermediate_size, dtype=dtype, weights=weights)
        yield "unpack", unpack_launch(weight, meta(shape.hidden_size, shape.intermediate_size, dtype=dtype))


@triton.jit
def _unpack_kernel(
    weight_ptr,
    weight_stride,
    scales_ptr,
    SCALES_STRIDE: tl.constexpr,
    out_ptr,
    K: tl.constexpr,
    BLOCK_G: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    output = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)[:, None]
    weight_ptr += output * weight_stride
    scales_ptr += output * SCALES_STRIDE
    out_ptr += output * K
    if is_of_bytes(weight_ptr.dtype.element_ty):
        columns = groups * _GROUP + tl.arange(0, _GROUP)[None, :]
        stored = tl.load(weight_ptr + columns, mask=columns < K, other=0.0, eviction_policy="evict_first")
        scales = tl.load(scales_ptr)
        if is_of_groups(weight_ptr.dtype.element_ty, SCALES_STRIDE):
            scales = tl.load(scales_ptr + groups, mask=groups * _GROUP < K, other=0.0)
        values = byte_values(stored, tl.float32) * scales
        tl.store(out_ptr + columns, values.to(out_ptr.dtype.element_ty), mask=columns < K)
    else:
        nth = tl.arange(0, _GROUP // 2)[None, :]
        columns = groups * _GROUP + nth
        places = groups * (_GROUP // 2) + nth
        stored = tl.load(weight_ptr + places, mask=groups * _GROUP < K, other=0, eviction_policy="evict_first")
        scales = tl.load(scales_ptr + groups, mask=groups * _GROUP < K, other=0.0)
        low, high = int4_values(stored, tl.float32)
        tl.store(out_ptr + columns, (low * scales).to(out_ptr.dtype.element_ty), mask=columns < K)
        columns += _GROUP // 2
        tl.store(out_ptr + columns, (high * scales).to(out_ptr.dtype.element_ty), mask=columns < K)
