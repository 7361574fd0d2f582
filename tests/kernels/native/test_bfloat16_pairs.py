"""bfloat16 matrices that meet rows rounded to bfloat16 (`kernels/bfloat16_pairs.py`)."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from native_models import Case, Shape, assert_same_bits_in_any_chunks, assert_same_bits_in_batches, isas, with_matrices

from d3engine.kernels.bfloat16_pairs import PairsWeight, in_pairs
from d3engine.kernels.matrices import Weight

SHAPE = Shape(rows=14, hidden=136, intermediate=202, head_dim=24, max_positions=200, vocab=300, form="pairs")


@pytest.mark.parametrize("isa", isas())
def test_logits_have_the_same_bits_in_any_batch(isa: str) -> None:
    """Alone and with others, on any number of threads; rows end in the middle of a vector."""
    numbers = np.random.default_rng(0)
    assert_same_bits_in_batches(Case(SHAPE), 3, [numbers.permutation(14)[:size] for size in range(1, 14)], isa=isa)
    many = Case(replace(SHAPE, layers=1, rows=70, intermediate=600))
    batches = ([69], [16, 33], range(9), range(18), range(2, 35), range(60))
    assert_same_bits_in_batches(many, 1, batches, isa=isa, max_rows=80)


@pytest.mark.parametrize("isa", isas())
def test_logits_of_a_prompt_are_the_same_bits_in_any_chunks(isa: str) -> None:
    """Many rows take the packed product, one row does not."""
    assert_same_bits_in_any_chunks(Case(replace(SHAPE, max_positions=300)), isa=isa, num_threads=2)


@pytest.mark.parametrize("isa", isas())
def test_logits_are_nearer_to_rounded_rows_than_to_exact_ones(isa: str) -> None:
    """The reference rounds the same rows; what is left is where sums of another order fall to another number."""
    case = Case(SHAPE)
    tokens, _, found = case.decode(1, isa=isa, num_threads=2)
    _, _, rounded = case.reference(1)
    exact = with_matrices(case.model, floats)
    case.model = exact
    _, _, wanted = case.reference(1)

    def apart(others: np.ndarray) -> float:
        return float((np.linalg.norm(found - others, axis=2) / np.linalg.norm(others, axis=2)).mean())

    assert apart(rounded) < apart(wanted) / 4
    assert 1e-4 < apart(wanted) < 1e-2
    assert tokens.shape == (1, 14)


def floats(matrix: Weight) -> Weight:
    return matrix.values.float() if isinstance(matrix, PairsWeight) else matrix


@pytest.mark.parametrize("isa", isas())
def test_a_row_of_nan_stays_nan_and_spoils_no_other(isa: str) -> None:
    """Rounding to bfloat16 could make a number of it."""
    case = Case(SHAPE)
    _, _, wanted = case.decode(1, isa=isa)
    first = case.rows.tokens[0]
    case.model.embedding[first] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    _, _, found = case.decode(1, isa=isa)
    spoilt = case.rows.tokens == first
    assert np.isnan(found[0, spoilt]).all()
    np.testing.assert_array_equal(found[0, ~spoilt], wanted[0, ~spoilt])


def test_rows_of_a_matrix_in_pairs_are_those_of_its_floats() -> None:
    """Rows, floats and bytes of the format; odd columns and other floats stay as they are."""
    matrix = torch.randn(6, 10).bfloat16()
    held = in_pairs(matrix)
    assert isinstance(held, PairsWeight)
    assert (held.shape, held.nbytes) == (matrix.shape, matrix.nbytes)
    assert torch.equal(held.rows(2, 5).dequantize(torch.float32), matrix[2:5].float())
    for other in (matrix.float(), matrix.half(), matrix[:, :9].contiguous()):
        assert in_pairs(other) is other
