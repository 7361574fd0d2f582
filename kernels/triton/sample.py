"""Chooses tokens from logits on the device: penalties, temperature, cuts and the Gumbel draw, and counts the chosen.

A program takes one tile of one row and keeps its best candidate; a second launch picks the best of all tiles. Scores
are computed where they are needed and never stored. Only a batch in which somebody cuts has two launches more: the keys
of all scores, and the search for each row's border (see `cuts.py`). Nothing is fused to a multiply-add, and divisions
round correctly, so penalties and temperature give the very floats of the reference.
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
from d3engine.kernels.triton.cuts import border_launch, borders_of, cuts_row
from d3engine.kernels.triton.launches import Launch, ModelShape, meta
from d3engine.kernels.triton.noise import gumbel, tile_words
from d3engine.kernels.triton.product_kernels import NOT_SPECIALIZED, live_rows
from d3engine.kernels.triton.products import need_unit_stride

TILE = 1024
"""Tokens a program: 128256 tokens of a single row are 126 programs."""

_UNFUSED = {"enable_fp_fusion": False}


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
    borders = None
    if rows.cuts is not None:
        keys = torch.empty(logits.shape, dtype=torch.int32, device=logits.device)
        keys_launch(logits, rows, keys, num_rows).run()
        borders = borders_of(keys, rows, num_rows)
    total, vocab = logits.shape
    candidates = torch.empty(total, triton.cdiv(vocab, tuning(vocab)), dtype=torch.int64, device=logits.device)
    draw_launch(logits, rows, steps, borders, candidates, num_rows, first_token).run()
    return best_of(candidates, num_rows)


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


def tuning(vocab: int) -> int:
    """Tokens a program; a multiple of 4, as random numbers come by fours."""
    return int(min(TILE, triton.next_power_of_2(max(vocab, 32))))


def draw_launch(
    logits: Tensor,
    rows: SamplingRows,
    steps: Tensor,
    borders: Tensor | None,
    candidates: Tensor,
    num_rows: Tensor | None,
    first_token: int = 0,
) -> Launch:
    """`candidates` int64 [T, tiles] is written: the best of each tile, of what `borders` int64 [T] keeps."""
    draw: dict[str, object] = {
        "seeds_ptr": rows.seeds,
        "indices_ptr": rows.indices,
        "steps_ptr": steps,
        "borders_ptr": borders,
        "candidates_ptr": candidates,
        "first_token": first_token,
    }
    return _tiled(_draw_kernel, logits, rows, num_rows, draw)


def keys_launch(logits: Tensor, rows: SamplingRows, keys: Tensor, num_rows: Tensor | None) -> Launch:
    """`keys` int32 [T, V], contiguous, is written: those of the scores after penalties and temperature."""
    assert rows.cuts is not None
    cuts: dict[str, object] = {"min_p_ptr": rows.cuts.min_p, "top_k_ptr": rows.cuts.top_k, "top_p_ptr": rows.cuts.top_p}
    return _tiled(_keys_kernel, logits, rows, num_rows, cuts | {"keys_ptr": keys})


def count_launch(output_counts: Tensor, tokens: Tensor, num_rows: Tensor | None) -> Launch:
    """One program for 128 rows."""
    rows, block = tokens.shape[0], 128
    arguments = {
        "counts_ptr": output_counts,
        "counts_stride": output_counts.stride(0),
        "tokens_ptr": tokens,
        "num_rows_ptr": num_rows,
        "total_rows": rows,
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
    candidates = meta(total, triton.cdiv(vocab, tuning(vocab)), dtype=torch.int64)
    plain = SamplingRows(floats, integers, integers)
    full = SamplingRows(floats, integers, integers, cuts, penalties)
    keys = meta(total, vocab, dtype=torch.int32)
    yield "draw", draw_launch(logits, plain, integers, None, candidates, num_rows)
    yield "draw, penalties, border", draw_launch(logits, full, integers, integers, candidates, num_rows)
    yield "keys", keys_launch(logits, full, keys, num_rows)
    yield "border", border_launch(keys, full, integers, num_rows)
    yield "best", best_launch(candidates, integers, floats, num_rows)
    yield "count", count_launch(counts, integers, num_rows)


def _tiled(
    kernel: object, logits: Tensor, rows: SamplingRows, num_rows: Tensor | None, more: dict[str, object]
) -> Launch:
    """A launch of one program for each tile of each row, with what the scores need."""
    penalties, (total, vocab) = rows.penalties, logits.shape
    arguments = {
        "logits_ptr": logits,
        "logits_stride": logits.stride(0),
        "temperature_ptr": rows.temperature,
        "repetition_ptr": None if penalties is None else penalties.repetition,
        "presence_ptr": None if penalties is None else penalties.presence,
        "frequency_ptr": None if penalties is None else penalties.frequency,
        "seen_ptr": None if penalties is None else penalties.prompt_seen,
        "seen_stride": 0 if penalties is None else penalties.prompt_seen.stride(0),
        "counts_ptr": None if penalties is None else penalties.output_counts,
        "counts_stride": 0 if penalties is None else penalties.output_counts.stride(0),
        "num_rows_ptr": num_rows,
        "total_rows": total,
        "V": vocab,
        "BLOCK": tuning(vocab),
    }
    grid = (total, triton.cdiv(vocab, tuning(vocab)))
    return Launch(kernel, grid, arguments | more, options=_UNFUSED)


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
    borders_ptr,
    candidates_ptr,
    first_token,
    num_rows_ptr,
    total_rows,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if row >= live_rows(num_rows_ptr, total_rows):
        return
    first = tl.program_id(1) * BLOCK
    tokens = first + tl.arange(0, BLOCK)
    temperature = tl.load(temperature_ptr + row)
    scores = _scores(
        logits_ptr + row * logits_stride,
        temperature,
        repetition_ptr,
        presence_ptr,
        frequency_ptr,
        seen_ptr,
        seen_stride,
        counts_ptr,
        counts_stride,
        row,
        tokens,
        V,
    )
    if temperature != 0:
        kept = scores
        if borders_ptr is not None:
            is_kept = candidate(ordered(scores), tokens) >= tl.load(borders_ptr + row)
            kept = tl.where(is_kept, scores, float("-inf"))
        seed, index, step = tl.load(seeds_ptr + row), tl.load(indices_ptr + row), tl.load(steps_ptr + row)
        scores = kept + gumbel(tile_words(seed, index, step, first_token + first, BLOCK))
    # Tokens beyond V score -inf, and lose against any token below them.
    best = tl.max(candidate(ordered(scores), tokens), 0)
    tl.store(candidates_ptr + row * tl.num_programs(1) + tl.program_id(1), best)


@triton.jit(**NOT_SPECIALIZED)
def _keys_kernel(
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
    min_p_ptr,
    top_k_ptr,
    top_p_ptr,
    keys_ptr,
    num_rows_ptr,
    total_rows,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if row >= live_rows(num_rows_ptr, total_rows):
        return
    if not cuts_row(temperature_ptr, min_p_ptr, top_k_ptr, top_p_ptr, row):
        return
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    scores = _scores(
        logits_ptr + row * logits_stride,
        tl.load(temperature_ptr + row),
        repetition_ptr,
        presence_ptr,
        frequency_ptr,
        seen_ptr,
        seen_stride,
        counts_ptr,
        counts_stride,
        row,
        tokens,
        V,
    )
    tl.store(keys_ptr + row * V + tokens, ordered(scores), mask=tokens < V)


@triton.jit
def _scores(
    row_ptr,
    temperature,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    seen_ptr,
    seen_stride,
    counts_ptr,
    counts_stride,
    row,
    tokens,
    V: tl.constexpr,
):
    """Logits of one row after penalties and temperature (0 divides by nothing); -inf beyond V."""
    mask = tokens < V
    scores = tl.load(row_ptr + tokens, mask=mask, other=float("-inf"))
    if repetition_ptr is not None:
        counts = tl.load(counts_ptr + row * counts_stride + tokens, mask=mask, other=0)
        seen = (tl.load(seen_ptr + row * seen_stride + tokens, mask=mask, other=0) != 0) | (counts > 0)
        repetition = tl.load(repetition_ptr + row)
        repeated = tl.where(scores > 0, tl.div_rn(scores, repetition), scores * repetition)
        scores = tl.where(seen, repeated, scores)
        often = tl.load(frequency_ptr + row) * counts.to(tl.float32)
        scores -= often + tl.load(presence_ptr + row) * (counts > 0).to(tl.float32)
    return tl.div_rn(scores, tl.where(temperature == 0, 1.0, temperature))


@triton.jit(**NOT_SPECIALIZED)
def _count_kernel(
    counts_ptr,
    counts_stride,
    tokens_ptr,
    num_rows_ptr,
    total_rows,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = rows < live_rows(num_rows_ptr, total_rows)
    pointers = counts_ptr + rows.to(tl.int64) * counts_stride + tl.load(tokens_ptr + rows, mask=mask, other=0)
    tl.store(pointers, tl.load(pointers, mask=mask, other=0) + 1, mask=mask)
