"""The normal equations of all windows from one start: sums over positions, from which every fit and its error follow.

The one idea: ridge regression needs sums of products and no stored state. So one pass over a text of any length is
enough, two parts of it are told apart by two objects, and the error of a map on a part it was not fitted on is again
arithmetic with that part's sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FIELDS = ("count", "inputs", "products", "changes", "mixed", "squares")


@dataclass(frozen=True, eq=False)
class Sums:
    """Over positions, with x the state before the first layer and y_k the change of it by window k; float64.

    Attributes:
        count: [] positions.
        inputs: [H] sum of x.
        products: [H, H] sum of x x^T.
        changes: [K, H] sum of y_k.
        mixed: [K, H, H] sum of x y_k^T.
        squares: [K] sum of |y_k|^2.
    """

    count: Tensor
    inputs: Tensor
    products: Tensor
    changes: Tensor
    mixed: Tensor
    squares: Tensor

    @classmethod
    def zero(cls, hidden_size: int, num_windows: int) -> Sums:
        """Of no position."""
        size, windows = hidden_size, num_windows
        shapes = ((), (size,), (size, size), (windows, size), (windows, size, size), (windows,))
        return cls(*(torch.zeros(shape, dtype=torch.float64) for shape in shapes))

    def add(self, before: Tensor, behind: Sequence[Tensor]) -> None:
        """Count the states [T, H] before the first layer, and those behind each window."""
        x = before.double().cpu()
        self.count.add_(x.shape[0])
        self.inputs.add_(x.sum(0))
        self.products.addmm_(x.T, x)
        for window, states in enumerate(behind):
            y = states.double().cpu() - x
            self.changes[window].add_(y.sum(0))
            self.mixed[window].addmm_(x.T, y)
            self.squares[window].add_(y.square().sum())

    def __add__(self, other: Sums) -> Sums:
        return Sums(*(getattr(self, name) + getattr(other, name) for name in FIELDS))

    def named(self) -> dict[str, Tensor]:
        """Its tensors by name, for a file."""
        return {name: getattr(self, name) for name in FIELDS}


@dataclass(frozen=True, eq=False)
class Maps:
    """One map for each window: y_k ~ weight_k x + offset_k, float64 [K, H, H] and [K, H]."""

    weight: Tensor
    offset: Tensor


def solve(sums: Sums, ridge: float) -> Maps:
    """The ridge solution of every window; `ridge` is in units of the mean variance of the inputs."""
    size, windows = sums.inputs.shape[0], sums.squares.shape[0]
    mean, change = sums.inputs / sums.count, sums.changes / sums.count
    spread = sums.products - sums.count * torch.outer(mean, mean)
    mixed = sums.mixed - sums.count * mean[None, :, None] * change[:, None, :]
    regular = spread + ridge * spread.diagonal().mean() * torch.eye(size, dtype=torch.float64)
    found = torch.linalg.solve(regular, mixed.permute(1, 0, 2).reshape(size, windows * size))
    weight = found.reshape(size, windows, size).permute(1, 2, 0)
    return Maps(weight, change - weight @ mean)


def unexplained(sums: Sums, maps: Maps) -> Tensor:
    """Float64 [K]: of the changes' sum of squares around their mean, the part that each map leaves; 1 is no better
    than the mean, and a map that fits another text can be worse."""
    fitted = (maps.weight * (maps.weight @ sums.products)).sum((1, 2))
    crossing = (maps.weight * sums.mixed.transpose(1, 2)).sum((1, 2))
    shifted = (maps.offset * (maps.weight @ sums.inputs)).sum(1)
    error = (
        sums.squares
        - 2 * crossing
        - 2 * (maps.offset * sums.changes).sum(1)
        + fitted
        + 2 * shifted
        + sums.count * maps.offset.square().sum(1)
    )
    return error / (sums.squares - sums.changes.square().sum(1) / sums.count)


def of_rank(sums: Sums, maps: Maps, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """The best maps of a rank near these: down [K, r, H], up [K, H, r] and offset [K, H].

    Reduced-rank regression (Izenman 1975): the changes that the full maps predict are kept in the r directions in
    which they vary most.
    """
    mean, change = sums.inputs / sums.count, sums.changes / sums.count
    spread = sums.products - sums.count * torch.outer(mean, mean)
    predicted = maps.weight @ spread @ maps.weight.transpose(1, 2)
    up = torch.linalg.eigh(predicted).eigenvectors[:, :, -rank:]
    down = up.transpose(1, 2) @ maps.weight
    return down, up, change - (up @ (down @ mean)[..., None])[..., 0]
