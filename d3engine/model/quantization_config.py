"""The quantization_config of a config.json: our own schemes, and published 8-bit floats."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeAlias

from d3engine.model.fields import Fields

QUANTIZATION_METHOD = "d3engine"
"""`quant_method` of a directory that `d3engine weights quantize` wrote."""
QUANTIZATION_SCHEMES = ("int8", "int4", "fp8")
FP8_GROUPS = "fp8_groups"
"""A scheme of published files alone: 8-bit floats with a scale for 128 input channels of an output channel."""
LM_HEAD_SCHEMES = ("int8", "int4", "float")
"""What an LM head may be with quantized matrices; one that is the embedding too is not int4."""
DEFAULT_HEAD_SCHEME = "int8"
"""Under both schemes: four bits of a head cost far more accuracy than those of all layers."""

FP8_METHODS = ("compressed-tensors", "fbgemm_fp8", "fp8", "modelopt")
"""`quant_method` of llm-compressor, of Meta, of AutoFP8, Qwen and DeepSeek, and of NVIDIA.

All store float8_e4m3fn values with scales; the method only decides whether a file is of that kind.
"""

Block: TypeAlias = tuple[int, int]
"""Rows and columns of a matrix that share a scale."""

_FORMATS = {"compressed-tensors": ("format", "float-quantized"), "modelopt": ("quant_algo", "FP8")}
"""Of methods with several formats: the field that names the format, and its value for 8-bit floats."""
_CHANGES = ("sparsity_config", "transform_config")
"""Further changes of a matrix by compressed-tensors."""


def read_quantization(fields: Fields, is_tied: bool) -> tuple[str | None, str | None]:
    """The schemes of our own quantization, of the matrices and of the LM head; None for floats.

    How published 8-bit floats are held follows from their files (`ModelFiles.scheme_of_others`). Raises
    `ModelFormatError` for any other method.
    """
    given = fields.get("quantization_config")
    if given is None:
        return None, None
    if not isinstance(given, Mapping):
        fields.refuse("quantization_config", "an object, or absent")
    own = Fields(given, f"{fields.source}: quantization_config")
    if is_fp8(own):
        return None, None
    if own.get("quant_method") != QUANTIZATION_METHOD:
        own.refuse(
            "quant_method",
            f"{QUANTIZATION_METHOD!r}, as `d3engine weights quantize` makes of a model with float weights, or of 8-bit "
            f"floats: {', '.join(FP8_METHODS)}",
        )
    scheme = own.get("scheme")
    if scheme not in QUANTIZATION_SCHEMES:
        own.refuse("scheme", f"one of {', '.join(QUANTIZATION_SCHEMES)}")
    # Old directories do not name the head: an own one is as the matrices, one tied to the embedding float.
    head = given.get("lm_head", "float" if is_tied else scheme)
    if head not in head_schemes(is_tied):
        tied = " (this model's is its embedding)" if is_tied else ""
        own.refuse("lm_head", f"one of {', '.join(head_schemes(is_tied))}, or absent{tied}")
    for name in given:
        if name not in ("quant_method", "scheme", "lm_head"):
            own.refuse(name, "absent, since only quant_method, scheme and lm_head are read")
    return str(scheme), None if head == "float" else str(head)


def head_schemes(is_tied: bool) -> tuple[str, ...]:
    """Those of LM_HEAD_SCHEMES that a head can have: rows of an embedding are not read from int4."""
    return tuple(scheme for scheme in LM_HEAD_SCHEMES if not (is_tied and scheme == "int4"))


def is_fp8(fields: Fields) -> bool:
    """Whether a quantization_config is that of weights in 8-bit floats.

    Raises `ModelFormatError` where one of the `FP8_METHODS` has written another format.
    """
    method = fields.get("quant_method")
    if method not in FP8_METHODS:
        return False
    if method in _FORMATS:
        name, allowed = _FORMATS[method]
        if fields.get(name) != allowed:
            fields.refuse(name, f"{allowed!r} beside quant_method {method!r}: other kinds are not read")
    for name in _CHANGES:
        given = fields.get(name)
        if given and not (isinstance(given, Mapping) and given.get("format", "") == "dense"):
            fields.refuse(name, "absent or empty, since matrices are read as values times scales alone")
    return True


def block_of(fields: Fields) -> Block | None:
    """The rows and columns that share a scale, where a quantization_config names them."""
    named = fields.get("weight_block_size") or _block_of_groups(fields.get("config_groups"))
    if named is None:
        return None
    sizes = [int(size) for size in re.findall(r"\d{1,9}", named)] if isinstance(named, str) else named
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(type(size) is int for size in sizes):
        fields.refuse("weight_block_size", "two whole numbers, the rows and the columns that share a scale, or absent")
    rows, columns = sizes
    if rows < 1 or columns < 1:
        fields.refuse("weight_block_size", "two whole numbers above 0")
    return rows, columns


def _block_of_groups(groups: Any) -> Any:
    """The block of the first group of matrices that has one, as compressed-tensors writes it."""
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping) and weights.get("block_structure"):
            return weights["block_structure"]
    return None
