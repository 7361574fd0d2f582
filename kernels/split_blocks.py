"""Matrices in blocks with codes and scales apart, as Triton's kernels read them: the bytes of a file, aligned.

A row of blocks of 210 or 34 bytes has no loads of 16 bytes, and its scales lie between its codes. So the codes of a row
stand in one tensor, and all that they are multiplied by in another, as 32-bit words. Both together are as large as the
blocks. `kernels/triton/block_values.py` makes floats of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from d3engine.kernels.blocks import BLOCK_FORMATS, BlockWeight
from d3engine.kernels.weight_format import WeightFormat


@dataclass(frozen=True)
class _Parts:
    """Where in a block its parts are, in bytes: codes, whole words, and one float16 number, which needs half a word.

    A row of scales has the words of all its blocks, then their halves, two in a word. `in_pairs`: blocks have 32
    columns of four bits, the first 16 of them in low halves of bytes. Then two neighbouring blocks share 32 bytes, the
    first in the low halves; the last block of an odd number has a neighbour of zeros. So are the columns of all types
    of four bits, in runs of 32.
    """

    codes: slice
    words: slice = field(default_factory=lambda: slice(0, 0))
    half: int | None = None
    in_pairs: bool = False


_PARTS = {
    "Q4_0": _Parts(slice(2, 18), half=0, in_pairs=True),
    "Q4_1": _Parts(slice(4, 20), slice(0, 4), in_pairs=True),
    "Q5_0": _Parts(slice(6, 22), slice(2, 6), half=0, in_pairs=True),
    "Q5_1": _Parts(slice(8, 24), slice(0, 8), in_pairs=True),
    "Q8_0": _Parts(slice(2, 34), half=0),
    "Q4_K": _Parts(slice(16, 144), slice(0, 16)),
    "Q5_K": _Parts(slice(16, 176), slice(0, 16)),
    "Q6_K": _Parts(slice(0, 192), slice(192, 208), half=208),
    "U4_32": _Parts(slice(4, 20), slice(0, 4), in_pairs=True),
    "U4_128": _Parts(slice(4, 68), slice(0, 4)),
    "U8_32": _Parts(slice(4, 36), slice(0, 4)),
    "U8_128": _Parts(slice(4, 132), slice(0, 4)),
}

SPLIT_TYPES = frozenset(_PARTS)
"""Those of `BLOCK_FORMATS` that Triton's kernels read; matrices of the others become floats for them."""


@dataclass(frozen=True, eq=False)
class SplitBlockWeight(WeightFormat):
    """A matrix [N, K] of the type `type_name`, one of `SPLIT_TYPES`: `codes` uint8 [N, bytes], `scales` int32 [N, W].

    `_Parts` says what these hold.
    """

    type_name: str
    codes: Tensor
    scales: Tensor
    num_columns: int  # K
    native_kind = None

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.codes.shape[0], self.num_columns))

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.codes, self.scales

    def rows(self, start: int, stop: int) -> SplitBlockWeight:
        """Output channels [start, stop) alone, without a copy."""
        return self._of(self.codes[start:stop], self.scales[start:stop])

    def at(self, places: Tensor) -> SplitBlockWeight:
        """The rows at int64 `places` [T], copied."""
        there = places.to(self.codes.device)
        return self._of(self.codes[there], self.scales[there])

    def above(self, others: Sequence[Any]) -> SplitBlockWeight:
        """This matrix on top of others of its type, copied."""
        codes, scales = (torch.cat(parts) for parts in zip(self.tensors, *(o.tensors for o in others), strict=True))
        return self._of(codes, scales)

    def _of(self, codes: Tensor, scales: Tensor) -> SplitBlockWeight:
        return SplitBlockWeight(self.type_name, codes, scales, self.num_columns)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        return self.joined().dequantize(dtype).to(self.codes.device)

    def joined(self) -> BlockWeight:
        """The same matrix in blocks, on the CPU."""
        layout, parts = BLOCK_FORMATS[self.type_name], _PARTS[self.type_name]
        rows, count = self.codes.shape[0], self.num_columns // layout.columns
        codes, scales = (tensor.cpu() for tensor in self.tensors)
        blocks = torch.empty(rows, count, layout.nbytes, dtype=torch.uint8)
        codes = _unpaired(codes) if parts.in_pairs else codes.view(rows, count, -1)
        blocks[:, :, parts.codes] = codes[:, :count]
        bytes_of_scales = scales.contiguous().view(torch.uint8)
        size = parts.words.stop - parts.words.start
        blocks[:, :, parts.words] = bytes_of_scales[:, : count * size].reshape(rows, count, size)
        if parts.half is not None:
            halves = bytes_of_scales[:, count * size : count * (size + 2)]
            blocks[:, :, parts.half : parts.half + 2] = halves.reshape(rows, count, 2)
        return BlockWeight(self.type_name, blocks.flatten(1), self.num_columns)


def split_columns(type_name: str, columns: int) -> tuple[int, int]:
    """Bytes of codes and words of scales of a row of `columns` columns."""
    parts, count = _PARTS[type_name], columns // BLOCK_FORMATS[type_name].columns
    codes = (count + count % 2 * parts.in_pairs) * (parts.codes.stop - parts.codes.start)
    words = count * (parts.words.stop - parts.words.start) // 4
    return codes, words + (0 if parts.half is None else -(-count // 2))


def split_blocks(weight: BlockWeight, device: torch.device | str) -> SplitBlockWeight:
    """A matrix in blocks of one of `SPLIT_TYPES` with codes and scales apart, on `device`."""
    layout, parts = BLOCK_FORMATS[weight.type_name], _PARTS[weight.type_name]
    blocks = weight.blocks.to(device).view(weight.shape[0], -1, layout.nbytes)
    codes = blocks[:, :, parts.codes]
    codes = _paired(codes) if parts.in_pairs else codes.flatten(1)
    scales = [blocks[:, :, parts.words].flatten(1)]
    if parts.half is not None:
        halves = blocks[:, :, parts.half : parts.half + 2]
        scales.append(F.pad(halves, (0, 0, 0, blocks.shape[1] % 2)).flatten(1))
    words = torch.cat(scales, dim=1).view(torch.int32)
    return SplitBlockWeight(weight.type_name, codes.contiguous(), words, weight.num_columns)


def _paired(codes: Tensor) -> Tensor:
    """[N, B, 16] of blocks of 32 columns as [N, 32 a pair of blocks]: see `_Parts`."""
    codes = F.pad(codes, (0, 0, 0, codes.shape[1] % 2))
    numbers = torch.cat((codes & 15, codes >> 4), dim=2).view(codes.shape[0], -1, 2, 32)
    return (numbers[:, :, 0] | numbers[:, :, 1] << 4).flatten(1)


def _unpaired(codes: Tensor) -> Tensor:
    """The inverse, which has the neighbour of the last block too."""
    pairs = codes.view(codes.shape[0], -1, 1, 32)
    numbers = torch.cat((pairs & 15, pairs >> 4), dim=2).view(codes.shape[0], -1, 32)
    return numbers[:, :, :16] | numbers[:, :, 16:] << 4
