"""The final norm and the projection to the vocabulary: float32 logits, or only the token that each row chooses.

Where a token is the likeliest, or a draw that nothing cuts, the logits need not exist: each program keeps the best
candidate of its tile, and a small second kernel picks the best of those (see `candidates.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from d3engine.kernels.low_rank import RowMaps
from d3engine.kernels.matrices import Weight
from d3engine.kernels.reference_attention import soft_capped
from d3engine.kernels.sampling import SamplingRows
from d3engine.kernels.triton.candidates import best_launch, best_of, candidate, ordered
from d3engine.kernels.triton.launches import ROW_COUNTS, Launch, ModelShape, meta, meta_weight
from d3engine.kernels.triton.low_rank import maps_launches
from d3engine.kernels.triton.matmul import matmul
from d3engine.kernels.triton.product_kernels import (
    NOT_SPECIALIZED,
    ProductConfig,
    hyperbolic_tangent,
    prologue,
    tile_product,
)
from d3engine.kernels.triton.product_rows import labelled, product_launches
from d3engine.kernels.triton.products import Tile, need_unit_stride, product_tile
from d3engine.kernels.triton.rms_norm import rms_norm
from d3engine.kernels.triton.sample import need_unit_strides, sample
from d3engine.kernels.triton.scores import gumbel, token_words
from d3engine.kernels.triton.tiles import LIMITS

DRAWN_ROWS = 64
"""Rows of a tile whose noise is drawn where its logits are: beside 128 rows of sums no registers are left for it."""

_OF_CHOICE = ("temperature_ptr", "seeds_ptr", "indices_ptr", "steps_ptr", "candidates_ptr", "first_token", "TILES")
"""Arguments of the kernel that logits do not have."""


def lm_head(
    hidden: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Weight,
    *,
    cap: float | None = None,
    maps: RowMaps | None = None,
    num_rows: Tensor | None = None,
    batch_invariant: bool = False,
) -> Tensor:
    """Final norm and projection of `hidden` [T, H] by `weight` [V, H]: float32 logits [T, V]; see `reference.py`.

    The logits are the float32 sums; `reference.py`, and the path of many rows, round them to the weights' dtype first.
    `num_rows` int32 [1]: rows at or beyond it are undefined in what is returned; None means all rows.
    `batch_invariant`: as for `product_tile`; then the three operations here have the same logits.
    """
    need_unit_stride(hidden=hidden, norm_weight=norm_weight, weight=weight)
    rows, vocab = hidden.shape[0], weight.shape[0]
    tile = product_tile(rows, weight, hidden.dtype, batch_invariant=batch_invariant)
    if maps is not None:
        given = hidden, norm_weight, eps, weight
        logits = lm_head(*given, num_rows=num_rows, batch_invariant=batch_invariant)
        for launch in maps_launches(rms_norm(hidden, norm_weight, eps, num_rows=num_rows), maps, logits, num_rows):
            launch.run()
        return soft_capped(logits, cap)
    if tile is None:
        return soft_capped(matmul(rms_norm(hidden, norm_weight, eps, num_rows=num_rows), weight), cap).float()
    logits = torch.empty(rows, vocab, dtype=torch.float32, device=hidden.device)
    for launch in logits_launches(tile, hidden, norm_weight, eps, weight, logits, num_rows, cap):
        launch.run()
    return logits


def lm_head_argmax(
    hidden: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Weight,
    *,
    cap: float | None = None,
    maps: RowMaps | None = None,
    num_rows: Tensor | None = None,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """The token of the largest logit of each row, int64 [T], and that logit, float32 [T]. Arguments as for `lm_head`.

    Of equal logits the lowest token wins. A row with a NaN has the score NaN, and the first such token.
    """
    need_unit_stride(hidden=hidden, norm_weight=norm_weight, weight=weight)
    rows, vocab = hidden.shape[0], weight.shape[0]
    tile = product_tile(rows, weight, hidden.dtype, batch_invariant=batch_invariant)
    if tile is None or maps is not None:
        invariant = {"batch_invariant": batch_invariant}
        logits = lm_head(hidden, norm_weight, eps, weight, cap=cap, maps=maps, num_rows=num_rows, **invariant)
        tokens = logits.argmax(dim=-1)
        return tokens, logits.gather(1, tokens.unsqueeze(1)).squeeze(1)
    candidates = torch.empty(rows, triton.cdiv(vocab, tile.outputs), dtype=torch.int64, device=hidden.device)
    for launch in choice_launches(tile, hidden, norm_weight, eps, weight, None, None, candidates, num_rows, cap=cap):
        launch.run()
    return best_of(candidates, num_rows)


def lm_head_sample(
    hidden: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Weight,
    temperature: Tensor,
    seeds: Tensor,
    indices: Tensor,
    steps: Tensor,
    *,
    first_token: int = 0,
    cap: float | None = None,
    maps: RowMaps | None = None,
    num_rows: Tensor | None = None,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """A draw from the softmax of logits / temperature in each row; temperature 0 takes the likeliest token.

    `temperature` float32 [T], `seeds`, `indices` and `steps` int64 [T], as for `sample`; the others as for `lm_head`.
    `first_token`, a multiple of 4, is the token of the first row of `weight`, for the noise alone. Returns tokens int64
    [T], rows of `weight`, and the winning values float32 [T], which are finite where the logits are.
    """
    need_unit_stride(hidden=hidden, norm_weight=norm_weight, weight=weight, steps=steps)
    count, vocab = hidden.shape[0], weight.shape[0]
    rows = SamplingRows(temperature, seeds, indices)
    need_unit_strides(rows)
    tile = product_tile(count, weight, hidden.dtype, batch_invariant=batch_invariant)
    if tile is None or tile.rows > DRAWN_ROWS or maps is not None:
        invariant = {"batch_invariant": batch_invariant}
        logits = lm_head(hidden, norm_weight, eps, weight, cap=cap, maps=maps, num_rows=num_rows, **invariant)
        return sample(logits, rows, steps, first_token=first_token, num_rows=num_rows)
    candidates = torch.empty(count, triton.cdiv(vocab, tile.outputs), dtype=torch.int64, device=hidden.device)
    given = (tile, hidden, norm_weight, eps, weight, rows, steps, candidates, num_rows, first_token, cap)
    for launch in choice_launches(*given):
        launch.run()
    return best_of(candidates, num_rows)


def logits_launches(
    tile: Tile,
    hidden: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Weight,
    logits: Tensor,
    num_rows: Tensor | None,
    cap: float | None = None,
) -> list[Launch]:
    """Norm, product and store in one kernel; or the norm of many rows before."""
    target = {"logits_ptr": logits, "cap": cap, "V": weight.shape[0], **dict.fromkeys(_OF_CHOICE)}
    *before, product = product_launches(_head_kernel, tile, hidden, weight, num_rows, norm=(norm_weight, eps), **target)
    if isinstance(weight, Tensor) and tile.rows == 64 and tile.warps == 8:
        product = replace(product, **LIMITS["logits of 64 rows"].options)
    return [*before, product]


def choice_launches(
    tile: Tile,
    hidden: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Weight,
    rows: SamplingRows | None,
    steps: Tensor | None,
    candidates: Tensor,
    num_rows: Tensor | None,
    first_token: int = 0,
    cap: float | None = None,
) -> list[Launch]:
    """The best candidate of every tile, `candidates` int64 [T, tiles] (written): by logit, or a draw of `rows`."""
    choice = {
        "temperature_ptr": None if rows is None else rows.temperature,
        "seeds_ptr": None if rows is None else rows.seeds,
        "indices_ptr": None if rows is None else rows.indices,
        "steps_ptr": steps,
        "candidates_ptr": candidates,
        "first_token": first_token,
        "logits_ptr": None,
        "cap": cap,
        "TILES": candidates.shape[1],
        "V": weight.shape[0],
    }
    return product_launches(_head_kernel, tile, hidden, weight, num_rows, norm=(norm_weight, eps), **choice)


def launches(
    shape: ModelShape, dtype: torch.dtype, weights: str, batch_invariant: bool = False
) -> Iterator[tuple[str, Launch]]:
    """What `kernels/inspect.py` compiles."""
    vocab, columns = shape.vocab_size, shape.hidden_size
    norm, num_rows = meta(columns, dtype=dtype), meta(1, dtype=torch.int32)
    cap = 30.0 if shape.soft_caps else None
    weight = meta_weight(vocab, columns, dtype=dtype, weights=weights)
    for rows in ROW_COUNTS:
        tile = product_tile(rows, weight, dtype, batch_invariant=batch_invariant)
        if tile is None:
            continue
        hidden, logits = meta(rows, columns, dtype=dtype), meta(rows, vocab, dtype=torch.float32)
        found = logits_launches(tile, hidden, norm, 1e-5, weight, logits, num_rows, cap)
        yield from labelled(found, "logits", rows)
        integers, floats = meta(rows, dtype=torch.int64), meta(rows, dtype=torch.float32)
        candidates = meta(rows, triton.cdiv(vocab, tile.outputs), dtype=torch.int64)
        given = (tile, hidden, norm, 1e-5, weight)
        draws = SamplingRows(floats, integers, integers)
        yield from labelled(choice_launches(*given, None, None, candidates, num_rows, cap=cap), "argmax", rows)
        if tile.rows <= DRAWN_ROWS:
            found = choice_launches(*given, draws, integers, candidates, num_rows, cap=cap)
            yield from labelled(found, "sample", rows)
    yield "best", best_launch(candidates, integers, floats, num_rows)


@triton.jit(**NOT_SPECIALIZED)
def _head_kernel(
    x_ptr,
    x_stride,
    norm_ptr,
    eps,
    weight_ptr,
    weight_stride,
    scales_ptr,
    SCALES_STRIDE: tl.constexpr,
    TYPE: tl.constexpr,
    logits_ptr,
    num_rows_ptr,
    total_rows,
    temperature_ptr,
    seeds_ptr,
    indices_ptr,
    steps_ptr,
    candidates_ptr,
    first_token,
    cap,
    K: tl.constexpr,
    V: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Logits; or, where there is no place for them, the best candidate of each tile: by logit, or a draw."""
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Outputs beyond V repeat the last token's logit, so they are that token.
    tokens = tl.minimum(outputs, V - 1)
    CONFIG: tl.constexpr = ProductConfig(K, BLOCK_T, BLOCK_N, BLOCK_K, WEIGHTS_FIRST, STAGES, PDL, SCALES_STRIDE, TYPE)
    first, count = prologue(weight_ptr, weight_stride, tokens, 0, num_rows_ptr, total_rows, CONFIG)
    if tl.program_id(0) * BLOCK_T >= count:
        return
    rows, sums = tile_product(
        x_ptr, x_stride, count, norm_ptr, eps, weight_ptr, weight_stride, scales_ptr, tokens, CONFIG, first,
    )  # fmt: skip
    if cap is not None:
        sums = cap * hyperbolic_tangent(sums / cap)
    if logits_ptr is not None:
        pointers = logits_ptr + rows.to(tl.int64)[:, None] * V + outputs[None, :]
        tl.store(pointers, sums, mask=(rows < count)[:, None] & (outputs < V)[None, :])
    else:
        if temperature_ptr is not None:
            live = rows < count
            temperature = tl.load(temperature_ptr + rows, mask=live, other=0.0)[:, None]
            seeds = tl.load(seeds_ptr + rows, mask=live, other=0)[:, None]
            indices = tl.load(indices_ptr + rows, mask=live, other=0)[:, None]
            steps = tl.load(steps_ptr + rows, mask=live, other=0)[:, None]
            noise = gumbel(token_words(seeds, indices, steps, first_token + tokens[None, :]))
            drawn = tl.div_rn(sums, tl.where(temperature == 0, 1.0, temperature)) + noise
            sums = tl.where(temperature == 0, sums, drawn)
        best = tl.max(candidate(ordered(sums), tokens[None, :]), 1)
        tl.store(candidates_ptr + rows.to(tl.int64) * TILES + tl.program_id(1), best, mask=rows < count)
