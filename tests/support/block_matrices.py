"""Random matrices in ggml's blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from d3engine.kernels.blocks import _HALVES, BlockWeight


def random_blocks(type_name: str, rows: int, columns: int = 512, seed: int = 0, deviation: float = 0.0) -> BlockWeight:
    """A matrix of random bits with finite scales; `deviation`: about that of its weights, 0 leaves them as they are."""
    generator = torch.Generator().manual_seed(seed)
    size, places = _HALVES[type_name]
    blocks = torch.randint(0, 256, (rows, columns // COLUMNS.get(type_name, 256), size), generator=generator)
    made = BlockWeight(type_name, blocks.to(torch.uint8).flatten(1), columns)
    _set_halves(made, torch.randn(len(places), blocks.numel() // size, generator=generator))
    if deviation:
        halves = torch.randn(len(places), blocks.numel() // size, generator=generator)
        _set_halves(made, torch.ones_like(halves))
        _set_halves(made, halves * deviation / made.dequantize(torch.float32).std())
    return made


def constant_blocks(type_name: str, bytes_of_rows: Sequence[int], columns: int = 512) -> BlockWeight:
    """A matrix whose rows consist of one byte each, but for scales and minima of blocks, which are 1."""
    made = random_blocks(type_name, len(bytes_of_rows), columns)
    made.blocks[:] = torch.tensor(bytes_of_rows, dtype=torch.uint8)[:, None]
    size, places = _HALVES[type_name]
    _set_halves(made, torch.ones(len(places), made.blocks.numel() // size))
    return made


COLUMNS = dict.fromkeys(("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL"), 32)


def _set_halves(weight: BlockWeight, numbers: torch.Tensor) -> None:
    size, places = _HALVES[weight.type_name]
    for place, halves in zip(places, numbers.half(), strict=True):
        weight.blocks.view(-1, size)[:, place : place + 2] = halves.view(torch.uint8).view(-1, 2)
