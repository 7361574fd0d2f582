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

from d3engine.kernels.blocks import BLOCK_FORMATS, INTEGER_TYPES, BlockWeight
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
        """As gguf's own code, where the matrix lies: code x scale is exact in float32, so there is one rounding."""
        scales, minima = self._scales()
        values = self._codes().float().view(self.shape[0], scales.shape[1], -1).mul_(scales[:, :, None])
        if minima is not None:
            values += minima[:, :, None]
        return values.view(self.shape).to(dtype)

    def _codes(self) -> Tensor:
        """Whole numbers [N, K]; of types without a minimum their offset is taken off."""
        rows, name = self.codes.shape[0], self.type_name
        if name == "Q8_0":
            return self.codes.view(torch.int8)
        if name.startswith("U8"):
            return self.codes
        # 32 bytes have two runs of 32 columns. Blocks of 256 may have further bits before or behind those bytes.
        codes = self.codes.view(rows, -1, {"Q5_K": 160, "Q6_K": 192}.get(name, 32))
        places = {"Q5_K": slice(32, 160), "Q6_K": slice(0, 128)}.get(name, slice(0, 32))
        pairs = codes[:, :, places].reshape(rows, -1, 1, 32)
        runs = torch.cat((pairs & 15, pairs >> 4), dim=2).to(torch.int16)
        if name == "Q5_K":
            fifth = codes[:, :, None, :32] >> torch.arange(8, device=codes.device)[:, None] & 1
            runs = runs.view(fifth.shape) + 16 * fifth
        elif name == "Q6_K":  # the runs of two pairs in turns; four runs share 32 bytes of further bits
            runs = runs.view(rows, -1, 2, 2, 32).transpose(2, 3).reshape(rows, -1, 4, 32)
            further = codes[:, :, 128:].reshape(rows, -1, 1, 32)
            runs = runs + 16 * (further >> 2 * torch.arange(4, device=codes.device)[:, None] & 3)
        numbers = runs.reshape(rows, -1)[:, : self.num_columns]
        if name in ("Q5_0", "Q5_1"):
            words = self._words()[:, :, -1:] >> torch.arange(32, device=codes.device)
            numbers = numbers + 16 * (words & 1).view(numbers.shape)
        return numbers - {"Q4_0": 8, "Q5_0": 16, "Q6_K": 32}.get(name, 0)

    def _scales(self) -> tuple[Tensor, Tensor | None]:
        """Scales and minima, float32 [N, K / g], of as many columns as share them."""
        words, name, rows = self._words(), self.type_name, self.codes.shape[0]
        if name in INTEGER_TYPES:  # a float of 24 bits, and a zero point
            scales = (words[:, :, 0] & -256).view(torch.float32)
            return scales, -(words[:, :, 0] & 255) * scales
        numbers = words.contiguous().view(torch.uint8).view(rows, words.shape[1], -1)
        if name in ("Q4_K", "Q5_K"):  # six bits each: eight scales and eight minima in twelve bytes
            first, second, last = numbers[:, :, 4:].reshape(rows, -1, 3, 4).unbind(2)
            of_runs = [
                torch.cat((low & 63, high | low >> 2 & 48), dim=2)
                for low, high in ((first, last & 15), (second, last >> 4))
            ]
            halves = numbers[:, :, :4].contiguous().view(torch.float16).float()
            scales, minima = (
                (half * of_run).view(rows, -1) for half, of_run in zip(torch.split(halves, 1, 2), of_runs, strict=True)
            )
            return scales, -minima
        if _PARTS[name].half is None:
            halves = numbers[:, :, :4].contiguous().view(torch.float16).float()
            return halves[:, :, 0], halves[:, :, 1]
        behind = self.scales[:, words.shape[1] * words.shape[2] :].contiguous().view(torch.float16)
        scales = behind[:, : words.shape[1]].float()
        if name == "Q6_K":
            scales = (scales[:, :, None] * numbers.view(torch.int8)).view(rows, -1)
        return scales, None

    def _words(self) -> Tensor:
        """int32 [N, blocks, words of a block]."""
        parts, count = _PARTS[self.type_name], self.num_columns // BLOCK_FORMATS[self.type_name].columns
        each = (parts.words.stop - parts.words.start) // 4
        return self.scales[:, : count * each].view(self.scales.shape[0], count, each)


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
