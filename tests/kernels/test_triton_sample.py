"""The choice of tokens in Triton kernels against the reference: random words bit for bit, cuts token by token.
Memory from `torch.empty` is poisoned here, so that a value which was not written shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import pytest
import torch
import triton
import triton.language as tl
from sampling_rows import assert_same_choice, rows_like
from torch import Tensor

import d3engine.kernels.triton as kernels
from d3engine.kernels import reference
from d3engine.kernels.reference import philox
from d3engine.kernels.sampling import Cuts, Penalties, SamplingRows, cut_min_p_, cut_top
from d3engine.kernels.triton import candidates, scores
from d3engine.kernels.triton import scores as noise
from d3engine.kernels.triton import threshold as borders
from d3engine.kernels.triton import topk_topp as cuts
from d3engine.kernels.triton.sample import draw_launch

pytestmark = pytest.mark.usefixtures("poisoned_memory", "rows_apart")

EPS = 1e-5
LOW = 0xFFFFFFFF


@pytest.fixture(autouse=True)
def several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles and few bins: a row of a thousand tokens takes several programs, and its borders share their bins."""
    monkeypatch.setattr(scores, "TILE", 512)
    monkeypatch.setattr(cuts, "BINS", 64)


def picker(count: int, device: torch.device, generator: torch.Generator) -> Callable[[list[float]], Tensor]:
    """Draws `count` of some values."""
    return lambda values: torch.tensor(values, device=device)[torch.randint(len(values), (count,), generator=generator)]


def mixed_cuts(count: int, vocab: int, device: torch.device, generator: torch.Generator) -> Cuts:
    """Every combination of the three among neighbours, none of them as often as some value."""
    pick = picker(count, device, generator)
    top_k = pick([0, 0, 1, 2, 7, vocab // 2, vocab - 1, vocab, 10**6]).long()
    return Cuts(pick([0.0, 0.0, 1e-3, 0.05, 0.6, 1.0]), top_k, pick([1.0, 1.0, 1e-9, 0.1, 0.55, 0.91, 0.999]))


def mixed_penalties(count: int, vocab: int, device: torch.device, generator: torch.Generator) -> Penalties:
    pick = picker(count, device, generator)
    seen = (torch.rand(count, vocab, generator=generator) < 0.3).to(torch.uint8)
    counts = torch.randint(-4, 4, (count, vocab), generator=generator).clamp(min=0).int()
    return Penalties(
        pick([1.0, 0.7, 1.3]), pick([0.0, -1.1, 0.6]), pick([0.0, -0.3, 0.7]), seen.to(device), counts.to(device)
    )


def one_row(rows: SamplingRows, row: int) -> SamplingRows:
    """The same row alone."""

    def alone(part: Cuts | Penalties) -> dict[str, Tensor]:
        return {field.name: getattr(part, field.name)[row : row + 1] for field in fields(part)}

    return SamplingRows(
        rows.temperature[row : row + 1],
        rows.seeds[row : row + 1],
        rows.indices[row : row + 1],
        None if rows.cuts is None else Cuts(**alone(rows.cuts)),
        None if rows.penalties is None else Penalties(**alone(rows.penalties)),
    )


# -- random words and candidates -------------------------------------------------------------------------------------


@triton.jit
def _words_kernel(seed_ptr, index_ptr, step_ptr, tile_ptr, token_ptr, first, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    seed, index, step = tl.load(seed_ptr + row), tl.load(index_ptr + row), tl.load(step_ptr + row)
    places = tl.arange(0, BLOCK)
    tl.store(tile_ptr + row * BLOCK + places, noise.tile_words(seed, index, step, first, BLOCK))
    tl.store(token_ptr + row * BLOCK + places, noise.token_words(seed, index, step, first + places))


@pytest.mark.parametrize("first", [0, 128, 4 * 31999])
def test_words_are_those_of_the_reference_bit_for_bit(first: int, device: torch.device) -> None:
    keys = [(0, 0, 0), (2**63 - 1, 63, 2**24), (2**32, 1, 7), (0xDEADBEEF12345678 >> 1, 2**32 - 1, 2**32 - 1)]
    seeds, indices, steps = (torch.tensor(column, device=device) for column in zip(*keys, strict=True))
    found = torch.empty(2, len(keys), 64, dtype=torch.int32, device=device)
    _words_kernel[(len(keys),)](seeds, indices, steps, found[0], found[1], first, BLOCK=64)
    groups = torch.arange(first // 4, first // 4 + 16, device=device)[None]
    counter = (groups, steps[:, None], indices[:, None], torch.zeros_like(steps)[:, None])
    words = philox((seeds[:, None] & LOW, seeds[:, None] >> 32 & LOW), counter)
    expected = torch.stack(words, dim=-1).flatten(1)
    assert torch.equal(found[0].long() & LOW, expected)
    assert torch.equal(found[1].long() & LOW, expected)


@triton.jit
def _order_kernel(scores_ptr, keys_ptr, back_ptr, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    keys = candidates.ordered(tl.load(scores_ptr + places))
    tl.store(keys_ptr + places, keys)
    tl.store(back_ptr + places, candidates.unordered(keys))


def test_keys_order_as_floats_do_and_nan_is_above_all(device: torch.device) -> None:
    ascending = [-torch.inf, -3e38, -1.0, -1e-45, 0.0, 1e-45, 1.0, 1.0000001, 3e38, torch.inf, torch.nan]
    scores = torch.tensor([*ascending, -0.0, -torch.nan, 2.0, 2.0, 2.0], device=device)
    keys, back = torch.empty(16, dtype=torch.int32, device=device), torch.empty(16, device=device)
    _order_kernel[(1,)](scores, keys, back, BLOCK=16)
    assert bool((keys[1:11] > keys[:10]).all())
    assert keys[11] == keys[4]
    assert keys[12] == keys[10]
    assert torch.equal(back.nan_to_num(5.0), scores.nan_to_num(5.0))


def test_lowest_of_equal_candidates_wins_over_many_tiles(device: torch.device) -> None:
    """Of equal candidates the lowest token wins, also with more tiles than fit one step."""
    tokens = torch.arange(2100, device=device)
    keys = torch.zeros(2, 2100, dtype=torch.int64, device=device)
    keys[0, [700, 7 + 1024, 7 + 2048]] = torch.tensor([4, 5, 5], device=device)
    keys[1] = -5
    found, scores = candidates.best_of((keys << 32) | (0x7FFFFFFF - tokens), None)
    assert found.tolist() == [7 + 1024, 0]
    assert scores.view(torch.int32)[0] == 5
    assert scores[1] < 0


# -- sample ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vocab", "cut", "penalised"),
    [
        *((vocab, both, both) for vocab in (5, 123, 1029) for both in (False, True)),
        (123, False, True),
        (1029, True, False),
    ],
)
def test_tokens_are_those_of_the_reference(
    vocab: int, cut: bool, penalised: bool, device: torch.device, generator: torch.Generator
) -> None:
    count = 12 if vocab < 100 else 6
    logits = (torch.randn(count, vocab + 3, generator=generator) * 3).to(device)[:, :vocab]
    rows, steps = rows_like([0.0, 0.4, 1.0, 3.0, 1e-3, 1.0] * (count // 6), device)
    if cut:
        rows = replace(rows, cuts=mixed_cuts(count, vocab, device, generator))
    if penalised:
        rows = replace(rows, penalties=mixed_penalties(count, vocab, device, generator))
    before = logits.clone()
    tokens, scores = kernels.sample(logits, rows, steps)
    expected = reference.sample(logits, rows, steps)
    assert_same_choice((tokens, scores), expected)
    greedy = rows.temperature == 0
    assert torch.equal(scores[greedy], expected[1][greedy])  # penalties are the same floats
    assert torch.equal(logits, before)
    alone = kernels.sample(logits[3:4], one_row(rows, 3), steps[3:4])  # without neighbours, in another place
    assert torch.equal(alone[0], tokens[3:4])
    assert torch.equal(alone[1], scores[3:4])


@triton.jit
def _kept_kernel(
    keys_ptr, kept_ptr, min_p_ptr, top_k_ptr, top_p_ptr, ends_ptr, border_bins_ptr, num_listed_ptr, bin_counts_ptr,
    bin_weights_ptr, listed_ptr, V: tl.constexpr, BLOCK: tl.constexpr, LISTED: tl.constexpr,
    TILES: tl.constexpr, PADDED_TILES: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """uint8: what the border keeps of one row, where bins reach."""
    row = tl.program_id(0)
    highest, lowest, _ = cuts.row_ends(ends_ptr, row, TILES, PADDED_TILES)
    border = borders.find_border(
        listed_ptr + row * V, tl.load(num_listed_ptr + row), bin_counts_ptr + row * BINS, bin_weights_ptr + row * BINS,
        highest, lowest, tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), V, BINS, LISTED,
    )  # fmt: skip
    tokens = tl.arange(0, BLOCK)
    keys = tl.load(keys_ptr + row * V + tokens, mask=tokens < V, other=cuts.MINUS_INFINITY)
    last_bin = tl.minimum(tl.load(border_bins_ptr + row * 3), tl.load(border_bins_ptr + row * 3 + 2))
    kept = borders.bins_of(keys, highest, lowest, BINS) <= last_bin
    kept &= candidates.candidate(keys, tokens) >= border
    kept &= keys >= cuts.floor_of(highest, tl.load(min_p_ptr + row))
    tl.store(kept_ptr + row * V + tokens, kept.to(tl.uint8), mask=tokens < V)


def kept_by_kernels(scores: Tensor, wanted: Cuts) -> Tensor:
    """The tokens [T, V] that the kernels' cuts keep of `scores`, whose temperature is 1."""
    (count, vocab), device = scores.shape, scores.device
    rows, steps = rows_like([1.0] * count, device)
    rows, search = replace(rows, cuts=wanted), cuts.Search.empty(scores)
    for launch in cuts.search_launches(scores, rows, search, None).values():
        launch.run()
    best = torch.empty(count, search.ends.shape[2], dtype=torch.int64, device=device)
    draw_launch(scores, rows, steps, search, best, None).run()
    bits = (scores + 0.0).view(torch.int32)
    keys, kept = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits), torch.empty_like(scores, dtype=torch.uint8)
    more = {"V": vocab, "BLOCK": triton.next_power_of_2(vocab), "LISTED": borders.LISTED}
    given = search.arguments(rows) | search.bins()
    _kept_kernel[(count,)](keys, kept, listed_ptr=search.listed, **given, **more)
    return kept != 0


@pytest.mark.parametrize(
    ("kind", "vocab"),
    [(kind, vocab) for kind in ("normal", "ties", "all equal", "few", "wide") for vocab in (5, 123)]
    + [("normal", 1), ("normal", 1029), ("ties", 1029)],
)
def test_cuts_keep_the_tokens_that_sorting_keeps(
    kind: str, vocab: int, device: torch.device, generator: torch.Generator
) -> None:
    count = 12 if vocab < 100 else 6
    scores = torch.randn(count, vocab, generator=generator) * 3
    if kind == "ties":
        scores = scores.round()
    elif kind == "all equal":
        scores = torch.full_like(scores, -7.25)
    elif kind == "few":
        scores[torch.rand(count, vocab, generator=generator) < 0.9] = -torch.inf
        scores[:, vocab // 2] = 0.5
    elif kind == "wide":
        scores = scores.sinh() * 1e-3
    scores = scores.to(device)
    wanted = mixed_cuts(count, vocab, device, generator)
    expected = cut_top(cut_min_p_(scores.clone(), wanted.min_p), wanted.top_k, wanted.top_p) > -torch.inf
    assert torch.equal(kept_by_kernels(scores, wanted) & (scores > -torch.inf), expected)


@pytest.mark.parametrize(("tile", "bins", "listed"), [(32, 64, 512), (32, 8, 32), (128, 512, 32), (512, 1, 512)])
def test_tiles_bins_and_lists_of_any_size_keep_the_same_tokens(
    tile: int, bins: int, listed: int, device: torch.device, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The top-k below the number of tiles has a way of its own; one bin puts the whole row on the list."""
    monkeypatch.setattr(scores, "TILE", tile)
    monkeypatch.setattr(cuts, "BINS", bins)
    monkeypatch.setattr(cuts, "LISTED", listed)
    monkeypatch.setattr(borders, "LISTED", listed)
    some = (torch.randn(8, 270, generator=generator) * 2).to(device)
    some[4:] = (some[4:] * 2).round() / 2
    top_k = torch.tensor([5, 8, 9, 0, 5, 7, 100, 0], device=device)
    top_p = torch.tensor([1.0, 0.9, 0.95, 0.9, 0.6, 1.0, 0.99, 0.5], device=device)
    wanted = Cuts(torch.tensor([0.0, 0.0, 0.0, 0.0, 0.05, 0.0, 0.0, 0.0], device=device), top_k, top_p)
    expected = cut_top(cut_min_p_(some.clone(), wanted.min_p), top_k, top_p) > -torch.inf
    assert torch.equal(kept_by_kernels(some, wanted), expected)
    rows, steps = rows_like([1.0] * 8, device)
    rows = replace(rows, cuts=wanted)
    for later in range(3):
        assert_same_choice(kernels.sample(some, rows, steps + later), reference.sample(some, rows, steps + later))


def test_top_k_ending_at_minus_infinity_draws_as_reference(device: torch.device, generator: torch.Generator) -> None:
    """A top-k that ends where nothing can be drawn draws as the reference does."""
    logits = (torch.randn(6, 523, generator=generator) * 3).to(device)
    rows, steps = rows_like([0.05, 0.1, 0.02, 0.1, 1e-3, 0.3], device)
    top_k, top_p = torch.tensor([50, 400, 3, 200, 7, 500]), torch.tensor([1.0, 0.9, 0.99, 1.0, 0.9, 0.999])
    rows = replace(rows, cuts=Cuts(torch.zeros(6, device=device), top_k.to(device), top_p.to(device)))
    for later in range(4):
        assert_same_choice(kernels.sample(logits, rows, steps + later), reference.sample(logits, rows, steps + later))


def test_no_noise_lifts_a_token_out_of_reach_above_the_likeliest() -> None:
    uniform = torch.tensor([0.5, 2**23 - 0.5], dtype=torch.float64) * 2.0**-23  # the lowest and the highest
    least, most = -torch.log(-torch.log(uniform))
    assert most - least < 20 < borders.REACH.value
    assert int(torch.exp(torch.tensor(-borders.REACH.value, dtype=torch.float64)) * 2.0**40) == 0


@pytest.mark.parametrize(
    ("min_p", "top_k", "top_p", "kept"),
    [
        (0.0, 3, 1.0, [5, 0, 7]),
        (0.0, 7, 1.0, [5, 0, 7, 2, 6, 1, 3]),  # 3 and 4 are equal: the lower is the likelier
        (0.0, 0, 0.51, [5, 0]),
        (0.0, 0, 0.01, [5]),
        (0.0, 0, 0.985, [5, 0, 7, 2, 6, 1, 3]),  # 0.984 are reached before the two equal ones
        (0.3, 0, 1.0, [5, 0]),
        (0.0, 4, 0.9, [5, 0, 7]),  # 0.93 of the first four are reached by the third
        (0.2, 2, 0.9, [5, 0]),
        (0.0, 0, 1.0, [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_cuts_of_halving_probabilities(
    min_p: float, top_k: int, top_p: float, kept: list[int], device: torch.device
) -> None:
    scores = torch.empty(1, 8, device=device)
    order = torch.tensor([5, 0, 7, 2, 6, 1, 4, 3], device=device)
    scores[0, order] = -torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 7], device=device) * torch.tensor(2.0).log().item()
    wanted = Cuts(*(torch.tensor([value], device=device) for value in (min_p, top_k, top_p)))
    assert kept_by_kernels(scores, wanted)[0].nonzero().flatten().tolist() == sorted(kept)


@pytest.mark.parametrize("cut", [False, True])
def test_faulty_row_shows_and_changes_no_other(cut: bool, device: torch.device, generator: torch.Generator) -> None:
    """A faulty row shows in its score and its neighbours do not change."""
    vocab = 300
    logits = torch.randn(6, vocab, generator=generator).to(device)
    rows, steps = rows_like([1.0, 0.0, 1.0, 0.7, 0.0, 1.3], device)
    if cut:
        every = Cuts(torch.full((6,), 0.01), torch.full((6,), 40), torch.full((6,), 0.9))
        rows = replace(rows, cuts=Cuts(*(getattr(every, field.name).to(device) for field in fields(every))))
    sound = kernels.sample(logits, rows, steps)
    logits[0, 290], logits[1, 3], logits[3, 77] = torch.nan, torch.nan, torch.inf
    logits[4] = -torch.inf
    logits[5, :299] = -torch.inf  # one token is left: no fault
    tokens, scores = kernels.sample(logits, rows, steps)
    assert bool(scores[:2].isnan().all())
    assert scores[3:5].tolist() == [torch.inf, -torch.inf]
    assert scores[5].isfinite()
    assert tokens[5] == 299
    assert bool(((tokens >= 0) & (tokens < vocab)).all())
    assert (tokens[2], scores[2]) == (sound[0][2], sound[1][2])
    logits[5] = -torch.inf
    assert kernels.sample(logits, rows, steps)[1][5] == -torch.inf


@pytest.mark.parametrize("live", [0, 2, 9])
def test_rows_beyond_the_count_are_left_alone(live: int, device: torch.device, generator: torch.Generator) -> None:
    vocab, num_rows = 300, torch.tensor([live], dtype=torch.int32, device=device)
    logits = torch.randn(4, vocab, generator=generator).to(device)
    rows, steps = rows_like([1.0, 0.0, 1.0, 0.7], device)
    rows = replace(rows, cuts=mixed_cuts(4, vocab, device, generator))
    everything = kernels.sample(logits, rows, steps)
    tokens, scores = kernels.sample(logits, rows, steps, num_rows=num_rows)
    assert torch.equal(tokens[:live], everything[0][:live])
    assert torch.equal(scores[:live], everything[1][:live])
    assert bool(scores[live:].isnan().all())  # as torch.empty left them
    counts = torch.zeros(4, vocab + 5, dtype=torch.int32, device=device)
    expected = counts.clone()
    for _ in range(2):
        kernels.count_tokens(counts[:, :vocab], everything[0], num_rows=num_rows)
    reference.count_tokens(expected[:, :vocab], everything[0], num_rows=num_rows)
    assert torch.equal(counts, 2 * expected)
    kernels.count_tokens(counts[:, :vocab], everything[0])
    assert counts.sum() == 2 * min(live, 4) + 4


def test_no_rows_are_no_work(device: torch.device) -> None:
    rows, steps = rows_like([], device)
    rows = replace(rows, cuts=Cuts(rows.temperature, rows.seeds, rows.temperature))
    logits = torch.empty(0, 7, device=device)
    assert [out.shape for out in kernels.sample(logits, rows, steps)] == [(0,), (0,)]
    kernels.count_tokens(logits.int(), steps)


def test_a_transposed_operand_is_refused_by_name(device: torch.device) -> None:
    square = torch.ones(4, 4, device=device)
    rows, steps = rows_like([1.0] * 4, device)
    floats, apart = rows.temperature, steps.repeat(2)[::2]
    penalties = Penalties(floats, floats, floats, square.t().to(torch.uint8), square.int())
    for operand, call in {
        "logits": lambda: kernels.sample(square.t(), rows, steps),
        "prompt_seen": lambda: kernels.sample(square, replace(rows, penalties=penalties), steps),
        "seeds": lambda: kernels.sample(square, replace(rows, seeds=rows.seeds.repeat(2)[::2]), steps),
        "steps": lambda: kernels.lm_head_sample(square, floats, EPS, square, floats, steps, steps, apart),
        "output_counts": lambda: kernels.count_tokens(square.int().t(), steps),
        "tokens": lambda: kernels.count_tokens(square.int(), apart),
    }.items():
        with pytest.raises(ValueError, match=f"{operand} has stride"):
            call()
