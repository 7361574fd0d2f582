"""Packs bfloat16 matrices into 12 bits a weight, lossless (`kernels/bf12.py`)."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, byref, c_int32, c_void_p

import torch
from torch import Tensor

from d3engine.kernels.bf12 import PACKED_BYTES, PACKED_GROUP, PackedWeight
from d3engine.kernels.matrices import Weight
from d3engine.kernels.native.library import library
from d3engine.kernels.native.model import Linear

MAX_OUTLIERS = 1 / 256
"""The largest share of outliers of a packed matrix: putting them in place takes time."""


class _Bf12Target(Structure):
    """`D3Bf12Target`."""

    _fields_ = (
        ("exponent", POINTER(c_int32)),
        *((name, c_void_p) for name in ("starts", "columns", "weights")),
    )


def pack(matrix: Tensor) -> PackedWeight | None:
    """`matrix` [N, K], bfloat16 on the CPU, in 12 bits a weight; None if it has too many outliers.

    Weights without one of the fifteen neighbouring exponents that most weights have are outliers. Raises `ValueError`
    for another tensor, `LibraryMissing` without the native library.
    """
    if matrix.dtype != torch.bfloat16 or matrix.dim() != 2 or matrix.device.type != "cpu":
        shown = f"{str(matrix.dtype).removeprefix('torch.')} {list(matrix.shape)} on {matrix.device}"
        raise ValueError(f"what is packed must be a bfloat16 matrix on the CPU; got {shown}")
    matrix = matrix.contiguous()
    rows, columns = matrix.shape
    room = int(matrix.numel() * MAX_OUTLIERS)
    packed = torch.empty(rows, -(-columns // PACKED_GROUP) * PACKED_BYTES, dtype=torch.uint8)
    starts = torch.empty(rows + 1, dtype=torch.int64)
    at, weights = torch.empty(room, dtype=torch.int32), torch.empty(room, dtype=torch.bfloat16)
    exponent = c_int32()
    target = _Bf12Target(ctypes.pointer(exponent), *(each.data_ptr() for each in (starts, at, weights)))
    count = library().d3_bf12_pack(matrix.data_ptr(), rows, columns, room, packed.data_ptr(), byref(target))
    if count < 0:
        return None
    return PackedWeight(packed, exponent.value, starts, at[:count].clone(), weights[:count].clone(), columns)


def unpacked(weight: PackedWeight) -> Tensor:
    """The original bfloat16 matrix [N, K]."""
    rows, columns = weight.shape
    padded = torch.empty(rows, -(-columns // PACKED_GROUP) * PACKED_GROUP, dtype=torch.bfloat16)
    library().d3_bf12_unpack(byref(Linear(weight).structure()), 0, rows, padded.data_ptr())
    return padded[:, :columns]


def packed(matrix: Weight) -> Weight:
    """`matrix` packed; unchanged if it is not bfloat16, or if `pack` returns None."""
    if not isinstance(matrix, Tensor) or matrix.dtype != torch.bfloat16:
        return matrix
    made = pack(matrix)
    return matrix if made is None else made
