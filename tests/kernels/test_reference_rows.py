"""`num_rows` of the reference: the rows below it as without it, nothing written beyond."""

import math

import pytest
import torch

from d3engine.kernels import reference

EPS = 1e-5
TWO = torch.tensor([2], dtype=torch.int32)


def test_rows_beyond_the_count_are_nan_where_rows_are_returned() -> None:
    torch.manual_seed(0)
    hidden, norm, weight = torch.randn(3, 8), torch.randn(8), torch.randn(12, 8)
    for operation, arguments in (
        (reference.rms_norm, (norm, EPS)),
        (reference.gate_up, (norm, EPS, weight, None)),
        (reference.lm_head, (norm, EPS, weight)),
    ):
        out = operation(hidden, *arguments, num_rows=TWO)
        torch.testing.assert_close(out[:2], operation(hidden, *arguments)[:2])
        assert out.shape[0] == 3
        assert bool(out[2].isnan().all())


def test_argmax_beyond_the_count_is_minus_one() -> None:
    """The argmax is that of the logits and minus one beyond the count."""
    torch.manual_seed(0)
    hidden, norm, weight = torch.randn(3, 8), torch.randn(8), torch.randn(12, 8)
    expected = reference.lm_head(hidden, norm, EPS, weight).max(dim=1)
    tokens, scores = reference.lm_head_argmax(hidden, norm, EPS, weight)
    assert torch.equal(tokens, expected.indices)
    assert torch.equal(scores, expected.values)
    tokens, scores = reference.lm_head_argmax(hidden, norm, EPS, weight, num_rows=TWO)
    assert tokens.tolist() == [*expected.indices[:2].tolist(), -1]
    torch.testing.assert_close(scores[:2], expected.values[:2])
    assert bool(scores[2].isnan())


def test_rows_beyond_the_count_keep_their_residual() -> None:
    torch.manual_seed(0)
    x, weight, residual = torch.randn(3, 8), torch.randn(8, 8), torch.randn(3, 8)
    before, expected = residual.clone(), residual + x @ weight.t() + 1.0
    reference.linear_residual(x, weight, torch.ones(8), residual, num_rows=TWO)
    torch.testing.assert_close(residual[:2], expected[:2])
    assert torch.equal(residual[2], before[2])
    normed = reference.rms_norm(x, torch.ones(8), EPS, residual=residual, num_rows=TWO)
    torch.testing.assert_close(residual[:2], expected[:2] + x[:2])
    torch.testing.assert_close(normed[:2], reference.rms_norm(residual[:2], torch.ones(8), EPS))
    assert torch.equal(residual[2], before[2])


def test_rows_beyond_the_count_write_no_entries() -> None:
    torch.manual_seed(0)
    hidden, norm, weight = torch.randn(3, 8), torch.randn(8), torch.randn(12, 8)
    rotations, pools = torch.ones(3, 2, dtype=torch.complex64), [torch.zeros(2, 2, 4, 1, 4) for _ in range(2)]
    entries = torch.tensor([[0, 4], [1, 5], [2, 6]])
    queries = reference.qkv(hidden, norm, EPS, weight, None, rotations, pools[0], entries, 1, num_rows=TWO)
    all_queries = reference.qkv(hidden, norm, EPS, weight, None, rotations, pools[1], entries, 1)
    torch.testing.assert_close(queries[:2], all_queries[:2])
    assert bool(queries[2].isnan().all())
    torch.testing.assert_close(pools[0][0, :, :2], pools[1][0, :, :2])
    assert not pools[0][0, :, 2:].any()
    reference.copy_entries(pools[0], torch.tensor([0, 0, 0]), torch.tensor([2, 3, 8]), num_rows=TWO)
    assert torch.equal(pools[0][0, 0, 2], pools[0][0, 0, 0])
    assert torch.equal(pools[0][0, 0, 3], pools[0][0, 0, 0])
    assert not pools[0][1].any()


def test_attention_of_rows_beyond_the_count_is_undefined() -> None:
    torch.manual_seed(0)
    pool, queries = torch.randn(2, 2, 4, 1, 4), torch.randn(3, 2, 4)
    (inputs,) = reference.attention_inputs([0, 3], [3], torch.tensor([[[1]]]))
    out = reference.paged_attention(queries, pool, inputs, 0.5, num_rows=TWO)
    torch.testing.assert_close(out[:2], reference.paged_attention(queries, pool, inputs, 0.5)[:2])
    assert bool(out[2].isnan().all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("channels", [5, 123, 172, 256])
def test_a_row_that_is_not_a_number_stays_the_only_one(dtype: torch.dtype, channels: int) -> None:
    torch.manual_seed(0)
    hidden, norm = torch.randn(33, channels).to(dtype), torch.randn(channels).to(dtype)
    weight, even = torch.randn(44, channels).to(dtype), torch.arange(33) % 2 == 0
    hidden[~even] = math.nan
    residual = torch.randn(33, 44).to(dtype)
    reference.linear_residual(hidden, weight, None, residual)
    for out in (
        reference.gate_up(hidden, norm, EPS, weight, None),
        reference.lm_head(hidden, norm, EPS, weight),
        residual,
    ):
        assert torch.equal(out.isfinite().all(dim=1), even)
