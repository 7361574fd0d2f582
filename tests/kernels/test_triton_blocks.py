"""The Triton projections on matrices in blocks, against float64 on what ggml's own code makes of the same bytes."""

from collections.abc import Callable

import pytest
import torch
from block_matrices import random_blocks
from torch import Tensor

import d3engine.kernels.triton as kernels
from d3engine.kernels.blocks import StackedWeight
from d3engine.kernels.split_blocks import SPLIT_TYPES, SplitBlockWeight, split_blocks, split_columns
from d3engine.kernels.triton import batch_invariant, products, unpack
from d3engine.kernels.triton.launches import meta_weight

pytestmark = pytest.mark.usefixtures("poisoned_memory", "rows_apart", "few_programs")

EPS = 1e-5
TYPES = sorted(SPLIT_TYPES)
K_QUANTS = ("Q4_K", "Q5_K", "Q6_K")
# Beside half precision values are rounded to it before they are multiplied, as the reference rounds them.
LIMITS = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}
MATMUL_ROWS = 34
ROWS = [1, 9, 20, 35]  # one for each tile, the last for torch.matmul on an unpacked matrix

Randn = Callable[..., Tensor]


def random_weight(
    type_name: str, outputs: int, columns: int, device: torch.device, seed: int = 0
) -> tuple[SplitBlockWeight, Tensor]:
    """Any codes, with scales and minima of either sign; and what they stand for, by the package gguf, in float64."""
    weight = random_blocks(type_name, outputs, columns, seed, deviation=0.1)
    return split_blocks(weight, device), weight.unpacked().double().to(device)


def columns_of(type_name: str) -> int:
    """Not whole steps where blocks are small: an odd number of blocks of 32 columns, where there are such."""
    return 512 if type_name in K_QUANTS else 384 if type_name.endswith("128") else 352


def assert_close(out: Tensor, expected: Tensor, limit: float) -> None:
    assert out.shape == expected.shape
    error = float((out.double() - expected).norm() / expected.norm())
    assert error < limit, f"relative error {error:.2e}"


def normed(hidden: Tensor, weight: Tensor) -> Tensor:
    wide = hidden.double()
    return wide * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()


def row_count(value: int, device: torch.device) -> Tensor:
    return torch.tensor([value], dtype=torch.int32, device=device)


@pytest.mark.parametrize("type_name", TYPES)
def test_split_blocks_are_as_large_row_by_row_too(type_name: str, device: torch.device) -> None:
    """Codes and scales take the bytes of the blocks; runs of rows, single rows and stacked ones are those rows."""
    blocks = random_blocks(type_name, 7, 512)
    split, wanted = split_blocks(blocks, device), blocks.unpacked()
    assert split.nbytes == blocks.nbytes
    places = torch.tensor([6, 0, 6])
    parts = {split.rows(2, 5): wanted[2:5], split.at(places): wanted[places]}
    for part, values in (parts | {split.rows(0, 3).above([split.rows(3, 7)]): wanted}).items():
        assert torch.equal(part.dequantize(torch.float32).cpu(), values)


@pytest.mark.parametrize("type_name", TYPES)
def test_split_rows_of_any_length_have_the_sizes_said(type_name: str) -> None:
    """`split_columns` is what matrices without memory have for sizes, with an odd number of blocks too."""
    columns = columns_of(type_name)
    split = split_blocks(random_blocks(type_name, 3, columns), "cpu")
    assert split_columns(type_name, columns) == (split.codes.shape[1], split.scales.shape[1])
    made = meta_weight(3, columns, dtype=torch.bfloat16, weights=type_name)
    assert [tensor.shape for tensor in made.tensors] == [tensor.shape for tensor in split.tensors]  # type: ignore[union-attr]


@pytest.mark.parametrize("type_name", TYPES)
def test_unpacked_blocks_are_those_of_gguf_to_the_bit(type_name: str, device: torch.device) -> None:
    """All values of a matrix, and of single rows, are what the package gguf dequantizes, rounded once."""
    blocks = random_blocks(type_name, 19, columns_of(type_name), 3)
    weight, wanted = split_blocks(blocks, device), blocks.unpacked()
    for dtype in (torch.float32, torch.float16):
        found, steps = unpack.unpack_steps(weight, dtype)
        for step in steps:
            step.run()
        assert torch.equal(found.cpu(), wanted.to(dtype))
        assert torch.equal(weight.dequantize(dtype).cpu(), wanted.to(dtype))
    places = torch.tensor([18, 0, 7, 7], device=device)
    assert torch.equal(kernels.embed(weight, places, torch.float32).cpu(), wanted[places.cpu()])
    assert kernels.embed(weight, places[:0], torch.float32).shape == (0, weight.shape[1])


@pytest.mark.parametrize("type_name", TYPES)
@pytest.mark.parametrize("rows", ROWS)
def test_linear_residual(type_name: str, rows: int, randn: Randn, device: torch.device) -> None:
    """A product with the residual is that of the values, for each tile; rows beyond the live ones stay."""
    columns = columns_of(type_name)
    dtype = torch.float32 if rows in (1, 20) else torch.float16
    weight, exact = random_weight(type_name, 21, columns, device)
    x, residual, bias = randn(rows, columns, dtype=dtype), randn(rows, 21, dtype=dtype), randn(21, dtype=dtype)
    expected = residual.double() + x.double() @ exact.t() + bias.double()
    live = max(1, rows - 2)
    x[live:], residual[live:] = torch.nan, 3.0
    kernels.linear_residual(x, weight, bias, residual, num_rows=row_count(live, device))
    assert_close(residual[:live], expected[:live], LIMITS[dtype])
    assert bool((residual[live:] == 3.0).all())


@pytest.mark.parametrize("type_name", TYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gate_up_and_lm_head_carry_their_norm(
    type_name: str, dtype: torch.dtype, randn: Randn, device: torch.device
) -> None:
    """Of few rows the norm is carried along; in float16 it comes first."""
    rows, columns, gates = 3, columns_of(type_name), 9
    weight, exact = random_weight(type_name, 2 * gates, columns, device)
    hidden, norm = randn(rows, columns, dtype=dtype, scale=3.0), randn(columns, dtype=dtype)
    logits = normed(hidden, norm) @ exact.t()
    found = kernels.lm_head(hidden, norm, EPS, weight)
    assert_close(found, logits, LIMITS[dtype])
    tokens, largest = kernels.lm_head_argmax(hidden, norm, EPS, weight)
    assert torch.equal(tokens, found.argmax(dim=1))
    assert_close(largest, logits.amax(dim=1), LIMITS[dtype])
    gate, up = logits.chunk(2, dim=1)
    expected = torch.nn.functional.silu(gate) * up
    assert_close(kernels.gate_up(hidden, norm, EPS, weight, None), expected, 4 * LIMITS[dtype])


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kinds", [("Q4_K",), ("Q4_K", "Q6_K"), ("Q8_0", None)])
def test_qkv_of_matrices_of_several_types(
    kinds: tuple[str | None, ...], rows: int, randn: Randn, device: torch.device
) -> None:
    """Queries and keys of one type and values of another, or of floats, are projected as one matrix is."""
    heads, kv_heads, channels, columns = 2, 1, 16, 256
    dtype = torch.float32
    parts, exacts = [], []
    for nth, (kind, outputs) in enumerate(zip(kinds, (48, 16) if len(kinds) > 1 else (64,), strict=True)):
        if kind is None:
            parts.append(randn(outputs, columns, dtype=dtype))
            exacts.append(parts[-1].double())
        else:
            weight, exact = random_weight(kind, outputs, columns, device, nth)
            parts.append(weight)
            exacts.append(exact)
    weight = parts[0] if len(parts) == 1 else StackedWeight(tuple(parts))
    hidden, norm = randn(rows, columns, dtype=dtype), randn(columns, dtype=dtype)
    bias = randn(64, dtype=dtype)
    angles = randn(rows, channels // 2, dtype=torch.float32, scale=50.0)
    rotations = torch.polar(torch.ones_like(angles), angles)
    pool = torch.full((rows, 2, 4, kv_heads, channels), torch.nan, dtype=dtype, device=device)
    keys = torch.arange(rows, device=device).flip(0) * 8
    entries = torch.stack((keys, keys + 4), dim=1)
    projected = (normed(hidden, norm) @ torch.cat(exacts).t() + bias.double()).view(rows, -1, channels)
    turned = torch.view_as_complex(projected.view(rows, -1, channels // 2, 2)) * rotations.to(torch.complex128)[:, None]
    turned = torch.view_as_real(turned).view(rows, -1, channels)
    queries = kernels.qkv(hidden, norm, EPS, weight, bias, rotations, pool, entries, heads)
    flat = pool.view(-1, kv_heads, channels)
    assert_close(queries, turned[:, :heads], LIMITS[dtype])
    assert_close(flat[entries[:, 0]], turned[:, heads : heads + kv_heads], LIMITS[dtype])
    assert_close(flat[entries[:, 1]], projected[:, heads + kv_heads :], LIMITS[dtype])


@pytest.mark.parametrize("type_name", ["Q4_K", "Q6_K", "Q8_0"])
def test_columns_that_several_programs_share_are_added_up(type_name: str, randn: Randn, device: torch.device) -> None:
    """Steps of a row are divided among programs, each from its own first column on."""
    columns = 1024 if type_name in K_QUANTS else 1056
    weight, exact = random_weight(type_name, 21, columns, device)
    x, residual = randn(5, columns, dtype=torch.float16), randn(5, 21, dtype=torch.float16)
    tile = products.product_tile(5, weight, torch.float16, may_split=True)
    assert tile is not None
    assert tile.parts == 2
    expected = residual.double() + x.double() @ exact.t()
    kernels.linear_residual(x, weight, None, residual)
    assert_close(residual, expected, LIMITS[torch.float16])


@pytest.mark.parametrize("type_name", ["Q4_K", "Q6_K", "U4_32"])
def test_row_alone_has_the_bits_of_any_batch(type_name: str, randn: Randn, device: torch.device) -> None:
    """With batch_invariant a row's sums are the same bits alone, among few and among many."""
    weight, _ = random_weight(type_name, 21, 512, device)
    x, residual = randn(70, 512, dtype=torch.float16), randn(70, 21, dtype=torch.float16)
    norm = randn(512, dtype=torch.float16)
    together = residual.clone()
    batch_invariant.linear_residual(x, weight, None, together)
    logits = batch_invariant.lm_head(x, norm, EPS, weight)
    for few in (1, 9):
        own = residual[:few].clone()
        batch_invariant.linear_residual(x[:few], weight, None, own)
        assert torch.equal(own, together[:few])
        assert torch.equal(batch_invariant.lm_head(x[:few], norm, EPS, weight), logits[:few])
