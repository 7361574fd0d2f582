"""Bridges as an engine holds them: in the kind of matrices that it has, crossed by an operation that its layers use.

The one idea: crossing costs what reading the map costs, so a map is held like a layer's matrices, and stays the same
share of one. What a file holds decides nothing: it is written once, for engines of every kind. Beside int4 layers maps
are int8: one stands for several layers, so its errors weigh more than those of a layer, and its bytes less
(`docs/bridges.md` has figures).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from d3engine.kernels.matrices import Weight
from d3engine.kernels.quantized import quantize_int8
from d3engine.model.bridges import Bridge, Window


@dataclass(frozen=True, eq=False)
class BridgeWeights:
    """What stands in for the layers [first, stop): `h + weight (down h) + offset`.

    `weight` [H, H], or [H, r] beside `down` [r, H]; `offset` [H] in the dtype of activations.
    """

    first: int
    stop: int
    weight: Weight
    offset: Tensor
    down: Weight | None = None

    @property
    def window(self) -> Window:
        return self.first, self.stop

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + self.offset.nbytes + (0 if self.down is None else self.down.nbytes)

    def cross(self, kernels: Any, hidden: Tensor, num_rows: Tensor | None = None) -> None:
        """Take the states `hidden` [T, H] over the window, in place, by the operations of `kernels`.

        `num_rows` int32 [1] on the device: rows from there on are left as they are.
        """
        inner = hidden.clone()
        if self.down is not None:
            inner = hidden.new_zeros(hidden.shape[0], self.down.shape[0])
            kernels.linear_residual(hidden, self.down, None, inner, num_rows=num_rows)
        kernels.linear_residual(inner, self.weight, self.offset, hidden, num_rows=num_rows)


def held(
    bridge: Bridge, *, dtype: torch.dtype, weight_dtype: torch.dtype, quantization: str | None, device: torch.device
) -> BridgeWeights:
    """A bridge of a file for activations of `dtype`, in the kind of an engine's matrices."""

    def matrix(values: Tensor) -> Weight:
        there = values.to(device)
        return quantize_int8(there) if quantization is not None else there.to(weight_dtype).contiguous()

    down = None if bridge.down is None else matrix(bridge.down)
    offset = bridge.offset.to(device, dtype).contiguous()
    return BridgeWeights(bridge.first, bridge.stop, matrix(bridge.weight), offset, down)
