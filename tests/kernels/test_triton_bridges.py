"""A window is crossed by Triton's product with its residual, in the interpreter, on sizes that fit no tile."""

import pytest
import torch
from torch import Tensor

import d3engine.kernels.triton as kernels
from d3engine.kernels.matrices import Weight
from d3engine.kernels.quantized import Int8Weight, quantize_int8
from d3engine.model.bridges import Bridge, BridgeWeights

SIZE = 35


@pytest.mark.parametrize("rank", [None, 5], ids=["full", "of low rank"])
@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8"])
def test_the_first_rows_cross_and_the_others_stay(form: str, rank: int | None, device: torch.device) -> None:
    numbers = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if form == "bfloat16" else torch.float32

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=numbers).to(device, dtype)

    def matrix(*shape: int) -> Weight:
        return quantize_int8(drawn(*shape)) if form == "int8" else drawn(*shape)

    weight, down = matrix(SIZE, rank or SIZE), None if rank is None else matrix(rank, SIZE)
    bridge, hidden = BridgeWeights(1, 3, weight, drawn(SIZE), down), drawn(7, SIZE)
    exact = Bridge(1, 3, _wide(weight), bridge.offset.double(), None if down is None else _wide(down))
    for count in (0, 5, 7):
        crossed = hidden.clone()
        bridge.cross(kernels, crossed, torch.tensor([count], dtype=torch.int32, device=device))
        assert torch.equal(crossed[count:], hidden[count:])
        wanted = exact.crossed(hidden[:count].double())
        assert (crossed[:count] - wanted).norm() <= (2e-2 if form == "bfloat16" else 1e-6) * wanted.norm()


def _wide(weight: Weight) -> Tensor:
    return weight.dequantize(torch.float64) if isinstance(weight, Int8Weight) else weight.double()  # type: ignore[union-attr]
