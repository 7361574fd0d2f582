"""The Triton projections on quantized weights against float64 on the values that the stored ones stand for.
Memory from `torch.empty` is filled with NaN here, so that a value which was not written shows."""

import pytest
import torch
from fixture_types import Randn
from kernel_errors import EPS, LIMITS, assert_close, normed, row_count
from torch import Tensor

import d3engine.kernels.triton as kernels
from d3engine.kernels import reference
from d3engine.kernels.quantized import GROUP, Fp8Weight, Int4Weight, Int8Weight, QuantizedWeight
from d3engine.kernels.sampling import SamplingRows
from d3engine.kernels.triton import launches, products, unpack

pytestmark = pytest.mark.usefixtures("poisoned_memory", "rows_apart", "few_programs")

MATMUL_ROWS = 42
ROWS = [1, 5, 40, 43]  # one for each path, the last for torch.matmul on an unpacked matrix
KINDS = ["int8", "fp8", "fp8_groups", "int4"]


def random_weight(kind: str, outputs: int, columns: int, device: torch.device) -> tuple[QuantizedWeight, Tensor]:
    """Any stored values, the extreme ones too, with unequal scales; and the matrix they stand for in float64."""
    # The matrix is written out here by the format's definition, not by `dequantize`.
    generator = torch.Generator().manual_seed(1)
    if kind == "int8":
        values = torch.randint(-127, 128, (outputs, columns), generator=generator, dtype=torch.int8)
        values[:, 0], values[:, -1] = 127, -127
        scales = torch.rand(outputs, generator=generator) * 0.01 + 0.001
        exact = values.double() * scales.double()[:, None]
        return Int8Weight(values.to(device), scales.to(device)), exact.to(device)
    if kind.startswith("fp8"):
        numbers = torch.randint(0, 127, (outputs, columns), generator=generator, dtype=torch.uint8)  # 127 is NaN
        numbers += 128 * torch.randint(0, 2, (outputs, columns), generator=generator, dtype=torch.uint8)
        numbers[:, 0], numbers[:, -1], numbers[:, 1] = 126, 254, 1  # the largest, its negative, the least
        exponents, mantissas = numbers.double().remainder(128).div(8, rounding_mode="floor"), numbers.double() % 8
        sizes = torch.where(exponents == 0, mantissas * 2.0**-9, (8 + mantissas) * 2.0 ** (exponents - 10))
        groups = -(-columns // GROUP) if kind == "fp8_groups" else 1
        scales = torch.rand(outputs, groups, generator=generator) * 0.01 + 0.001
        spread = scales.double().repeat_interleave(GROUP if groups > 1 else columns, dim=1)[:, :columns]
        exact = torch.where(numbers < 128, sizes, -sizes) * spread
        scales = scales if kind == "fp8_groups" else scales[:, 0].contiguous()
        return Fp8Weight(numbers.view(torch.float8_e4m3fn).to(device), scales.to(device)), exact.to(device)
    groups = -(-columns // GROUP)
    values = torch.randint(-8, 8, (outputs, groups * GROUP), generator=generator)
    values[:, 0], values[:, 64], values[:, columns - 1] = -8, 7, 7
    values[:, columns:] = 0
    scales = torch.rand(outputs, groups, generator=generator) * 0.1 + 0.01
    packed = torch.zeros(outputs, groups * 64, dtype=torch.uint8)
    for group in range(groups):
        low = values[:, 128 * group : 128 * group + 64] + 8
        high = values[:, 128 * group + 64 : 128 * group + 128] + 8
        packed[:, 64 * group : 64 * group + 64] = (low + 16 * high).to(torch.uint8)
    exact = values.double() * scales.double().repeat_interleave(GROUP, dim=1)
    return Int4Weight(packed.to(device), scales.to(device), columns), exact[:, :columns].to(device)


def limit_of(dtype: torch.dtype, rows: int) -> float:
    """The stored values add no error of their own; many rows round the unpacked matrix, and the normed row."""
    return LIMITS[dtype] * (2 if rows > MATMUL_ROWS else 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("dtype", "columns"), [(torch.float32, 123), (torch.float16, 256), (torch.bfloat16, 300)])
def test_linear_residual(
    kind: str, rows: int, dtype: torch.dtype, columns: int, randn: Randn, device: torch.device
) -> None:
    weight, exact = random_weight(kind, 73, columns, device)
    x, residual = randn(rows, columns, dtype=dtype), randn(rows, 73, dtype=dtype)
    bias = None if columns == 256 else randn(73, dtype=dtype)
    expected = residual.double() + x.double() @ exact.t() + (0 if bias is None else bias.double())
    live = max(1, rows - 2)
    x[live:], residual[live:] = torch.nan, 3.0
    kernels.linear_residual(x, weight, bias, residual, num_rows=row_count(live, device))
    assert_close(residual[:live], expected[:live], limit_of(dtype, rows))
    assert bool((residual[live:] == 3.0).all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("dtype", "rows"), [*((torch.float16, rows) for rows in ROWS), (torch.float32, 1), (torch.float32, 43)]
)
def test_gate_up_and_lm_head_carry_their_norm(
    kind: str, rows: int, dtype: torch.dtype, randn: Randn, device: torch.device
) -> None:
    columns, gates = 200, 17
    weight, exact = random_weight(kind, 2 * gates, columns, device)
    hidden, norm = randn(rows, columns, dtype=dtype, scale=3.0), randn(columns, dtype=dtype)
    logits = normed(hidden, norm) @ exact.t()
    found = kernels.lm_head(hidden, norm, EPS, weight)
    assert_close(found, logits, limit_of(dtype, rows))
    tokens, largest = kernels.lm_head_argmax(hidden, norm, EPS, weight)
    assert torch.equal(tokens, found.argmax(dim=1))
    assert_close(largest, logits.amax(dim=1), limit_of(dtype, rows))
    gate, up = logits.chunk(2, dim=1)
    expected = torch.nn.functional.silu(gate) * up
    assert_close(kernels.gate_up(hidden, norm, EPS, weight, None), expected, 4 * limit_of(dtype, rows))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_head_norms", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 20])
def test_qkv(kind: str, rows: int, has_head_norms: bool, randn: Randn, device: torch.device) -> None:
    heads, kv_heads, channels, columns = 3, 1, 16, 150
    weight, exact = random_weight(kind, (heads + 2 * kv_heads) * channels, columns, device)
    dtype = torch.float32 if rows <= 5 else torch.float16  # many rows of half precision have an order of their own
    limit = 2e-6 if rows <= 5 else 3 * LIMITS[dtype]
    hidden, norm = randn(rows, columns, dtype=dtype), randn(columns, dtype=dtype)
    bias = None if rows <= 5 else randn(weight.shape[0], dtype=dtype)
    angles = randn(rows, channels // 2, dtype=torch.float32, scale=50.0)
    rotations = torch.polar(torch.ones_like(angles), angles)
    pool = torch.full((rows, 2, 4, kv_heads, channels), torch.nan, dtype=dtype, device=device)
    keys = torch.arange(rows, device=device).flip(0) * 8
    entries = torch.stack((keys, keys + 4), dim=1)
    projected = normed(hidden, norm) @ exact.t() + (0 if bias is None else bias.double())
    projected = projected.view(rows, -1, channels)
    head_norms = randn(2, channels, dtype=dtype).contiguous() if has_head_norms else None
    if head_norms is not None:
        for part, norm_of_heads in zip(projected.split((heads, kv_heads, kv_heads), dim=1), head_norms, strict=False):
            part.copy_(normed(part, norm_of_heads))
    turned = torch.view_as_complex(projected.view(rows, -1, channels // 2, 2)) * rotations.to(torch.complex128)[:, None]
    turned = torch.view_as_real(turned).view(rows, -1, channels)
    queries = kernels.qkv(hidden, norm, EPS, weight, bias, rotations, pool, entries, heads, head_norms=head_norms)
    flat = pool.view(-1, kv_heads, channels)
    assert_close(queries, turned[:, :heads], limit)
    assert_close(flat[entries[:, 0]], turned[:, heads : heads + kv_heads], limit)
    assert_close(flat[entries[:, 1]], projected[:, heads + kv_heads :], limit)


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


@pytest.mark.parametrize("kind", KINDS)
def test_columns_that_several_programs_share_are_added_up(kind: str, randn: Randn, device: torch.device) -> None:
    """More steps than parts can have evenly, and a last step that is not whole."""
    weight, exact = random_weight(kind, 70, 1000, device)
    x, residual = randn(5, 1000, dtype=torch.float16), randn(5, 70, dtype=torch.float16)
    tile = products.product_tile(5, weight, torch.float16, may_split=True)
    assert tile is not None
    assert tile.parts == 2
    expected = residual.double() + x.double() @ exact.t()
    kernels.linear_residual(x, weight, None, residual)
    assert_close(residual, expected, LIMITS[torch.float16])


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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_an_unpacked_matrix_is_the_one_of_the_reference(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    for columns in (123, 300):
        weight, exact = random_weight(kind, 5, columns, device)
        found, steps = unpack.unpack_steps(weight, dtype)
        for step in steps:
            step.run()
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
