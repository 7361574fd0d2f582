"""The Triton projections on quantized weights against float64 on the values that the stored ones stand for.
Memory from `torch.empty` is filled with NaN here, so that a value which was not written shows."""

from itertools import product
from typing import Any

import pytest
import torch
from block_matrices import random_blocks
from fixture_types import Randn
from kernel_errors import EPS, LIMITS, assert_close, assert_heads, heads_of, normed, qkv_targets, row_count
from torch import Tensor

import d3engine.kernels.triton as kernels
from d3engine.kernels import reference
from d3engine.kernels.blocks import StackedWeight
from d3engine.kernels.matrices import Weight
from d3engine.kernels.quantized import GROUP, Fp8Weight, Int4Weight, Int8Weight
from d3engine.kernels.sampling import SamplingRows
from d3engine.kernels.split_blocks import SPLIT_TYPES, split_blocks, split_columns
from d3engine.kernels.target import Target
from d3engine.kernels.triton import batch_invariant, launches, product_kernels, products, unpack
from d3engine.kernels.weight_format import WeightFormat

pytestmark = pytest.mark.usefixtures("poisoned_memory", "rows_apart", "few_programs")

MATMUL_ROWS = 42
ROWS = [1, 5, 40, 43]  # one for each path, the last for torch.matmul on an unpacked matrix
ROWS_OF_BLOCKS = [1, 9, 20, 43]
KINDS = ["int8", "fp8", "fp8_groups", "int4"]
TYPES = sorted(SPLIT_TYPES)
K_QUANTS = ("Q4_K", "Q5_K", "Q6_K")


def random_weight(
    kind: str, outputs: int, columns: int, device: torch.device, seed: int = 0
) -> tuple[WeightFormat, Tensor]:
    """Any stored values, the extreme ones too, with unequal scales; and the matrix they stand for in float64."""
    # The matrix is written out by the format's definition, not by `dequantize`; that of blocks by the package gguf.
    if kind in SPLIT_TYPES:
        blocks = random_blocks(kind, outputs, columns, seed, deviation=0.1)
        return split_blocks(blocks, device), blocks.unpacked().double().to(device)
    generator = torch.Generator().manual_seed(1)
    if kind == "int8":
        values = torch.randint(-127, 128, (outputs, columns), generator=generator, dtype=torch.int8)
        values[:, 0], values[:, -1] = 127, -127
        scales = torch.rand(outputs, generator=generator) * 0.01 + 0.001
        exact = values.double() * scales.double()[:, None]
        return Int8Weight(values.to(device), scales.to(device)), exact.to(device)
    groups = -(-columns // GROUP)
    if kind.startswith("fp8"):
        numbers = torch.randint(0, 127, (outputs, columns), generator=generator, dtype=torch.uint8)  # 127 is NaN
        numbers += 128 * torch.randint(0, 2, (outputs, columns), generator=generator, dtype=torch.uint8)
        numbers[:, 0], numbers[:, -1], numbers[:, 1] = 126, 254, 1  # the largest, its negative, the least
        exponents, mantissas = numbers.double().remainder(128).div(8, rounding_mode="floor"), numbers.double() % 8
        sizes = torch.where(exponents == 0, mantissas * 2.0**-9, (8 + mantissas) * 2.0 ** (exponents - 10))
        scales = torch.rand(outputs, groups if kind == "fp8_groups" else 1, generator=generator) * 0.01 + 0.001
        spread = scales.double().repeat_interleave(GROUP if scales.shape[1] > 1 else columns, dim=1)[:, :columns]
        exact = torch.where(numbers < 128, sizes, -sizes) * spread
        scales = scales if kind == "fp8_groups" else scales[:, 0].contiguous()
        return Fp8Weight(numbers.view(torch.float8_e4m3fn).to(device), scales.to(device)), exact.to(device)
    values = torch.randint(-8, 8, (outputs, groups * GROUP), generator=generator)
    values[:, 0], values[:, 64], values[:, columns - 1] = -8, 7, 7
    values[:, columns:] = 0
    scales = torch.rand(outputs, groups, generator=generator) * 0.1 + 0.01
    low, high = (values + 8).view(outputs, groups, 2, GROUP // 2).unbind(2)
    exact = values.double() * scales.double().repeat_interleave(GROUP, dim=1)
    packed = (low + 16 * high).to(torch.uint8).flatten(1)
    return Int4Weight(packed.to(device), scales.to(device), columns), exact[:, :columns].to(device)


def columns_of(type_name: str) -> int:
    """Not whole steps where blocks are small: an odd number of blocks of 32 columns, where there are such."""
    return 512 if type_name in K_QUANTS else 384 if type_name.endswith("128") else 352


def limit_of(kind: str, dtype: torch.dtype, rows: int) -> float:
    """The stored values add no error of their own; many rows round the unpacked matrix, and the normed row."""
    # Beside half precision values of blocks are rounded to it before they are multiplied, as the reference rounds them.
    is_rounded = rows > MATMUL_ROWS or (kind in SPLIT_TYPES and dtype == torch.float16)
    return LIMITS[dtype] * (2 if is_rounded else 1)


@pytest.mark.parametrize(
    ("kind", "rows", "dtype", "columns"),
    [
        (kind, rows, dtype, columns)
        for kind, rows in product(KINDS, ROWS)
        for dtype, columns in ((torch.float32, 123), (torch.float16, 256), (torch.bfloat16, 300))
    ]
    + [
        (kind, rows, torch.float32 if rows in (1, 20) else torch.float16, columns_of(kind))
        for kind, rows in product(TYPES, ROWS_OF_BLOCKS)
    ],
)
def test_linear_residual(
    kind: str, rows: int, dtype: torch.dtype, columns: int, randn: Randn, device: torch.device
) -> None:
    """A product with the residual is that of the values, for each tile; rows beyond the live ones stay."""
    outputs, live = 73 if kind in KINDS else 21, max(1, rows - 2)
    weight, exact = random_weight(kind, outputs, columns, device)
    x, residual = randn(rows, columns, dtype=dtype), randn(rows, outputs, dtype=dtype)
    bias = None if columns == 256 else randn(outputs, dtype=dtype)
    expected = residual.double() + x.double() @ exact.t() + (0 if bias is None else bias.double())
    x[live:], residual[live:] = torch.nan, 3.0
    kernels.linear_residual(x, weight, bias, residual, num_rows=row_count(live, device))
    assert_close(residual[:live], expected[:live], limit_of(kind, dtype, rows))
    assert bool((residual[live:] == 3.0).all())


@pytest.mark.parametrize(
    ("kind", "dtype", "rows"),
    [(kind, torch.float16, rows) for kind, rows in product(KINDS, ROWS)]
    + [(kind, torch.float32, rows) for kind, rows in product(KINDS, (1, 43))]
    + [(kind, dtype, 3) for kind, dtype in product(TYPES, LIMITS)],
)
def test_gate_up_and_lm_head_carry_their_norm(
    kind: str, dtype: torch.dtype, rows: int, randn: Randn, device: torch.device
) -> None:
    """Of few rows the norm is carried along; in float16 it comes first."""
    columns = 200 if kind in KINDS else columns_of(kind)
    weight, exact = random_weight(kind, 34 if kind in KINDS else 18, columns, device)
    hidden, norm = randn(rows, columns, dtype=dtype, scale=3.0), randn(columns, dtype=dtype)
    logits, limit = normed(hidden, norm) @ exact.t(), limit_of(kind, dtype, rows)
    found = kernels.lm_head(hidden, norm, EPS, weight)
    assert_close(found, logits, limit)
    tokens, largest = kernels.lm_head_argmax(hidden, norm, EPS, weight)
    assert torch.equal(tokens, found.argmax(dim=1))
    assert_close(largest, logits.amax(dim=1), limit)
    gate, up = logits.chunk(2, dim=1)
    expected = torch.nn.functional.silu(gate) * up
    assert_close(kernels.gate_up(hidden, norm, EPS, weight, None), expected, 4 * limit)


@pytest.mark.parametrize(
    ("kinds", "has_head_norms", "rows"),
    [
        *product(((kind,) for kind in KINDS), (False, True), (1, 5, 20)),
        *product((("Q4_K",), ("Q4_K", "Q6_K"), ("Q8_0", None)), (False,), ROWS_OF_BLOCKS),
    ],
)
def test_qkv(
    kinds: tuple[str | None, ...], has_head_norms: bool, rows: int, randn: Randn, device: torch.device
) -> None:
    """Queries and keys of one type and values of another, or of floats, are projected as one matrix is."""
    heads, kv_heads, channels, columns = 3, 1, 16, 150 if kinds[0] in KINDS else 256
    # Many rows of half precision have an order of their own.
    dtype = torch.float16 if rows == 20 and kinds[0] in KINDS else torch.float32
    found: list[tuple[Weight, Tensor]] = []
    for nth, (kind, outputs) in enumerate(zip(kinds, (80,) if len(kinds) == 1 else (64, 16), strict=True)):
        floats = randn(outputs, columns, dtype=dtype)
        made = floats, floats.double()
        found.append(made if kind is None else random_weight(kind, outputs, columns, device, nth))
    parts, exact = tuple(weight for weight, _ in found), torch.cat([one for _, one in found])
    weight: Weight = parts[0] if len(parts) == 1 else StackedWeight(parts)  # type: ignore[arg-type]
    hidden, norm = randn(rows, columns, dtype=dtype), randn(columns, dtype=dtype)
    bias = None if rows <= 5 else randn(80, dtype=dtype)
    head_norms = randn(2, channels, dtype=dtype).contiguous() if has_head_norms else None
    rotations, pool, entries = qkv_targets(rows, kv_heads, channels, dtype, randn)
    projected = normed(hidden, norm) @ exact.t() + (0 if bias is None else bias.double())
    expected = heads_of(projected, rotations, heads, kv_heads, head_norms)
    queries = kernels.qkv(hidden, norm, EPS, weight, bias, rotations, pool, entries, heads, head_norms=head_norms)
    assert_heads(queries, pool, entries, expected, LIMITS[dtype] * (3 if dtype == torch.float16 else 1))


@pytest.mark.parametrize("rows", [1, 11])
def test_two_groups_of_int4_a_round_with_the_norm_of_their_rows(rows: int, randn: Randn, device: torch.device) -> None:
    weight, exact = random_weight("int4", 37, 512, device)
    hidden, norm = randn(rows, 512, dtype=torch.float16, scale=3.0), randn(512, dtype=torch.float16)
    tile = products.product_tile(rows, weight, torch.float16)
    assert tile is not None
    assert tile.columns == 2 * GROUP
    found = kernels.lm_head(hidden, norm, EPS, weight)
    assert_close(found, normed(hidden, norm) @ exact.t(), LIMITS[torch.float16])


def test_a_row_of_int8_is_cut_finer_under_programmatic_launch(
    randn: Randn, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launches, "PROGRAMMATIC", True)
    weight, exact = random_weight("int8", 37, 2048, device)
    hidden, norm = randn(1, 2048, dtype=torch.float16, scale=3.0), randn(2048, dtype=torch.float16)
    tile = products.product_tile(1, weight, torch.float16)
    assert tile is not None
    assert (tile.columns, tile.warps) == (512, 1)
    found = kernels.lm_head(hidden, norm, EPS, weight)
    assert_close(found, normed(hidden, norm) @ exact.t(), LIMITS[torch.float16])


@pytest.fixture
def waits(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Kernels run as under programmatic launch, and each program that waits leaves a number here."""
    if device.type != "cpu":
        pytest.skip("on a GPU tests/gpu compares both ways")
    found: list[int] = []
    # The interpreter runs one kernel after another, so that waiting is nothing.
    monkeypatch.setattr(product_kernels, "gdc_launch_dependents", lambda: None)
    monkeypatch.setattr(product_kernels, "gdc_wait", lambda: found.append(1))
    for_target = launches.Launch.for_target

    def early(launch: launches.Launch, target: Target) -> tuple[dict[str, Any], dict[str, Any]]:
        arguments, options = for_target(launch, target)
        return arguments | {"PDL": True}, options

    monkeypatch.setattr(launches.Launch, "for_target", early)
    monkeypatch.setattr(launches, "PROGRAMMATIC", True)
    return found


@pytest.mark.parametrize(
    ("kind", "rows", "dtype"),
    [
        *product(("floats", *KINDS), (1, 5, 20), [torch.float16]),
        *product(["Q4_K"], (9, 20), [torch.float16]),
        ("floats", 5, torch.float32),
        ("int4", 5, torch.bfloat16),
    ],
)
def test_weights_loaded_before_a_wait_count_once(
    kind: str, rows: int, dtype: torch.dtype, waits: list[int], randn: Randn, device: torch.device
) -> None:
    """Under programmatic launch a product takes its first step in front of its loop, in every operation."""
    heads, channels, outputs = 3, 16, 80
    columns = 1024 if kind in SPLIT_TYPES else 1000
    if kind == "floats":
        weight: Weight = randn(outputs, columns, dtype=dtype, scale=0.1)
        exact = weight.double()  # type: ignore[union-attr]
    else:
        weight, exact = random_weight(kind, outputs, columns, device)
    hidden, norm = randn(rows, columns, dtype=dtype), randn(columns, dtype=dtype)
    limit = limit_of(kind, dtype, rows)
    projected = normed(hidden, norm) @ exact.t()
    assert_close(kernels.lm_head(hidden, norm, EPS, weight), projected, limit)
    gate, up = projected.chunk(2, dim=1)
    assert_close(kernels.gate_up(hidden, norm, EPS, weight, None), torch.nn.functional.silu(gate) * up, 4 * limit)
    rotations, pool, entries = qkv_targets(rows, 1, channels, dtype, randn)
    queries = kernels.qkv(hidden, norm, EPS, weight, None, rotations, pool, entries, heads)
    assert_heads(queries, pool, entries, heads_of(projected, rotations, heads, 1), 3 * limit)
    residual = randn(rows, outputs, dtype=dtype)
    expected = residual.double() + hidden.double() @ exact.t()
    kernels.linear_residual(hidden, weight, None, residual)
    assert_close(residual, expected, limit)
    assert waits


@pytest.mark.parametrize(
    ("kind", "columns"), [*((kind, 1000) for kind in KINDS), ("Q4_K", 1024), ("Q6_K", 1024), ("Q8_0", 1056)]
)
def test_columns_that_several_programs_share_are_added_up(
    kind: str, columns: int, randn: Randn, device: torch.device
) -> None:
    """More steps than parts can have evenly, and a last step that is not whole; each part from its first column on."""
    outputs = 70 if kind in KINDS else 21
    weight, exact = random_weight(kind, outputs, columns, device)
    x, residual = randn(5, columns, dtype=torch.float16), randn(5, outputs, dtype=torch.float16)
    tile = products.product_tile(5, weight, torch.float16, may_split=True)
    assert tile is not None
    assert tile.parts == 2
    expected = residual.double() + x.double() @ exact.t()
    kernels.linear_residual(x, weight, None, residual)
    assert_close(residual, expected, limit_of(kind, torch.float16, 5))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [1000, 123])
def test_many_rows_read_values_in_another_order_of_columns(
    kind: str, columns: int, randn: Randn, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many rows read stored values in another order of columns and share them."""
    monkeypatch.setattr(products, "UNPACK_ROWS", 512)
    monkeypatch.setattr(unpack, "unpack_launch", None)
    weight, exact = random_weight(kind, 70, columns, device)
    x, residual = randn(70, columns, dtype=torch.float16), randn(70, 70, dtype=torch.float16)
    tile = products.product_tile(70, weight, torch.float16, may_split=True)
    assert tile is not None
    assert tile.rows == 128
    assert tile.is_arranged(weight, torch.float16)
    assert tile.parts == (2 if columns == 1000 else 1)
    expected = residual.double() + x.double() @ exact.t()
    x[67:] = torch.nan
    kernels.linear_residual(x, weight, None, residual, num_rows=row_count(67, device))
    assert_close(residual[:67], expected[:67], LIMITS[torch.float16])


def test_noise_of_many_rows_is_of_stored_logits(
    randn: Randn, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For more rows than registers allow noise is drawn from stored logits."""
    monkeypatch.setattr(products, "UNPACK_ROWS", 512)
    weight, _ = random_weight("int8", 70, 128, device)
    hidden, norm = randn(66, 128, dtype=torch.float16), randn(128, dtype=torch.float16)
    seeds = torch.arange(66, device=device)
    given = (norm, EPS, weight, torch.ones(66, device=device), seeds, seeds, seeds)
    tokens, scores = kernels.lm_head_sample(hidden, *given)
    rows = SamplingRows(torch.ones(66, device=device), seeds, seeds)
    expected = reference.sample(kernels.lm_head(hidden, norm, EPS, weight), rows, seeds)
    assert torch.equal(tokens, expected[0])
    torch.testing.assert_close(scores, expected[1])


def test_only_prompts_of_very_many_rows_unpack_weights(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for kind in KINDS:
        weight, _ = random_weight(kind, 16, 64, device)
        for rows in (17, 65, 100, 512):
            assert products.product_tile(rows, weight, torch.bfloat16) is not None
        assert products.product_tile(513, weight, torch.bfloat16) is None
        assert products.product_tile(65, weight, torch.float32) is None


def unpacked(weight: WeightFormat, dtype: torch.dtype) -> Tensor:
    found, steps = unpack.unpack_steps(weight, dtype)
    for step in steps:
        step.run()
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_an_unpacked_matrix_is_the_one_of_the_reference(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    for columns in (123, 300):
        weight, exact = random_weight(kind, 5, columns, device)
        found = unpacked(weight, dtype)
        assert torch.equal(found, weight.dequantize(dtype))
        assert_close(found, exact, 1e-3)


def test_a_transposed_quantized_matrix_is_refused_by_name(device: torch.device) -> None:
    values, scales = torch.ones(16, 16, dtype=torch.int8, device=device).t(), torch.ones(16, device=device)
    with pytest.raises(ValueError, match=r"weight\.values has stride"):
        kernels.lm_head(torch.ones(1, 16), torch.ones(16), EPS, Int8Weight(values, scales))


@pytest.mark.parametrize("kind", ["fp8", "fp8_groups"])
def test_8_bit_floats_are_for_gpus_that_convert_them(kind: str) -> None:
    found = launches.registered(launches.SHAPES["tiny"], torch.bfloat16, kind, launches.PROJECTIONS)
    reading = [launch for _, _, launch in found if "scales_ptr" in launch.arguments]
    assert len(reading) > 10
    assert {launch.least_capability for launch in reading} == {89}


# -- blocks with codes and scales apart --------------------------------------------------------------------------------


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
    made = launches.meta_weight(3, columns, dtype=torch.bfloat16, weights=type_name)
    assert [tensor.shape for tensor in made.tensors] == [tensor.shape for tensor in split.tensors]  # type: ignore[union-attr]


@pytest.mark.parametrize("type_name", TYPES)
def test_unpacked_blocks_are_those_of_gguf_to_the_bit(type_name: str, device: torch.device) -> None:
    """All values of a matrix, and of single rows, are what the package gguf dequantizes, rounded once."""
    blocks = random_blocks(type_name, 19, columns_of(type_name), 3)
    weight, wanted = split_blocks(blocks, device), blocks.unpacked()
    for dtype in (torch.float32, torch.float16):
        assert torch.equal(unpacked(weight, dtype).cpu(), wanted.to(dtype))
        assert torch.equal(weight.dequantize(dtype).cpu(), wanted.to(dtype))
    places = torch.tensor([18, 0, 7, 7], device=device)
    assert torch.equal(kernels.embed(weight, places, torch.float32).cpu(), wanted[places.cpu()])
    assert kernels.embed(weight, places[:0], torch.float32).shape == (0, weight.shape[1])


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
