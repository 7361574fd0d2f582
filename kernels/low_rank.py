"""Low-rank maps (LoRA) that rows of a step add to the products of their layers: for each row those of one adapter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

PARTS = {"qkv": ("q", "k", "v"), "output": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}
"""The matrices of a layer, and what lies in each from top to bottom: every part has its own map."""

LAYER_MAPS = tuple(part for parts in PARTS.values() for part in parts)
"""The maps of a layer in order; the LM head's comes behind those of all layers."""

LM_HEAD = "lm_head"

PADDED_TO = 16
"""Values to which rows of a map are padded in memory, so that the native library reads whole vectors."""


@dataclass(frozen=True, eq=False)
class LowRankMap:
    """A row x becomes (x downᵀ) up: `down` [r, K] and `up` [r, N], of one float dtype; `up` holds LoRA's scale."""

    down: Tensor
    up: Tensor

    @property
    def rank(self) -> int:
        return self.down.shape[0]

    @property
    def nbytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in (self.down, self.up))

    def to(self, dtype: torch.dtype, device: torch.device) -> LowRankMap:
        """The same in rows that are padded with zeros."""
        return LowRankMap(*(_padded(tensor, dtype, device) for tensor in (self.down, self.up)))


def _padded(matrix: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    rows, columns = matrix.shape
    # One more unit: a vector may begin at any column.
    stride = (-(-columns // PADDED_TO) + 1) * PADDED_TO
    padded = torch.zeros(rows, stride, dtype=dtype, device=device)
    padded[:, :columns] = matrix
    return padded[:, :columns]


Maps: TypeAlias = tuple[LowRankMap | None, ...]
"""Those of one adapter for the parts of a matrix; None where it has none."""


@dataclass(frozen=True, eq=False)
class RowMaps:
    """The maps that T rows add to their products with one matrix.

    Attributes:
        adapters: int32 [T] on the device: a number for the adapter of each row, -1 for none.
        maps: what an operation without a device asks for the maps of a number; None: it has none.
        stops: where the outputs of each part end.
        table: int64 [numbers, parts, 3] on the device, maybe a view: addresses of `down` and `up`, and the rank, 0 for
            none.
        most: a rank that no map exceeds.
    """

    adapters: Tensor
    maps: Callable[[int], Maps | None]
    stops: tuple[int, ...]
    table: Tensor
    most: int

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """What an operation reads of it on a device."""
        return self.adapters, self.table

    @property
    def shape(self) -> tuple[object, ...]:
        """What an operation depends on besides."""
        return (self.stops, self.most)

    def rows(self, which: slice) -> RowMaps:
        """Those of some of the rows."""
        return replace(self, adapters=self.adapters[which])


def add_maps_(out: Tensor, x: Tensor, maps: RowMaps) -> Tensor:
    """Add to `out` [T, N] what the maps make of `x` [T, K], in place; rows without an adapter stay as they are."""
    for number in sorted(set(maps.adapters.tolist())):
        own = maps.maps(number) if number >= 0 else None
        if own is None:
            continue
        rows = (maps.adapters == number).nonzero().squeeze(1)
        for part, start, stop in zip(own, (0, *maps.stops), maps.stops, strict=False):
            if part is not None:
                down, up = part.down.to(x.dtype), part.up.to(x.dtype)
                out[rows, start:stop] += (x[rows] @ down.t() @ up).to(out.dtype)
    return out
