"""Random matrices in blocks."""

from collections.abc import Sequence

import torch

from d3engine.kernels.blocks import BLOCK_FORMATS, BlockWeight


def random_blocks(type_name: str, rows: int, columns: int = 512, seed: int = 0, deviation: float = 0.0) -> BlockWeight:
    """A matrix of random bits with finite scales; `deviation`: about that of its weights, 0 leaves them as they are."""
    generator = torch.Generator().manual_seed(seed)
    layout = BLOCK_FORMATS[type_name]
    blocks = torch.randint(0, 256, (rows, columns // layout.columns, layout.nbytes), generator=generator)
    made = BlockWeight(type_name, blocks.to(torch.uint8).flatten(1), columns)
    numbers = max(1, len(layout.halves)), blocks.numel() // layout.nbytes
    _set_scales(made, torch.randn(numbers, generator=generator))
    if deviation:
        scales = torch.randn(numbers, generator=generator)
        _set_scales(made, torch.ones_like(scales))
        _set_scales(made, scales * deviation / made.dequantize(torch.float32).std())
    return made


def constant_blocks(type_name: str, bytes_of_rows: Sequence[int], columns: int = 512) -> BlockWeight:
    """A matrix whose rows consist of one byte each, but for scales and minima of blocks, which are 1."""
    made = random_blocks(type_name, len(bytes_of_rows), columns)
    made.blocks[:] = torch.tensor(bytes_of_rows, dtype=torch.uint8)[:, None]
    layout = BLOCK_FORMATS[type_name]
    _set_scales(made, torch.ones(max(1, len(layout.halves)), made.blocks.numel() // layout.nbytes))
    return made


def _set_scales(weight: BlockWeight, numbers: torch.Tensor) -> None:
    layout = BLOCK_FORMATS[weight.type_name]
    blocks = weight.blocks.view(-1, layout.nbytes)
    if layout.bits is not None:  # a float of 24 bits behind the zero point
        blocks[:, 1:4] = numbers[0].half().float().view(torch.uint8).view(-1, 4)[:, 1:]
    for place, halves in zip(layout.halves, numbers.half(), strict=False):
        blocks[:, place : place + 2] = halves.view(torch.uint8).view(-1, 2)
