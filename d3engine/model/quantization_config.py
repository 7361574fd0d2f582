"""The quantization_config of a config.json: our own schemes, and published 8-bit floats and whole numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from d3engine.model.fields import Fields

QUANTIZATION_METHOD = "d3engine"
"""`quant_method` of a directory that `d3engine weights quantize` wrote."""
FP8_GROUPS = "fp8_groups"
"""A scheme of published files alone: 8-bit floats with a scale for 128 input channels of an output channel."""


@dataclass(frozen=True)
class Scheme:
    """How a checkpoint stores a quantized matrix: values of a dtype by safetensors' name, and scales.

    Attributes:
        dtype: of the values.
        has_groups: whether 128 input channels of an output channel share a scale, not all of them.
        values_a_byte: that the values are packed by.
        is_made: whether `d3engine weights quantize` makes it.
    """

    dtype: str
    has_groups: bool = False
    values_a_byte: int = 1
    is_made: bool = True


SCHEMES: Mapping[str, Scheme] = {
    "int8": Scheme("I8"),
    "int4": Scheme("U8", has_groups=True, values_a_byte=2),
    "fp8": Scheme("F8_E4M3"),
    FP8_GROUPS: Scheme("F8_E4M3", has_groups=True, is_made=False),
}
"""`kernels/quantized.py` has the format of each."""
QUANTIZATION_SCHEMES = tuple(name for name, scheme in SCHEMES.items() if scheme.is_made)
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

INTEGER_METHODS = ("awq", "gptq", "compressed-tensors")
"""`quant_method` of AutoAWQ, of AutoGPTQ and GPTQModel, and of llm-compressor: whole numbers in groups with scales."""


@dataclass(frozen=True)
class IntegerLayout:
    """How a checkpoint holds matrices of whole numbers.

    Attributes:
        method: one of `INTEGER_METHODS`.
        bits: of a number: 4 or 8.
        group_size: input channels that share a scale; 0 for all of a row.
        zero_offset: what is added to a stored zero point.
    """

    method: str
    bits: int
    group_size: int
    zero_offset: int = 0


_FORMATS = {"compressed-tensors": ("format", "float-quantized"), "modelopt": ("quant_algo", "FP8")}
"""Of methods with several formats: the field that names the format, and its value for 8-bit floats."""
_CHANGES = ("sparsity_config", "transform_config")
"""Further changes of a matrix by compressed-tensors."""


def read_quantization(fields: Fields, is_tied: bool) -> tuple[str | None, str | None]:
    """The schemes of our own quantization, of the matrices and of the LM head; None for floats.

    How published 8-bit floats are held follows from their files (`ModelFiles.scheme_of_others`), and published whole
    numbers are floats to those who read no blocks. Raises `ModelFormatError` for any other method.
    """
    given = fields.get("quantization_config")
    if given is None:
        return None, None
    if not isinstance(given, Mapping):
        fields.refuse("quantization_config", "an object, or absent")
    own = Fields(given, f"{fields.source}: quantization_config")
    if integer_layouts(own) or is_fp8(own):
        return None, None
    if own.get("quant_method") != QUANTIZATION_METHOD:
        own.refuse(
            "quant_method",
            f"{QUANTIZATION_METHOD!r}, as `d3engine weights quantize` makes of a model with float weights, of 8-bit "
            f"floats: {', '.join(FP8_METHODS)}, or of whole numbers: {', '.join(INTEGER_METHODS)}",
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


def integer_layouts(fields: Fields) -> tuple[IntegerLayout, ...]:
    """The layouts of whole numbers that a quantization_config names; none for another kind.

    Raises `ModelFormatError` for a layout of these methods that is not read.
    """
    method = fields.get("quant_method")
    if method == "awq":
        if str(fields.get("version") or "gemm").lower() != "gemm":
            fields.refuse("version", "'gemm', or absent: no other order of numbers is read")
        _one_of(fields, "bits", (4,))
        return (IntegerLayout(method, 4, _group_size(fields)),)
    if method == "gptq":
        bits = _one_of(fields, "bits", (4, 8))
        version = fields.get("checkpoint_format") or "gptq"
        if version not in ("gptq", "gptq_v2"):
            fields.refuse("checkpoint_format", "'gptq', 'gptq_v2' or absent: no other order of numbers is read")
        if fields.get("dynamic"):
            fields.refuse("dynamic", "absent or empty, since all matrices are read in one way")
        return (IntegerLayout(method, bits, _group_size(fields), zero_offset=int(version == "gptq")),)
    if method == "compressed-tensors" and fields.get("format") in ("pack-quantized", "int-quantized"):
        _check_changes(fields)
        return _layouts_of_groups(fields)
    return ()


def _one_of(fields: Fields, name: str, allowed: tuple[int, ...]) -> int:
    found = fields.integer(name)
    if found not in allowed:
        fields.refuse(name, " or ".join(map(str, allowed)))
    return found


def _group_size(fields: Fields) -> int:
    """The columns of a group; 0 for all of a row."""
    if fields.get("group_size") == -1:
        return 0
    size = fields.integer("group_size", default=128)
    if size % 32:
        fields.refuse("group_size", "a multiple of 32, or -1 for one group a row")
    return size


def _layouts_of_groups(fields: Fields) -> tuple[IntegerLayout, ...]:
    """The layouts of compressed-tensors' `config_groups`, each once. Which one a matrix has follows from its shape."""
    groups = fields.get("config_groups")
    found: dict[IntegerLayout, None] = {}
    for name, group in groups.items() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            fields.refuse("config_groups", f"groups with weights; {name!r} has none")
        own = Fields(weights, f"{fields.source}: config_groups: {name}: weights")
        if own.get("type") not in (None, "int"):
            own.refuse("type", "'int' beside these formats")
        if own.get("strategy") not in ("group", "channel", "tensor"):
            own.refuse("strategy", "one of group, channel, tensor")
        size = _group_size(own) if own.get("strategy") == "group" else 0
        found[IntegerLayout("compressed-tensors", _one_of(own, "num_bits", (4, 8)), size)] = None
    if not found:
        fields.refuse("config_groups", "an object of groups with weights")
    return tuple(found)


def is_fp8(fields: Fields) -> bool:
    """Whether a quantization_config is that of weights in 8-bit floats.

    Raises `ModelFormatError` where one of the `FP8_METHODS` has written another format.
    """
    method = fields.get("quant_method")
    if method not in FP8_METHODS:
        return False
    if method in _FORMATS:
        name, allowed = _FORMATS[method]
        of_integers = ", 'pack-quantized' or 'int-quantized'" if method in INTEGER_METHODS else ""
        if fields.get(name) != allowed:
            fields.refuse(name, f"{allowed!r} beside quant_method {method!r}{of_integers}: other kinds are not read")
    _check_changes(fields)
    return True


def _check_changes(fields: Fields) -> None:
    for name in _CHANGES:
        given = fields.get(name)
        if given and not (isinstance(given, Mapping) and given.get("format", "") == "dense"):
            fields.refuse(name, "absent or empty, since matrices are read as values times scales alone")


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
