"""Files of bridges for tiny models: a map of every window, far from doing nothing."""

from pathlib import Path

import torch
from depth_oracle import Maps

from d3engine.model.bridges import Bridge, Bridges, write_bridges
from d3engine.model.expected_tensors import fingerprint


def some_maps(layers: int, size: int, seed: int = 0, scale: float = 0.5) -> Maps:
    """Of every window of a model of so many layers, whose states have this size."""
    numbers = torch.Generator().manual_seed(seed)
    return {
        (first, stop): (
            scale * torch.randn(size, size, generator=numbers) / size**0.5,
            scale * torch.randn(size, generator=numbers),
        )
        for first in range(layers)
        for stop in range(first + 1, layers + 1)
    }


def write_maps(maps: Maps, directory: Path, path: Path, rank: int | None = None) -> None:
    """The bridges of the model in `directory`; of a rank, they are made of the first directions of these maps."""
    found = {}
    for window, (weight, offset) in maps.items():
        found[window] = Bridge(*window, weight, offset)
        if rank is not None:
            left, values, right = torch.linalg.svd(weight)
            found[window] = Bridge(*window, left[:, :rank] * values[:rank], offset, right[:rank])
    layers, size = max(stop for _, stop in maps), len(offset)
    write_bridges(Bridges(fingerprint(directory), layers, size, found), path)
