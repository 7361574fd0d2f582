"""Which checkpoints in 8-bit floats can be read, by what their config.json says of how they were made.

The one idea: the ways in which they are published differ in names. In all of them a matrix is float8_e4m3fn values
times scales that lie beside it, so all that a method's name decides is whether its files are of that kind.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeAlias

from d3engine.model.fields import Fields

FP8_METHODS = ("compressed-tensors", "fbgemm_fp8", "fp8", "modelopt")
"""What `quant_method` says: of llm-compressor, of Meta, of AutoFP8, Qwen and DeepSeek, and of NVIDIA."""

Block: TypeAlias = tuple[int, int]
"""Rows and columns of a matrix that share a scale."""

_FORMATS = {"compressed-tensors": ("format", "float-quantized"), "modelopt": ("quant_algo", "FP8")}
"""Of methods that make other things too: the field that tells which, and what it says of 8-bit floats."""
_CHANGES = ("sparsity_config", "transform_config")
"""What compressed-tensors may do to a matrix besides."""


def is_fp8(fields: Fields) -> bool:
    """Whether a quantization_config is that of weights in 8-bit floats.

    Raises `ModelFormatError` for one of the methods that make such weights where it has made something else.
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
