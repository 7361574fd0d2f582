"""The reference operations against formulas written out in float64, and against transformers where rounding matters."""

import math

import pytest
import torch
from kernel_errors import EPS, relative_error
from paged_entries import Paged
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from d3engine.kernels import reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "width"), [(1, 5), (3, 123), (17, 129)])
def test_rms_norm_rounds_where_transformers_does(dtype: torch.dtype, rows: int, width: int) -> None:
    torch.manual_seed(rows)
    theirs = LlamaRMSNorm(width, eps=EPS).to(dtype).requires_grad_(False)
    theirs.weight.data = torch.randn(width).to(dtype)
    hidden = (torch.randn(rows, width) * 3).to(dtype)
    ours = reference.rms_norm(hidden, theirs.weight.data, EPS)
    torch.testing.assert_close(ours, theirs(hidden), rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=1e-6)
    assert relative_error(ours, theirs(hidden)) < (1e-6 if dtype == torch.float32 else 1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_turns_each_pair_of_channels_by_its_angle(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    heads = torch.randn(3, 2, 6).to(dtype)
    angles = torch.randn(3, 3) * 100
    expected = heads.double().clone()
    for token in range(3):
        for pair in range(3):
            cos, sin = math.cos(angles[token, pair]), math.sin(angles[token, pair])
            even, odd = heads[token, :, 2 * pair].double(), heads[token, :, 2 * pair + 1].double()
            expected[token, :, 2 * pair] = even * cos - odd * sin
            expected[token, :, 2 * pair + 1] = even * sin + odd * cos
    reference.rotate_(heads, torch.polar(torch.ones(3, 3), angles))
    assert relative_error(heads, expected) < (1e-6 if dtype == torch.float32 else 4e-3)


@pytest.mark.parametrize(
    ("lengths", "row_counts"),
    [
        ([1], [1]),
        ([4], [1]),
        ([9], [5]),
        ([9], [9]),
        ([3, 17, 8], [1, 1, 1]),
        ([8, 8], [1, 1]),
        ([11, 6, 2, 7], [4, 6, 1, 1]),
        ([2, 11, 5], [1, 3, 1]),
    ],
)
@pytest.mark.parametrize("heads", [2, 6])
def test_paged_attention_sees_its_chunk_up_to_each_row(lengths: list[int], row_counts: list[int], heads: int) -> None:
    """Paged attention sees its own chunk up to each row and nothing else."""
    paged = Paged(lengths, row_counts, heads=heads, channels=8, block_size=4)
    both_layers = torch.stack((paged.tables.flip(1), paged.tables))
    inputs = reference.attention_inputs(paged.starts, lengths, both_layers)[1]
    out = reference.paged_attention(paged.queries, paged.pool, inputs, paged.scale)
    assert relative_error(out, paged.expected()) < 2e-6


def test_qkv_writes_keys_and_values_only_where_told() -> None:
    """QKV writes keys and values to their entries and nowhere else."""
    torch.manual_seed(0)
    hidden, norm, weight = torch.randn(3, 10), torch.randn(10), torch.randn((4 + 2 * 2) * 6, 10)
    bias, pool = torch.randn(48), torch.full((3, 2, 4, 2, 6), -7.0)
    rotations = torch.polar(torch.ones(3, 3), torch.randn(3, 3))
    keys = torch.tensor([2 * 8 + 1, 1 * 8 + 3, 1 * 8 + 0])
    entries = torch.stack((keys, keys + 4), dim=1)
    queries = reference.qkv(hidden, norm, EPS, weight, bias, rotations, pool, entries, num_heads=4)
    projected = reference.rms_norm(hidden, norm, EPS) @ weight.t() + bias
    heads = projected.view(3, 8, 6).clone()
    reference.rotate_(heads[:, :6], rotations)
    torch.testing.assert_close(queries, heads[:, :4])
    for row, (block, offset) in enumerate([(2, 1), (1, 3), (1, 0)]):
        torch.testing.assert_close(pool[block, 0, offset], heads[row, 4:6])
        torch.testing.assert_close(pool[block, 1, offset], heads[row, 6:8])
        pool[block, :, offset] = -7.0
    assert bool((pool == -7.0).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_of_heads_are_those_of_qwen3(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(3, 10).to(dtype), torch.randn((4 + 2 * 2) * 6, 10).to(dtype)
    ones, norms = torch.ones(10, dtype=dtype), torch.randn(2, 6).to(dtype)
    theirs = [Qwen3RMSNorm(6, eps=EPS).to(dtype).requires_grad_(False) for _ in norms]
    for module, norm in zip(theirs, norms, strict=True):
        module.weight.data = norm
    nothing, rtol = torch.ones(3, 3, dtype=torch.complex64), 1e-6 if dtype == torch.float32 else 1e-2
    entries = torch.tensor([[1, 5], [2, 6], [3, 7]])
    for bias in (None, torch.randn(48).to(dtype)):
        pools = [torch.zeros(1, 2, 4, 2, 6, dtype=dtype) for _ in range(2)]
        given = hidden, ones, EPS, weight, bias, nothing
        plain = reference.qkv(*given, pools[0], entries, num_heads=4)
        normed = reference.qkv(*given, pools[1], entries, num_heads=4, head_norms=norms)
        torch.testing.assert_close(normed, theirs[0](plain), rtol=rtol, atol=1e-6)
        keys, values = pools[1][0, :, 1:].unbind()
        torch.testing.assert_close(keys, theirs[1](pools[0][0, 0, 1:]), rtol=rtol, atol=1e-6)
        assert torch.equal(values, pools[0][0, 1, 1:])


def test_linear_residual_and_gate_up_are_the_mlp_of_llama() -> None:
    torch.manual_seed(0)
    hidden, norm = torch.randn(5, 10), torch.randn(10)
    gate_up, down, bias = torch.randn(24, 10), torch.randn(10, 12), torch.randn(10)
    normed = reference.rms_norm(hidden, norm, EPS).double()
    gate, up = (normed @ gate_up.double().t()).chunk(2, dim=1)
    expected = hidden.double() + (torch.nn.functional.silu(gate) * up) @ down.double().t() + bias
    reference.linear_residual(reference.gate_up(hidden, norm, EPS, gate_up, None), down, bias, hidden)
    assert relative_error(hidden, expected) < 1e-6


def test_copied_entries_are_keys_or_values_as_they_stand() -> None:
    pool = torch.randn(3, 2, 4, 2, 6)
    before = pool.clone()
    reference.copy_entries(pool, torch.tensor([1 * 8 + 2, 1 * 8 + 6]), torch.tensor([2 * 8 + 0, 2 * 8 + 4]))
    assert torch.equal(pool[2, :, 0], before[1, :, 2])
    pool[2, :, 0] = before[2, :, 0]
    assert torch.equal(pool, before)
