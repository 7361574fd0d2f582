"""bfloat16 in 12 bits a weight is lossless: the same weights and the same logits, bit for bit."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from native_models import Case, Shape, at_places, isas, with_matrices
from torch import Tensor

from d3engine.kernels.bf12 import PackedWeight
from d3engine.kernels.matrices import Weight
from d3engine.kernels.native.bf12 import MAX_OUTLIERS, pack, packed
from d3engine.kernels.native.model import NativeError
from d3engine.kernels.quantized import quantize_int8


def matrix(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).mul_(0.02).bfloat16()


def rare(rows: int, columns: int) -> Tensor:
    """Some weights are zeros of both signs, subnormal, the largest, or far from all others."""
    made = matrix(rows, columns)
    largest = torch.finfo(torch.bfloat16).max
    some = torch.tensor([0.0, -0.0, 1e-40, largest, -largest, -1e-40, 1e-20, 300.0], dtype=torch.bfloat16)
    some = some[: 2 + int(made.numel() * MAX_OUTLIERS)]
    made.flatten()[torch.arange(len(some)) * (made.numel() // len(some))] = some
    return made


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int16)


@pytest.mark.parametrize(("rows", "columns"), [(16, 64), (5, 200), (33, 576), (70, 63), (9, 1025), (1, 700)])
def test_every_weight_comes_back_to_the_bit(rows: int, columns: int) -> None:
    for given in (matrix(rows, columns), rare(rows, columns)):
        made = pack(given)
        assert made is not None
        assert made.shape == given.shape
        assert torch.equal(bits(made.dequantize(torch.bfloat16)), bits(given))
        assert torch.equal(made.dequantize(torch.float32), given.float())


def test_the_bytes_are_those_that_are_described() -> None:
    """Unpacks column by column, as `kernels/bf12.py` describes the format."""
    given = rare(7, 130)
    made = pack(given)
    assert made is not None
    found = torch.zeros_like(bits(given))
    for row in range(7):
        for column in range(130):
            group, within = divmod(column, 64)
            a, b, lane, j = within // 32, within // 16 % 2, within // 4 % 4, within % 4
            byte = 16 * lane + 8 * a + 2 * j + b
            own = made.packed[row, 96 * group : 96 * group + 96].tolist()
            code = own[64 + byte % 32] >> (4 if byte >= 32 else 0) & 15
            exponent = made.exponent + code if code else 0
            value = (own[byte] & 0x80) << 8 | exponent << 7 | own[byte] & 0x7F
            found[row, column] = value - 2**16 if value >= 2**15 else value
        first, last = made.starts[row : row + 2].tolist()
        found[row, made.columns[first:last].long()] = bits(made.weights[first:last])
    assert torch.equal(found, bits(given))


def test_it_takes_three_quarters_of_the_bytes() -> None:
    given = matrix(256, 1024)
    made = pack(given)
    assert made is not None
    assert 0.75 <= made.nbytes / given.nbytes < 0.76
    assert made.nbytes == sum(tensor.nbytes for tensor in made.tensors)


def test_slices_of_rows_hold_only_their_own_outliers() -> None:
    given = rare(40, 200)
    made = pack(given)
    assert made is not None
    assert made.weights.numel() >= 6
    for start, stop in ((0, 40), (0, 7), (5, 6), (12, 40), (30, 64)):
        part = made.rows(start, stop)
        assert part.packed.data_ptr() == made.packed[start:].data_ptr()
        assert torch.equal(bits(part.dequantize(torch.bfloat16)), bits(given[start:stop]))


def test_what_would_gain_too_little_stays_as_it_is() -> None:
    far_apart = torch.logspace(-30, 30, 64 * 64).view(64, 64).bfloat16()
    assert pack(far_apart) is None
    assert packed(far_apart) is far_apart
    few = matrix(64, 64)
    few.flatten()[: int(64 * 64 * MAX_OUTLIERS)] = 1e20
    assert pack(few) is not None
    few[-1, -1] = 1e20
    assert pack(few) is None


def test_only_bfloat16_matrices_of_the_cpu_are_packed() -> None:
    for given in (torch.zeros(4, 4), torch.zeros(4, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match=r"must be a bfloat16 matrix on the CPU; got (float32|bfloat16) \[4"):
            pack(given)
    for other in (torch.zeros(4, 4), quantize_int8(torch.ones(4, 4))):
        assert packed(other) is other


@pytest.mark.parametrize("isa", isas())
def test_logits_are_those_of_bfloat16_to_the_bit(isa: str) -> None:
    """With few rows (a direct product), with more (unpacked first), and with many (packed GEMM)."""
    case = Case(Shape(rows=60, hidden=200, intermediate=600, head_dim=24, vocab=300, form="packed", bias=True))
    for places in (range(1), range(3), range(5), range(12), range(30), range(60)):
        rows = at_places(case.rows, np.array(places))
        _, _, logits = case.decode(2, rows, isa=isa, num_threads=2)
        held, case.model = case.model, with_matrices(case.model, wide)
        _, _, wanted = case.decode(2, rows, isa=isa, num_threads=2)
        case.model = held
        np.testing.assert_array_equal(logits.view(np.int32), wanted.view(np.int32))


def wide(weight: Weight) -> Tensor:
    assert isinstance(weight, PackedWeight)
    return weight.dequantize(torch.bfloat16).contiguous()


WRONG = {
    "a column that the matrix has not": {"columns": (-1, 200)},
    "a column before the first": {"columns": (0, -1)},
    "columns that are not in order": {"columns": (0, 150)},
    "rows that begin before the one above": {"starts": (-1, -1)},
    "a first row that begins behind others": {"starts": (0, 1)},
}


@pytest.mark.parametrize("changes", WRONG.values(), ids=WRONG)
def test_outliers_out_of_order_or_bounds_are_refused(changes: dict[str, tuple[int, int]]) -> None:
    case = Case(Shape(hidden=200, form="packed"))
    given = matrix(97, 200)
    given[0, [20, 90]] = 1e20
    head = pack(given)
    assert head is not None
    assert head.columns[:2].tolist() == [20, 90]
    case.model = replace(case.model, lm_head=head)
    case.decoder()
    ((name, (place, value)),) = changes.items()
    other = getattr(head, name).clone()
    other[place] = value
    case.model = replace(case.model, lm_head=replace(head, **{name: other}))
    with pytest.raises(NativeError, match="the sizes of the model do not fit each other"):
        case.decoder()
