"""Matrices of whole numbers in groups of input channels, with a scale and a zero point each, as rows of blocks."""

from __future__ import annotations

import torch
from torch import Tensor

# A block is a word, then a code for each column. The upper 24 bits of the word, little endian, are those of a float32,
# the scale; the lower eight are the zero point. 24 bits hold any scale of float16 or bfloat16 exactly, and a scale
# times the difference of a code and a zero point has the 24 bits of a float32. Codes of four bits are two in a byte:
# column j of a run low and column j of the next run high, with runs of 16 columns in a block of 32, else of 32.


def pack_integer_groups(codes: Tensor, zero_points: Tensor, scales: Tensor, columns: int, bits: int) -> Tensor:
    """The blocks uint8 [N, bytes of a row], each of `columns` columns, that stand for (code - zero point) x scale.

    `codes` uint8 [N, K], below 2**bits; `zero_points` uint8 and `scales` float [N, groups] of equal groups of columns,
    each of whole blocks. Raises `ValueError` for a scale that is not finite or so large that a weight may not be, and
    for one that needs more than 24 bits.
    """
    rows, num_columns = codes.shape
    blocks = num_columns // columns
    words = scales.float().view(torch.int32)
    if not torch.isfinite(scales.float() * 255).all() or (words & 0xFF).any():
        raise ValueError("scales must be finite and below 1e36, each of at most 16 significant bits")
    words = (words | zero_points).repeat_interleave(blocks // scales.shape[1], dim=1).contiguous()
    made = torch.empty(rows, blocks, 4 + columns * bits // 8, dtype=torch.uint8)
    made[:, :, :4] = words.view(torch.uint8).view(rows, blocks, 4)
    if bits == 8:
        made[:, :, 4:] = codes.view(rows, blocks, columns)
    else:
        pairs = codes.view(rows, blocks, -1, 2, _run(columns))
        made[:, :, 4:] = (pairs[:, :, :, 0] | pairs[:, :, :, 1] << 4).flatten(2)
    return made.flatten(1)


def unpack_integer_groups(blocks: Tensor, columns: int, bits: int) -> Tensor:
    """The float32 matrix [N, K] that rows of blocks stand for."""
    each = blocks.view(blocks.shape[0], -1, 4 + columns * bits // 8)
    words = each[:, :, :4].contiguous().view(torch.int32)
    codes = each[:, :, 4:]
    if bits == 4:
        bytes_of_pairs = codes.reshape(*each.shape[:2], -1, 1, _run(columns))
        codes = torch.cat([bytes_of_pairs & 15, bytes_of_pairs >> 4], dim=3).flatten(2)
    return ((codes.float() - (words & 0xFF)) * (words & ~0xFF).view(torch.float32)).flatten(1)


def scales_of_integer_groups(blocks: Tensor, columns: int, bits: int) -> Tensor:
    """The scales float32 [N, blocks of a row]."""
    each = blocks.view(blocks.shape[0], -1, 4 + columns * bits // 8)
    return (each[:, :, :4].contiguous().view(torch.int32) & ~0xFF).view(torch.float32).squeeze(2)


def _run(columns: int) -> int:
    return 16 if columns == 32 else 32
