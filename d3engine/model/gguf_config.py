"""What the metadata of a GGUF file says of a model, as the config.json that says the same.

The one idea: a key that could change what a model computes is either read or refused by its name; so are kinds of rope.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, NoReturn

from d3engine.errors import ModelFormatError, must_be
from d3engine.model.families import GGUF_FAMILIES, GGUFForm
from d3engine.model.fields import Fields
from d3engine.model.gguf_file import GGUFFile, GGUFTensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

FREQ_FACTORS = "rope_freqs.weight"
"""The tensor that no layer has: by what Llama 3.1 divides the frequency of each channel."""
LONG_FACTORS = "rope_factors_long.weight"

_READ = frozenset(
    {
        *("block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size"),
        *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
        *("attention.layer_norm_rms_epsilon", "rope.dimension_count", "rope.freq_base", "rope.scale_linear"),
        *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"),
        *("rope.scaling.finetuned", "tensor_data_layout"),
    }
)
"""The keys behind "llama." or another architecture that are read, or say nothing that changes a result."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "use_parallel_residual": (False,),
    **dict.fromkeys(("expert_count", "expert_used_count", "expert_shared_count", "expert_feed_forward_length"), (0,)),
    **dict.fromkeys(("leading_dense_block_count", "nextn_predict_layers", "attention.shared_kv_layers"), (0,)),
    **dict.fromkeys(("attention.sliding_window", "attention.clamp_kqv", "attention.max_alibi_bias"), (0,)),
    **dict.fromkeys(("attention.scale", "attn_logit_softcapping", "final_logit_softcapping", "pooling_type"), (0,)),
    **dict.fromkeys(("logit_scale", "residual_scale", "embedding_scale", "expert_weights_scale"), (0, 1)),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_beta_fast": (32,),
    "rope.scaling.yarn_beta_slow": (1,),
    "rope.scaling.yarn_log_multiplier": (0,),
}
"""Keys that are not read, with the values by which llama.cpp computes what is computed here."""
_EXT_FACTOR = "rope.scaling.yarn_ext_factor"
_TOKENIZER_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tokenizer.ggml.remove_extra_whitespaces": (False,),
    "tokenizer.ggml.escape_whitespaces": (True,),
    "tokenizer.ggml.add_sep_token": (False,),
    "tokenizer.ggml.normalizer.lowercase": (False,),
    "tokenizer.ggml.precompiled_charsmap": ([],),
}
"""The same of keys that change how a text becomes tokens."""

_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

# Llama 3.1's and 3.2's own numbers, which a GGUF file holds only as what they come to for each channel.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def gguf_config(file: GGUFFile) -> dict[str, Any]:
    """The config.json of a GGUF file of one of `GGUF_FAMILIES`.

    It names a dtype where all matrices of the file are of one float type. Raises `ModelFormatError`, naming the key.
    """
    metadata = file.metadata
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in GGUF_FAMILIES:
        known = ", ".join(sorted(GGUF_FAMILIES))
        _refuse(file, "general.architecture", f"one of {known} (Mistral and InternLM3 are llama)")
    family, form = GGUF_FAMILIES[architecture]
    if metadata.get("split.count", 1) not in (0, 1):
        _refuse(file, "split.count", "1: put the parts together first (llama-gguf-split --merge)")
    prefix = f"{architecture}."
    _refuse_unread(file, prefix, form)
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    fields = Fields(own, f"{file.path}: {architecture}")
    num_heads = fields.integer("attention.head_count")
    hidden_size = fields.integer("embedding_length")
    head_dim = fields.integer("attention.key_length", default=max(1, hidden_size // num_heads))
    for name in ("attention.value_length", "rope.dimension_count"):
        if fields.integer(name, default=head_dim) != head_dim:
            fields.refuse(name, f"the length of a head, {head_dim}")
    if architecture == "granite" and fields.get("rope.scaling.finetuned") is False:
        fields.refuse("rope.scaling.finetuned", "true or absent, since llama.cpp takes false as no rope at all here")
    theta = fields.number("rope.freq_base", default=10_000.0)
    config = {
        "architectures": [family.architectures[0]],
        "model_type": architecture,
        "hidden_act": "silu",
        "vocab_size": _embedding(file).shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": fields.integer("feed_forward_length"),
        "num_hidden_layers": fields.integer("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields.integer("attention.head_count_kv", default=num_heads),
        "head_dim": head_dim,
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": fields.integer("context_length"),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(file, fields, head_dim, theta),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "attention_out_bias": "blk.0.attn_output.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        **{field: fields.number(key, zero_allowed=True) for key, field in form.keys.items()},
        **_ends_of_text(file),
    }
    if "sliding_window" in config:
        config["sliding_window"] = fields.integer("attention.sliding_window", low=0) or None  # 0 of Phi-4: none
    dtype = _float_type(file)
    return config if dtype is None else config | {"torch_dtype": dtype}


def _refuse(file: GGUFFile, key: str, allowed: str) -> NoReturn:
    raise ModelFormatError(must_be(f"{file.path}: {key}", file.metadata.get(key), allowed))


def _refuse_unread(file: GGUFFile, prefix: str, form: GGUFForm) -> None:
    """A key that is not read could change the result, unless its value is known to have no effect."""
    is_yarn = file.metadata.get(prefix + "rope.scaling.type") == "yarn"
    # A negative factor leaves it to the type: all channels that have to be are extrapolated, or none is.
    neutral = {_EXT_FACTOR: (-1, 1 if is_yarn else 0), **_NEUTRAL}
    read = _READ | form.keys.keys()
    of_keys = {prefix + name: values for name, values in neutral.items() if name not in read} | _TOKENIZER_NEUTRAL
    for key, value in file.metadata.items():
        is_unread = key in of_keys or (key.startswith(prefix) and key.removeprefix(prefix) not in read)
        if is_unread and value not in of_keys.get(key, ()):
            words = " or ".join(["absent", *map(json.dumps, of_keys.get(key, ()))])
            _refuse(file, key, f"{words}, since it is not supported")


def _embedding(file: GGUFFile) -> GGUFTensor:
    tensor = file.tensors.get("token_embd.weight")
    if tensor is None or len(tensor.shape) != 2:
        raise ModelFormatError(f"{file.path}: the matrix 'token_embd.weight' is missing")
    return tensor


def _ends_of_text(file: GGUFFile) -> dict[str, Any]:
    """BOS, and every id that ends an answer: of the text, of a turn, of a message to a tool."""
    fields = Fields(file.metadata, str(file.path))
    names = [f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos", "eot", "eom")]
    given = [fields.integer(name, low=0) if fields.get(name) is not None else None for name in names]
    ends = list(dict.fromkeys(end for end in given[1:] if end is not None))
    return {"bos_token_id": given[0], "eos_token_id": ends if len(ends) != 1 else ends[0]}


def _float_type(file: GGUFFile) -> str | None:
    kinds = {tensor.type_name for tensor in file.tensors.values() if len(tensor.shape) == 2}
    return _FLOATS.get(kinds.pop()) if len(kinds) == 1 else None


def _rope_scaling(file: GGUFFile, fields: Fields, head_dim: int, theta: float) -> dict[str, Any] | None:
    if LONG_FACTORS in file.tensors:
        raise ModelFormatError(f"{file.path}: tensor {LONG_FACTORS!r} must be absent, since longrope is not supported")
    kind = fields.get("rope.scaling.type")
    if kind not in (None, "none", "linear", "yarn"):
        fields.refuse("rope.scaling.type", "one of none, linear, yarn")
    if FREQ_FACTORS in file.tensors:
        if kind in ("linear", "yarn"):
            fields.refuse("rope.scaling.type", f"none beside {FREQ_FACTORS}")
        return _llama3_scaling(file, head_dim, theta)
    if kind is None:  # as llama.cpp has it: linear, by either name, where 0 is no factor
        given = [name for name in ("rope.scaling.factor", "rope.scale_linear") if fields.get(name) is not None]
        if given and fields.number(given[0], zero_allowed=True) not in (0, 1):
            return {"rope_type": "linear", "factor": fields.number(given[0])}
    if kind in (None, "none"):
        return None
    scaling = {"rope_type": kind, "factor": fields.number("rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = fields.integer("rope.scaling.original_context_length")
    return scaling


def _llama3_scaling(file: GGUFFile, head_dim: int, theta: float) -> dict[str, Any]:
    """The rope that one divisor for each channel comes from; raises `ModelFormatError` where it is not Llama 3's."""
    import numpy as np

    if file.tensors[FREQ_FACTORS].shape != (head_dim // 2,):
        raise ModelFormatError(f"{file.path}: {FREQ_FACTORS} must have head_dim / 2 = {head_dim // 2} values")
    given = file.read(FREQ_FACTORS)
    largest = float(given.max())
    if (
        math.isfinite(largest)
        and largest >= 1
        and np.allclose(given, _llama3_divisors(head_dim, theta, largest), rtol=1e-4, atol=0)
    ):
        return {"rope_type": "llama3", "factor": largest, **_LLAMA3}
    allowed = ", ".join(f"{name} {value:g}" for name, value in _LLAMA3.items())
    raise ModelFormatError(
        f"{file.path}: {FREQ_FACTORS} must be what Llama 3 makes of any factor with {allowed} (its safetensors run)"
    )


def _llama3_divisors(head_dim: int, theta: float, factor: float) -> NDArray[Any]:
    """By what Llama 3.1 divides each channel's frequency: 1 where waves are short, `factor` where they are long."""
    import numpy as np

    low, high, original = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"], 8192
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    turns = original * theta**-exponents / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clip(0, 1)
    divisors: NDArray[Any] = 1 / ((1 - smooth) / factor + smooth)
    return divisors
