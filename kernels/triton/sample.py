"""Chooses tokens from logits on the device: penalties, temperature, cuts and the Gumbel draw, and counts the chosen.

A program takes one tile of one row and keeps its best candidate; a second launch picks the best of all tiles. Only a
batch in which a row cuts has two launches more, in front of these, and the second then settles what is on the border
(see `topk_topp.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

import torch
import triton
import triton.language as tl
from torch import Tensor

from d3engine.kernels.sampling import Cuts, Penalties, SamplingRows
from d3engine.kernels.triton.candidates import best_launch, best_of, candidate, ordered
from d3engine.kernels.triton.launches import Launch, ModelShape, meta, row_counts, strided
from d3engine.kernels.triton.product_kernels import NOT_SPECIALIZED, live_rows, wait_for_previous
from d3engine.kernels.triton.products import need_unit_stride
from d3engine.kernels.triton.scores import gumbel, scores_launch, tile_scores, tile_words, tiles_of
from d3engine.kernels.triton.threshold import bins_of
from d3engine.kernels.triton.topk_topp import (
    MINUS_INFINITY,
    Search,
    cuts_row,
    floor_of,
    no_search,
    row_ends,
    search_launches,
    searches,
    settle_launch,
)


def sample(
    logits: Tensor, rows: SamplingRows, steps: Tensor, *, first_token: int = 0, num_rows: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Choose a token of each row of `logits` float32 [T, V]: penalties, temperature, min-p, top-k, top-p, and a draw.

    As `reference.py` does; see there for arguments and results. What may differ is rounding: of the noise's logarithms
    (a token changes where two noisy scores are that close), of log(min_p), and of top-p's sums (the border moves where
    a sum is that close to top_p: the sums here are exact to 2**-40 of the likeliest token for each token, and their
    exponentials to a few units of the last place). Top-k and all ties are exact.

    `first_token`, a multiple of 4, is the token of the first column, for the noise alone. `num_rows` int32 [1]: rows at
    or beyond it are neither read nor chosen; None means all rows.
    """
    need_unit_stride(logits=logits, steps=steps)
    need_unit_strides(rows)
    total, vocab = logits.shape
    candidates = torch.empty(total, tiles_of(vocab), dtype=torch.int64, device=logits.device)
    if rows.cuts is None:
        draw_launch(logits, rows, steps, None, candidates, num_rows, first_token).run()
        return best_of(candidates, num_rows)
    search = Search.empty(logits)
    for launch in search_launches(logits, rows, search, num_rows).values():
        launch.run()
    draw_launch(logits, rows, steps, search, candidates, num_rows, first_token).run()
    tokens = torch.empty(total, dtype=torch.int64, device=logits.device)
    scores = torch.empty(total, dtype=torch.float32, device=logits.device)
    settle_launch(rows, steps, search, candidates, tokens, scores, num_rows, first_token).run()
    return tokens, scores


def count_tokens(output_counts: Tensor, tokens: Tensor, *, num_rows: Tensor | None = None) -> None:
    """Add one to `output_counts` int32 [T, V] (written) at each row's token of `tokens` int64 [T], each in [0, V).

    `num_rows` int32 [1]: rows at or beyond it stay as they are; None means all rows.
    """
    need_unit_stride(output_counts=output_counts, tokens=tokens)
    count_launch(output_counts, tokens, num_rows).run()


def need_unit_strides(rows: SamplingRows) -> None:
    """Raise `ValueError` for a tensor of `rows` whose last dimension is not contiguous."""
    for part in (rows, rows.cuts, rows.penalties):
        values = {} if part is None else {field.name: getattr(part, field.name) for field in fields(part)}
        need_unit_stride(**{name: value for name, value in values.items() if isinstance(value, Tensor)})


def draw_launch(
    logits: Tensor,
    rows: SamplingRows,
    steps: Tensor,
    search: Search | None,
    candidates: Tensor,
    num_rows: Tensor | None,
    first_token: int = 0,
) -> Launch:
    """`candidates` int64 [T, tiles] is written: the best of each tile, of what surely stays.

    `search`, whose bins are filled, gets its list: the tokens that may stay or not.
    """
    draw: dict[str, object] = {
        "seeds_ptr": rows.seeds,
        "indices_ptr": rows.indices,
        "steps_ptr": steps,
        "candidates_ptr": candidates,
        "first_token": first_token,
        "listed_ptr": None if search is None else search.listed,
    }
    draw |= no_search(candidates.shape[1]) if search is None else search.arguments(rows)
    return scores_launch(_draw_kernel, logits, rows, num_rows, draw)


def count_launch(output_counts: Tensor, tokens: Tensor, num_rows: Tensor | None) -> Launch:
    """One program for 128 rows."""
    rows, block = tokens.shape[0], 128
    arguments = {
        **strided(counts=output_counts),
        "tokens_ptr": tokens,
        **row_counts(num_rows, rows),
        "BLOCK": block,
    }
    return Launch(_count_kernel, (triton.cdiv(rows, block),), arguments)


def launches(shape: ModelShape, dtype: torch.dtype) -> Iterator[tuple[str, Launch]]:
    """What `kernels/inspect.py` compiles."""
    total, vocab = 64, shape.vocab_size
    logits, num_rows = meta(total, vocab, dtype=torch.float32), meta(1, dtype=torch.int32)
    floats, integers = meta(total, dtype=torch.float32), meta(total, dtype=torch.int64)
    seen, counts = meta(total, vocab, dtype=torch.uint8), meta(total, vocab, dtype=torch.int32)
    cuts = Cuts(floats, integers, floats)
    penalties = Penalties(floats, floats, floats, seen, counts)
    candidates = meta(total, tiles_of(vocab), dtype=torch.int64)
    search = Search.empty(logits)
    yield "draw", draw_launch(logits, SamplingRows(floats, integers, integers), integers, None, candidates, num_rows)
    yield "best", best_launch(candidates, integers, floats, num_rows)
    for label, given in (("cuts", None), ("cuts, penalties", penalties)):
        rows = SamplingRows(floats, integers, integers, cuts, given)
        for name, launch in search_launches(logits, rows, search, num_rows).items():
            yield f"{name}, {label}", launch
        yield f"draw, {label}", draw_launch(logits, rows, integers, search, candidates, num_rows)
    yield "settle", settle_launch(rows, integers, search, candidates, integers, floats, num_rows)
    yield "count", count_launch(counts, integers, num_rows)


@triton.jit(**NOT_SPECIALIZED)
def _draw_kernel(
    logits_ptr,
    logits_stride,
    temperature_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    seen_ptr,
    seen_stride,
    counts_ptr,
    counts_stride,
    seeds_ptr,
    indices_ptr,
    steps_ptr,
    candidates_ptr,
    first_token,
    min_p_ptr,
    top_k_ptr,
    top_p_ptr,
    ends_ptr,
    border_bins_ptr,
    num_listed_ptr,
    listed_ptr,
    num_rows_ptr,
    total_rows,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    PADDED_TILES: tl.constexpr,
    BINS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    if row >= live_rows(num_rows_ptr, total_rows):
        return
    tokens, scores = tile_scores(
        logits_ptr, logits_stride, temperature_ptr, repetition_ptr, presence_ptr, frequency_ptr,
        seen_ptr, seen_stride, counts_ptr, counts_stride, row, V, BLOCK,
    )  # fmt: skip
    draws = tl.load(temperature_ptr + row) != 0
    if listed_ptr is not None:  # noqa: SIM102 (a condition of the compiler around one of the device)
        if cuts_row(temperature_ptr, min_p_ptr, top_k_ptr, top_p_ptr, row):
            scores = _staying(
                scores, tokens, row, min_p_ptr, top_k_ptr, top_p_ptr, ends_ptr, border_bins_ptr, num_listed_ptr,
                listed_ptr, V, TILES, PADDED_TILES, BINS,
            )  # fmt: skip
            draws = tl.max(ordered(scores), 0) > MINUS_INFINITY  # of most tiles nothing stays
    if draws:
        seed, index, step = tl.load(seeds_ptr + row), tl.load(indices_ptr + row), tl.load(steps_ptr + row)
        first = tl.program_id(1) * BLOCK
        scores += gumbel(tile_words(seed, index, step, first_token + first, BLOCK))
    # Tokens beyond V score -inf, and lose against any token below them.
    best = tl.max(candidate(ordered(scores), tokens), 0)
    tl.store(candidates_ptr + row * TILES + tl.program_id(1), best)


@triton.jit
def _staying(
    scores, tokens, row, min_p_ptr, top_k_ptr, top_p_ptr, ends_ptr, border_bins_ptr, num_listed_ptr, listed_ptr,
    V: tl.constexpr, TILES: tl.constexpr, PADDED_TILES: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """The scores, -inf where a token does not surely stay; those of which only the search can tell are listed."""
    highest, lowest, is_finite = row_ends(ends_ptr, row, TILES, PADDED_TILES)
    if is_finite:
        keys = ordered(scores)
        stays = keys >= floor_of(highest, tl.load(min_p_ptr + row))
        if searches(tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), V):
            border_bins_ptr += row * 3
            counted, first, last = tl.load(border_bins_ptr), tl.load(border_bins_ptr + 1), tl.load(border_bins_ptr + 2)
            bins = bins_of(keys, highest, lowest, BINS)
            may_stay = stays & ((bins == counted) | ((bins >= first) & (bins <= last))) & (bins < BINS)
            _append(listed_ptr + row * V, num_listed_ptr + row, candidate(keys, tokens), may_stay)
            stays &= bins < tl.minimum(counted, first)
        scores = tl.where(stays, scores, float("-inf"))
    return scores


@triton.jit
def _append(listed_ptr, num_listed_ptr, candidates, listed):
    """Put what is `listed` at the end of a list that others lengthen too."""
    ones = listed.to(tl.int32)
    count = tl.sum(ones, 0)
    if count > 0:
        begin = tl.atomic_add(num_listed_ptr, count, sem="relaxed")
        tl.store(listed_ptr + begin + tl.cumsum(ones, 0) - 1, candidates, mask=listed)


@triton.jit(**NOT_SPECIALIZED)
def _count_kernel(
    counts_ptr,
    counts_stride,
    tokens_ptr,
    num_rows_ptr,
    total_rows,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = rows < live_rows(num_rows_ptr, total_rows)
    pointers = counts_ptr + rows.to(tl.int64) * counts_stride + tl.load(tokens_ptr + rows, mask=mask, other=0)
    tl.store(pointers, tl.load(pointers, mask=mask, other=0) + 1, mask=mask)
