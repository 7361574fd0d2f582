"""What logits become before anybody chooses among them: penalties, then temperature, tile by tile.

Several kernels look at a row's scores, and each computes them for itself, since they are cheaper than a place to keep
them. Nothing is fused to a multiply-add, and divisions round correctly: so all kernels see the very same floats, and
these are the reference's.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from d3engine.kernels.sampling import SamplingRows
from d3engine.kernels.triton.launches import Launch, row_counts, strided


@triton.jit
def tile_words(seed, index, step, first, BLOCK: tl.constexpr):
    """uint32 [BLOCK]: the words of tokens `first`, `first` + 1 ... of one row; `first` and BLOCK are multiples of 4."""
    w0, w1, w2, w3 = _group_words(seed, index, step, first // 4 + tl.arange(0, BLOCK // 4))
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@triton.jit
def token_words(seed, index, step, tokens):
    """uint32: the words of `tokens`, with which `seed`, `index` and `step` broadcast."""
    w0, w1, w2, w3 = _group_words(seed, index, step, tokens // 4)
    place = tokens % 4
    return tl.where(place < 2, tl.where(place == 0, w0, w1), tl.where(place == 2, w2, w3))


@triton.jit
def gumbel(words):
    """Standard Gumbel noise, float32, from uint32 words."""
    uniform = ((words >> 9).to(tl.float32) + 0.5) * (2.0**-23)
    return -tl.log(-tl.log(uniform))


@triton.jit
def _group_words(seed, index, step, groups):
    """The four words of the counters (group, step, index, 0) under the key (seed's low word, seed's high word)."""
    return tl.philox(seed, groups.to(tl.uint32), step.to(tl.uint32), index.to(tl.uint32), 0)


TILE = 1024
"""Tokens a program: 128256 tokens of a single row are 126 programs."""

UNFUSED = {"enable_fp_fusion": False}
"""The compile options of every kernel that computes scores."""


def tuning(vocab: int) -> int:
    """Tokens a program; a multiple of 4, as random numbers come by fours."""
    return int(min(TILE, triton.next_power_of_2(max(vocab, 32))))


def tiles_of(vocab: int) -> int:
    """Programs a row."""
    return int(triton.cdiv(vocab, tuning(vocab)))


def scores_launch(
    kernel: object, logits: Tensor, rows: SamplingRows, num_rows: Tensor | None, more: dict[str, object]
) -> Launch:
    """A launch of `kernel` with one program for each tile of each row: what `tile_scores` takes, and `more`."""
    penalties, (total, vocab) = rows.penalties, logits.shape
    arguments = {
        **strided(logits=logits),
        "temperature_ptr": rows.temperature,
        "repetition_ptr": None if penalties is None else penalties.repetition,
        "presence_ptr": None if penalties is None else penalties.presence,
        "frequency_ptr": None if penalties is None else penalties.frequency,
        "seen_ptr": None if penalties is None else penalties.prompt_seen,
        "seen_stride": 0 if penalties is None else penalties.prompt_seen.stride(0),
        "counts_ptr": None if penalties is None else penalties.output_counts,
        "counts_stride": 0 if penalties is None else penalties.output_counts.stride(0),
        **row_counts(num_rows, total),
        "V": vocab,
        "BLOCK": tuning(vocab),
    }
    return Launch(kernel, (total, tiles_of(vocab)), arguments | more, options=UNFUSED)


@triton.jit
def tile_scores(
    logits_ptr, logits_stride, temperature_ptr, repetition_ptr, presence_ptr, frequency_ptr,
    seen_ptr, seen_stride, counts_ptr, counts_stride, row, V: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The program's tokens [BLOCK] of a row, and their logits after penalties and temperature (0 divides by nothing).

    Beyond V the scores are -inf.
    """
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = tokens < V
    scores = tl.load(logits_ptr + row * logits_stride + tokens, mask=mask, other=float("-inf"))
    if repetition_ptr is not None:
        counts = tl.load(counts_ptr + row * counts_stride + tokens, mask=mask, other=0)
        seen = (tl.load(seen_ptr + row * seen_stride + tokens, mask=mask, other=0) != 0) | (counts > 0)
        repetition = tl.load(repetition_ptr + row)
        repeated = tl.where(scores > 0, tl.div_rn(scores, repetition), scores * repetition)
        scores = tl.where(seen, repeated, scores)
        often = tl.load(frequency_ptr + row) * counts.to(tl.float32)
        scores -= often + tl.load(presence_ptr + row) * (counts > 0).to(tl.float32)
    temperature = tl.load(temperature_ptr + row)
    return tokens, tl.div_rn(scores, tl.where(temperature == 0, 1.0, temperature))
