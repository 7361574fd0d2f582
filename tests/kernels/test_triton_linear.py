"""The Triton kernels of norm, projections and copies against float64, on sizes that fit no tile.
Memory from `torch.empty` is filled with NaN here, so that a value which was not written shows."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from typing import Any

import pytest
import torch
from fixture_types import Randn
from kernel_errors import EPS, LIMITS, assert_close, assert_heads, heads_of, normed, qkv_targets, row_count
from torch import Tensor
from torch.overrides import TorchFunctionMode

import d3engine.kernels.triton as kernels
from d3engine.kernels import reference
from d3engine.kernels.sampling import SamplingRows
from d3engine.kernels.triton import products
from d3engine.kernels.triton.launches import SHAPES, Launch, registered
from d3engine.kernels.triton.matmul import float32_sums

pytestmark = pytest.mark.usefixtures("poisoned_memory", "rows_apart", "few_programs")

DTYPES = list(LIMITS)
MATMUL_ROWS = 42
ROWS = [1, 5, 19, 40, 43]  # one for each path, the last for torch.matmul with kernels around it


def cases(first: tuple[int, ...], *others: tuple[int, ...]) -> list[object]:
    """(dtype, rows, *sizes): the first sizes with all dtypes and rows, the others where a path may see them."""
    # In the interpreter a dtype changes what is rounded and nothing else: half precision has four of these rows there.
    halves = [(torch.float16, 19), (torch.float16, 43), (torch.bfloat16, 1), (torch.bfloat16, 40)]
    pairs = list(product(DTYPES, ROWS))
    if not torch.cuda.is_available():
        pairs = [pair for pair in pairs if pair[0] == torch.float32 or pair in halves]
    every = [(dtype, rows, *first) for dtype, rows in pairs]
    return every + [(torch.float32, rows, *sizes) for sizes in others for rows in (1, 19)]


@pytest.fixture
def randn(device: torch.device) -> Callable[..., Tensor]:
    """`randn(3, 5, dtype=..., scale=2.0)`, the same numbers in every run; rows lie apart in memory."""
    generator = torch.Generator().manual_seed(0)

    def make(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        wide = torch.randn(*shape[:-1], shape[-1] + 3, generator=generator) * scale
        return wide.to(device, dtype)[..., : shape[-1]]

    return make


def bits(tensor: Tensor) -> Tensor:
    """What compares equal only if every bit is, NaN included."""
    return tensor.contiguous().view(torch.uint8).clone()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 5), (3, 123), (5, 129)])
def test_rms_norm(dtype: torch.dtype, rows: int, width: int, randn: Randn) -> None:
    hidden, weight = randn(rows, width, dtype=dtype, scale=3.0), randn(width, dtype=dtype)
    out = kernels.rms_norm(hidden, weight, EPS)
    assert_close(out, normed(hidden, weight))
    torch.testing.assert_close(out, reference.rms_norm(hidden, weight, EPS), rtol=2e-2, atol=1e-6)


def test_rms_norm_rounds_before_weight(randn: Randn, device: torch.device) -> None:
    """The normed row is rounded before it meets the weight, as in transformers."""
    # The norm of ones and threes is far from where a rounding turns; Triton's interpreter cuts bfloat16 off instead.
    hidden, weight = torch.ones(2, 128, dtype=torch.float16, device=device), randn(128, dtype=torch.float16)
    hidden[:, ::2] = 3.0
    rounded = normed(hidden, torch.ones_like(weight)).half()
    assert torch.equal(kernels.rms_norm(hidden, weight, EPS), rounded * weight)
    assert not torch.equal(normed(hidden, weight).half(), rounded * weight), "the rounding makes no difference"


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_adds_to_the_residual_of_live_rows(dtype: torch.dtype, randn: Randn, device: torch.device) -> None:
    """Rms norm adds to the residual first but only in rows that live."""
    hidden, residual, weight = randn(5, 123, dtype=dtype), randn(5, 123, dtype=dtype), randn(123, dtype=dtype)
    total, untouched = (residual + hidden)[:3], bits(residual[3:])
    out = kernels.rms_norm(hidden, weight, EPS, residual=residual, num_rows=row_count(3, device))
    torch.testing.assert_close(residual[:3], total, rtol=1e-2 if dtype == torch.bfloat16 else 1e-3, atol=1e-6)
    assert torch.equal(bits(residual[3:]), untouched)
    assert_close(out[:3], normed(residual[:3], weight))
    assert bool(out[3:].isnan().all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 5), (5, 129)])
def test_a_norm_is_added_to_the_rows_that_live(
    dtype: torch.dtype, rows: int, width: int, randn: Randn, device: torch.device
) -> None:
    x, residual = randn(rows, width, dtype=dtype, scale=3.0), randn(rows, width, dtype=dtype)
    weight, live = randn(width, dtype=dtype), max(1, rows - 2)
    expected, copied = residual.double() + normed(x, weight), residual.clone()
    x[live:] = torch.nan
    untouched = bits(residual[live:])
    kernels.add_norm(x, weight, EPS, residual, num_rows=row_count(live, device))
    assert_close(residual[:live], expected[:live])
    assert torch.equal(bits(residual[live:]), untouched)
    reference.add_norm(x, weight, EPS, copied, num_rows=row_count(live, device))
    torch.testing.assert_close(copied, residual, rtol=2e-2, atol=2e-2 if dtype == torch.bfloat16 else 1e-3)


@pytest.mark.parametrize("rows", [65, 130])
def test_rows_that_are_kept_from_torch_go_by_128(
    rows: int, randn: Randn, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "MATMUL_ROWS", 256)
    dtype, width = torch.bfloat16, 256
    tile = products.product_tile(rows, torch.empty(258, width), dtype)
    assert tile is not None
    assert tile.rows == 128
    hidden, norm = randn(rows, width, dtype=dtype), randn(width, dtype=dtype)
    weight, residual = randn(258, width, dtype=dtype, scale=0.1), randn(rows, 258, dtype=dtype)
    expected = residual.double() + hidden.double() @ weight.double().t()
    kernels.linear_residual(hidden, weight, None, residual)
    assert_close(residual, expected)
    products_of = normed(hidden, norm) @ weight.double().t()
    gate, up = products_of.split(129, 1)
    limit = 3 * LIMITS[dtype]  # gate and up both carry the rounding of the normed row
    assert_close(kernels.gate_up(hidden, norm, EPS, weight, None), gate * gate.sigmoid() * up, limit)
    assert_close(kernels.lm_head(hidden, norm, EPS, weight), products_of, LIMITS[dtype])


@pytest.mark.parametrize(("dtype", "rows", "width"), [*cases((123,), (256,)), (torch.float32, 5, 256)])
@pytest.mark.parametrize("live", [None, 0.6])
def test_linear_residual(
    dtype: torch.dtype, rows: int, width: int, live: float | None, randn: Randn, device: torch.device
) -> None:
    x, weight = randn(rows, width, dtype=dtype), randn(129, width, dtype=dtype, scale=0.1)
    bias = None if width == 256 else randn(129, dtype=dtype)
    residual = randn(rows, 129, dtype=dtype)
    expected = residual.double() + x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    count = rows if live is None else int(live * rows)
    x[count:], residual[count:] = torch.nan, torch.nan
    untouched = bits(residual[count:])
    num_rows = None if live is None else row_count(count, device)
    kernels.linear_residual(x, weight, bias, residual, num_rows=num_rows)
    if count:
        assert_close(residual[:count], expected[:count])
    assert torch.equal(bits(residual[count:]), untouched)


@pytest.mark.parametrize(("dtype", "rows", "width", "gates"), cases((123, 67), (256, 64)))
def test_gate_up(dtype: torch.dtype, rows: int, width: int, gates: int, randn: Randn, device: torch.device) -> None:
    hidden, norm = randn(rows, width, dtype=dtype, scale=3.0), randn(width, dtype=dtype)
    weight = randn(2 * gates, width, dtype=dtype, scale=0.1)
    bias = None if width == 256 else randn(2 * gates, dtype=dtype)
    gate, up = (normed(hidden, norm) @ weight.double().t() + (0 if bias is None else bias.double())).chunk(2, dim=1)
    expected = torch.nn.functional.silu(gate) * up
    limit = 3 * LIMITS[dtype]  # gate and up both carry the rounding of the normed row
    live = max(1, rows - 2)
    out = kernels.gate_up(hidden, norm, EPS, weight, bias, num_rows=row_count(live, device))
    assert_close(out[:live], expected[:live], limit)
    assert bool(out[live:].isnan().all())
    if width == 256:
        assert_close(kernels.gate_up(hidden, norm, EPS, weight, bias), expected, limit)


@pytest.mark.parametrize("rows", [1, 5, 19, 43])
@pytest.mark.parametrize("has_norm", [False, True])
def test_gates_are_of_gelu_and_of_rows_that_are_not_normed(rows: int, has_norm: bool, randn: Randn) -> None:
    hidden, norm = randn(rows, 123, dtype=torch.float32), randn(123, dtype=torch.float32)
    weight = randn(134, 123, dtype=torch.float32, scale=0.3)
    x = normed(hidden, norm) if has_norm else hidden.double()
    gate, up = (x @ weight.double().t()).chunk(2, dim=1)
    for activation, gates in (
        ("gelu_tanh", torch.nn.functional.gelu(gate, approximate="tanh")),
        ("silu", torch.nn.functional.silu(gate)),
    ):
        out = kernels.gate_up(hidden, norm if has_norm else None, EPS, weight, None, activation=activation)
        assert_close(out, gates * up, 3 * LIMITS[torch.float32])


QKV_CASES = cases((3, 1, 24, 129), (2, 2, 64, 123), (1, 1, 96, 256), (4, 2, 10, 5))
# The second kernel gets rows of float32 or of torch's product; the last of these has three tiles of heads.
HEAD_NORM_CASES = [(torch.float32, rows, 3, 1, 24, 129) for rows in (1, 19, 43)]
HEAD_NORM_CASES += [(torch.float16, 43, 3, 1, 24, 129), (torch.bfloat16, 19, 3, 1, 24, 129)]
HEAD_NORM_CASES += [
    (torch.float32, 5, 2, 2, 64, 123),
    (torch.float32, 40, 4, 2, 10, 5),
    (torch.float32, 3, 9, 4, 96, 33),
]


@pytest.mark.parametrize(
    ("norms", "dtype", "rows", "heads", "kv_heads", "channels", "width"),
    [("none", *case) for case in QKV_CASES]
    + [(norms, *case) for norms in ("heads", "projections") for case in HEAD_NORM_CASES],
)
def test_qkv_writes_keys_and_values_only_where_told(
    norms: str,
    dtype: torch.dtype,
    rows: int,
    heads: int,
    kv_heads: int,
    channels: int,
    width: int,
    randn: Randn,
    device: torch.device,
) -> None:
    """QKV writes keys and values to their entries and nowhere else."""
    outputs, live = (heads + 2 * kv_heads) * channels, max(1, rows - 2)
    hidden, norm = randn(rows, width, dtype=dtype, scale=3.0), randn(width, dtype=dtype)
    weight = randn(outputs, width, dtype=dtype, scale=0.1)
    bias = randn(outputs, dtype=dtype) if kv_heads == 1 else None
    head_norms = randn(2, channels, dtype=dtype).contiguous() if norms == "heads" else None
    sizes = [heads * channels, kv_heads * channels]
    projection_norms = randn(sum(sizes), dtype=dtype).contiguous() if norms == "projections" else None
    rotations, pool, entries = qkv_targets(rows, kv_heads, channels, dtype, randn)
    x = hidden.double() if norms == "projections" else normed(hidden, norm)
    projected = x @ weight.double().t() + (0 if bias is None else bias.double())
    if projection_norms is not None:
        for part, of_part in zip(projected.split((*sizes, sizes[1]), 1), projection_norms.split(sizes), strict=False):
            part.copy_(normed(part, of_part))
    expected = heads_of(projected, rotations, heads, kv_heads, head_norms)
    num_rows = row_count(live, device)
    given: dict[str, Any] = {"head_norms": head_norms, "projection_norms": projection_norms, "num_rows": num_rows}
    before = None if norms == "projections" else norm
    queries = kernels.qkv(hidden, before, EPS, weight, bias, rotations, pool, entries, heads, **given)
    assert_heads(queries[:live], pool, entries[:live], expected[:live], 2 * LIMITS[dtype])
    assert bool(queries[live:].isnan().all())
    pool.view(-1, kv_heads, channels)[entries[:live].reshape(-1)] = torch.nan
    assert bool(pool.isnan().all())


def test_qkv_of_rows_that_share_an_entry_writes_that_entry(randn: Randn, device: torch.device) -> None:
    """Equal rows with one target, as padding rows have: no other entry may change."""
    hidden = randn(1, 123, dtype=torch.float32).expand(3, 123).contiguous()
    norm, weight = randn(123, dtype=torch.float32), randn(3 * 16, 123, dtype=torch.float32)
    rotations = torch.ones(3, 8, dtype=torch.complex64, device=device)
    entries = torch.tensor([[1, 5], [1, 5], [1, 5]], device=device)
    pools = [torch.full((2, 2, 4, 1, 16), 7.0, device=device) for _ in range(2)]
    for module, pool in zip((kernels, reference), pools, strict=True):
        module.qkv(hidden, norm, EPS, weight, None, rotations, pool, entries, 1)
    torch.testing.assert_close(pools[0], pools[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("dtype", "rows", "width"), cases((123,), (256,)))
def test_lm_head_and_its_argmax(dtype: torch.dtype, rows: int, width: int, randn: Randn, device: torch.device) -> None:
    hidden, norm = randn(rows, width, dtype=dtype, scale=3.0), randn(width, dtype=dtype)
    weight = randn(141, width, dtype=dtype)
    expected = normed(hidden, norm) @ weight.double().t()
    logits = kernels.lm_head(hidden, norm, EPS, weight)
    assert logits.dtype == torch.float32
    assert_close(logits, expected, LIMITS[dtype])
    tokens, scores = kernels.lm_head_argmax(hidden, norm, EPS, weight)
    assert tokens.dtype == torch.int64
    assert torch.equal(tokens, logits.argmax(dim=1))
    assert torch.equal(scores, logits.max(dim=1).values)
    if 1 < rows <= MATMUL_ROWS:  # beyond, torch computes all rows
        num_rows = row_count(rows - 1, device)
        fewer = kernels.lm_head(hidden, norm, EPS, weight, num_rows=num_rows)
        assert torch.equal(fewer[:-1], logits[:-1])
        assert bool(fewer[-1].isnan().all())
        fewer_tokens, fewer_scores = kernels.lm_head_argmax(hidden, norm, EPS, weight, num_rows=num_rows)
        assert torch.equal(fewer_tokens[:-1], tokens[:-1])
        assert torch.equal(fewer_scores[:-1], scores[:-1])
        assert bool(fewer_scores[-1].isnan())


@pytest.mark.parametrize("rows", [1, 5, 43])
@pytest.mark.parametrize("cap", [0.5, 30.0])
def test_logits_are_softly_capped_before_a_token_is_chosen(
    rows: int, cap: float, randn: Randn, device: torch.device
) -> None:
    hidden, norm, weight = (randn(count, 64, dtype=torch.float32) for count in (rows, 1, 141))
    expected = cap * torch.tanh(normed(hidden, norm[0]) @ weight.double().t() / cap)
    logits = kernels.lm_head(hidden, norm[0], EPS, weight, cap=cap)
    assert_close(logits, expected)
    assert float(logits.abs().max()) <= cap
    _, scores = kernels.lm_head_argmax(hidden, norm[0], EPS, weight, cap=cap)
    assert torch.equal(scores, logits.max(dim=1).values)
    ids, temperature = torch.arange(rows, device=device), torch.full((rows,), 0.7, device=device)
    drawn = kernels.lm_head_sample(hidden, norm[0], EPS, weight, temperature, ids, ids, ids, cap=cap)
    wanted = kernels.sample(logits, SamplingRows(temperature, ids, ids), ids)
    assert torch.equal(drawn[0], wanted[0])


@pytest.mark.parametrize("rows", [1, 3, 43])
def test_lowest_of_equal_logits_wins_and_a_fault_shows(rows: int, randn: Randn, device: torch.device) -> None:
    """Of equal logits the lowest token wins and a fault shows in the score."""
    hidden, norm = randn(rows, 32, dtype=torch.float32), torch.ones(32, device=device)
    weight = torch.zeros(141, 32, device=device)
    tokens, scores = kernels.lm_head_argmax(hidden, norm, EPS, weight)
    assert tokens.tolist() == [0] * rows
    assert scores.tolist() == [0.0] * rows
    weight[[37, 111]] = hidden[0]
    tokens, scores = kernels.lm_head_argmax(hidden, norm, EPS, weight)
    assert tokens[0] == 37
    neighbours = scores[1:].clone()
    weight[45] = hidden[0]
    weight[45, 3] = torch.nan  # one logit of every row
    tokens, scores = kernels.lm_head_argmax(hidden, norm, EPS, weight)
    assert tokens.tolist() == [45] * rows
    assert bool(scores.isnan().all())
    weight[45] = 0.0
    hidden[0] = torch.nan
    tokens, scores = kernels.lm_head_argmax(hidden, norm, EPS, weight)
    assert bool(scores[0].isnan())
    assert 0 <= int(tokens[0]) < 141
    assert torch.equal(scores[1:], neighbours)


@pytest.mark.parametrize("rows", [1, 4])
def test_large_float16_row_times_large_norm_stays_finite(rows: int, randn: Randn, device: torch.device) -> None:
    """A large float16 row times a large norm weight stays finite."""
    hidden = randn(rows, 128, dtype=torch.float16, scale=8000.0)
    norm = torch.full((128,), 20.0, dtype=torch.float16, device=device)
    weight = randn(64, 128, dtype=torch.float16, scale=0.01)
    assert_close(kernels.lm_head(hidden, norm, EPS, weight), normed(hidden, norm) @ weight.double().t(), 6e-4)


def test_no_rows_are_no_work(device: torch.device) -> None:
    hidden, norm = torch.empty(0, 16, device=device), torch.ones(16, device=device)
    weight, pool = torch.ones(48, 16, device=device), torch.full((1, 2, 4, 1, 16), 3.0, device=device)
    rotations, none = torch.empty(0, 8, dtype=torch.complex64, device=device), torch.empty(0, dtype=torch.int64)
    none = none.to(device)
    assert kernels.rms_norm(hidden, norm, EPS).shape == (0, 16)
    assert kernels.qkv(hidden, norm, EPS, weight, None, rotations, pool, none.view(0, 2), 1).shape == (0, 1, 16)
    assert kernels.gate_up(hidden, norm, EPS, weight, None).shape == (0, 24)
    assert kernels.lm_head(hidden, norm, EPS, weight).shape == (0, 48)
    assert [out.shape for out in kernels.lm_head_argmax(hidden, norm, EPS, weight)] == [(0,), (0,)]
    kernels.linear_residual(hidden, weight[:16], None, hidden)
    kernels.copy_entries(pool, none, none)
    assert bool((pool == 3.0).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_entry_is_copied_to_many_up_to_the_count(dtype: torch.dtype, randn: Randn, device: torch.device) -> None:
    """One entry is copied to many, and copies beyond the count are not made."""
    pool = randn(5, 2, 4, 3, 41, dtype=dtype).contiguous()
    expected = pool.clone()
    source, target = torch.tensor([11, 11, 11, 6], device=device), torch.tensor([30, 2, 17, 3], device=device)
    kernels.copy_entries(pool, source, target, num_rows=row_count(3, device))
    expected.view(-1, 3, 41)[target[:3]] = expected.view(-1, 3, 41)[11].clone()
    assert torch.equal(bits(pool), bits(expected))
    kernels.copy_entries(pool, source, target)
    expected.view(-1, 3, 41)[3] = expected.view(-1, 3, 41)[6].clone()
    assert torch.equal(bits(pool), bits(expected))


def test_a_count_above_the_rows_means_all_rows(randn: Randn, device: torch.device) -> None:
    x, weight, residual = (randn(n, 32, dtype=torch.float32) for n in (3, 32, 3))
    expected = residual.double() + x.double() @ weight.double().t()
    kernels.linear_residual(x, weight, None, residual, num_rows=row_count(9, device))
    assert_close(residual, expected)


def test_a_transposed_operand_is_refused_by_name(device: torch.device) -> None:
    square = torch.ones(4, 4, device=device)
    with pytest.raises(ValueError, match="weight has stride"):
        kernels.linear_residual(square, square.t(), None, square)
    with pytest.raises(ValueError, match="pool has stride"):
        kernels.copy_entries(torch.ones(1, 2, 4, 2, 3, device=device).transpose(3, 4), *torch.zeros(2, 1).long())


def test_many_rows_of_few_outputs_share_their_columns(randn: Randn, device: torch.device) -> None:
    """More steps than parts can have evenly, and a last step that is not whole."""
    x, weight, residual = (randn(n, 1000, dtype=torch.float16) for n in (20, 70, 20))
    residual = residual[:, :70]
    tile = products.product_tile(20, weight, torch.float16, may_split=True)
    assert tile is not None
    assert (tile.rows, tile.parts) == (32, 2)
    expected = residual.double() + x.double() @ weight.double().t()
    kernels.linear_residual(x, weight, None, residual)
    assert_close(residual, expected)


def test_every_launch_is_built_without_looking_at_data() -> None:
    """Meta tensors have none, so a captured graph cannot hold a number that came from a tensor."""
    launches = list(registered(SHAPES["tiny"], torch.bfloat16))
    assert {"rms_norm", "qkv", "linear_residual", "gate_up", "lm_head", "copy_entries"} <= {one[0] for one in launches}
    assert all(all(launch.grid) for _, _, launch in launches)


def test_launch_makes_its_tensors_device_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch makes the device of its tensors the current one."""

    class OnTheSecond(Tensor):
        device = torch.device("cuda:1")  # type: ignore[assignment]

    current: list[torch.device] = []
    launched: list[list[torch.device]] = []

    @contextmanager
    def guard(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    class Kernel:
        arg_names = ("x_ptr",)

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda **_: launched.append(list(current))

    monkeypatch.setattr(torch.cuda, "device", guard)
    for x in (torch.ones(1).as_subclass(OnTheSecond), torch.ones(1)):
        Launch(Kernel(), (1,), {"rows": 3, "x_ptr": x}).run()
    assert launched == [[torch.device("cuda:1")], []]
    assert not current


@pytest.mark.parametrize("live", [None, 40])
def test_the_matrix_library_keeps_its_sums_in_float32(live: int | None, randn: Randn, device: torch.device) -> None:
    settings = torch.backends.cuda.matmul
    found: list[tuple[object, object]] = []

    class Products(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in (torch.mm, torch.addmm, torch.Tensor.addmm_):
                flags = settings.allow_bf16_reduced_precision_reduction, settings.allow_fp16_reduced_precision_reduction
                found.append(flags)
            return func(*args, **kwargs or {})

    before = settings.allow_bf16_reduced_precision_reduction
    x, weight = randn(43, 64, dtype=torch.bfloat16), randn(16, 64, dtype=torch.bfloat16)
    num_rows = None if live is None else row_count(live, device)
    with Products():
        kernels.linear_residual(x, weight, None, randn(43, 16, dtype=torch.bfloat16), num_rows=num_rows)
    assert found == [(False, False)]
    assert settings.allow_bf16_reduced_precision_reduction == before


def test_sums_stay_in_float32_until_the_last_thread_has_ended() -> None:
    """The settings are the process's: a thread that ends takes them from no other, and the last puts them back."""
    settings = torch.backends.cuda.matmul
    before = settings.allow_bf16_reduced_precision_reduction
    assert before
    with ExitStack() as first, ExitStack() as second:
        first.enter_context(float32_sums())
        second.enter_context(float32_sums())
        first.close()
        assert not settings.allow_bf16_reduced_precision_reduction
    assert settings.allow_bf16_reduced_precision_reduction == before


def test_a_device_of_few_processors_gets_few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice of an H100, of 16 processors, needs no narrow tiles and no parts to be busy."""
    monkeypatch.setattr(products, "MIN_PROGRAMS", None)
    monkeypatch.setattr(products, "MATMUL_ROWS", 64)
    weight = torch.empty(1024, 4096, dtype=torch.bfloat16, device="meta")
    found = {}
    for processors in (132, 16):
        monkeypatch.setattr(products, "processors_of", lambda device, count=processors: count)
        tiles = [products.product_tile(rows, weight, torch.bfloat16, may_split=True) for rows in (1, 8, 64)]
        found[processors] = [(tile.outputs, tile.parts) for tile in tiles if tile is not None]
    assert found == {132: [(8, 1), (64, 8), (128, 16)], 16: [(8, 1), (64, 2), (128, 2)]}
