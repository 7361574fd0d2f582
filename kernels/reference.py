"""Every operation of the model in plain torch: the specification, the CPU path and the oracle of the kernel tests.

The operations are cut where a GPU would launch: a layer is `qkv`, `paged_attention`, `linear_residual`, `gate_up`,
`linear_residual`; with norms behind its sublayers each product goes to zeros, and `add_norm` follows. Shapes below use
T rows (tokens), H hidden channels, D channels per head, N query heads and M key/value heads.

The KV pool is `[num_blocks, 2, block_size, M, D]`, keys at index 0 and values at 1, of the dtype of `hidden` or in 8
bits (`kv_pool.py`). An *entry* is the flat index
`block * 2 * block_size + half * block_size + offset` of one key or value `[M, D]`. Channels of query and key heads
stand in adjacent pairs (see `weights.py`), so that RoPE is one complex multiplication. A `weight` is a float matrix of
the dtype of `hidden`, one of a narrower dtype (here alone: Triton's operations take none), or a quantized one
(`quantized.py`).

`num_rows`, an int32 tensor [1] on the operation's device, says how many rows (or copies) to compute; None means all.
Rows at or beyond it are neither read nor written, and where an operation returns rows, theirs are undefined (here NaN,
or -1 for tokens, so that a reader notices). On a GPU it is read by the kernel, never by the host: a captured
graph serves any number of rows.
"""

from __future__ import annotations

from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor

from d3engine.kernels import kv_pool
from d3engine.kernels.blocks import StackedWeight
from d3engine.kernels.decode_rows import DecodeRows
from d3engine.kernels.kv_pool import KVPool
from d3engine.kernels.low_rank import RowMaps, add_maps_
from d3engine.kernels.matrices import Weight, looked_up, tensors_of
from d3engine.kernels.reference_attention import attention_inputs as attention_inputs
from d3engine.kernels.reference_attention import decode_attention_inputs as decode_attention_inputs
from d3engine.kernels.reference_attention import live_rows, soft_capped, undefined_beyond
from d3engine.kernels.reference_attention import paged_attention as paged_attention
from d3engine.kernels.sampling import SamplingRows, cut_min_p_, cut_top, penalised
from d3engine.kernels.weight_format import WeightFormat

TABLE_DTYPE = torch.int64
"""Of the block tables of a step."""

embed = looked_up

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF
_ROUNDS = 10


def philox(key: tuple[Tensor, Tensor], counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four words for each counter under each key; all are int64 tensors holding 32-bit words, and broadcast."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3


def _multiply(word: Tensor, constant: int) -> tuple[Tensor, Tensor]:
    """High and low words of a 32 x 32 bit product; int64 wraps around, and the masks undo what the sign did."""
    product = word * constant
    return (product >> 32) & _LOW, product & _LOW


def gumbel(seeds: Tensor, indices: Tensor, steps: Tensor, num_tokens: int, first_token: int = 0) -> Tensor:
    """Standard Gumbel noise, float32 [rows, num_tokens], from int64 `seeds`, `indices` and `steps`, each [rows].

    It is that of the tokens from `first_token` on. argmax(logits + noise) is a draw from softmax(logits). Token t uses
    word t % 4 of the counter (t // 4, step, index, 0) under the key (seed's low word, seed's high word).
    """
    skipped = first_token % 4
    groups = torch.arange(first_token // 4, -(-(first_token + num_tokens) // 4), device=seeds.device)
    counter = (groups[None, :], steps[:, None], indices[:, None], torch.zeros_like(steps)[:, None])
    key = (seeds[:, None] & _LOW, (seeds[:, None] >> 32) & _LOW)
    words = torch.stack(philox(key, counter), dim=-1).flatten(1)[:, skipped : skipped + num_tokens]
    # 23 bits and a half: the most that float32 keeps apart from both 0 and 1, where the logarithms end.
    uniform = ((words >> 9).float() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))


def uniform(seeds: Tensor, indices: Tensor, steps: Tensor) -> Tensor:
    """One number in [0, 1) for each row, float32 [rows], that no noise of `gumbel` is made of."""
    zeros = torch.zeros_like(steps)
    words = philox((seeds & _LOW, (seeds >> 32) & _LOW), (zeros, steps, indices, zeros + 1))
    return (words[0] >> 8).float() * 2.0**-24


def rms_norm(
    hidden: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None, num_rows: Tensor | None = None
) -> Tensor:
    """Root-mean-square norm of the rows of `hidden` [..., H], as transformers computes it.

    The statistics are float32 whatever the dtype, and the row is cast back before it meets `weight` [H]. With
    `residual` [..., H] (written): `hidden` is added to it, and the sum is normed.
    """
    if num_rows is not None:
        rows = live_rows(num_rows)
        out = rms_norm(hidden[rows], weight, eps, residual=None if residual is None else residual[rows])
        return undefined_beyond(out, hidden)
    if residual is not None:
        hidden = residual.add_(hidden)
    wide = hidden.float()
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scaled = wide * torch.rsqrt(norm.square_().mul_(1.0 / hidden.shape[-1]).add_(eps))
    if scaled.dtype != hidden.dtype:
        scaled = scaled.to(hidden.dtype)
    return scaled.mul_(weight)


def _normed(hidden: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return hidden if weight is None else rms_norm(hidden, weight, eps)


def add_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor, *, num_rows: Tensor | None = None) -> None:
    """Add the RMSNorm of the rows of `x` [T, H], times `weight` [H], to `residual` [T, H], in place."""
    if num_rows is not None:
        x, residual = x[live_rows(num_rows)], residual[live_rows(num_rows)]
    residual.add_(rms_norm(x, weight, eps))


def _rows_apart(x: Tensor) -> Tensor:
    """The values of `x` [T, K], with zeros behind each row where a product on a CPU would read beyond it.

    On CPUs with AMX oneDNN's product of bfloat16 reads rows in runs of 64 bytes and multiplies what stands behind a
    row, the next one, by zero: a NaN there would become its neighbour's.
    """
    values_at_once = 64 // x.element_size()
    rows, channels = x.shape
    if x.device.type != "cpu" or x.element_size() != 2 or channels % values_at_once == 0:
        return x
    padded = x.new_zeros(rows, -(-channels // values_at_once) * values_at_once)
    padded[:, :channels] = x
    return padded[:, :channels]


def _linear(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """`x` [T, K] times `weight` [N, K] transposed, plus `bias` [N]: [T, N] in the dtype of `x`.

    A quantized matrix stands for what its `dequantize` gives, and a narrower float one for its values. Some
    formats meet `x` rounded. No copy of a matrix in the dtype of `x` is kept: each call makes one again, piece by
    piece. The scales of rows can wait for the product, but in float16 that could overflow without them.
    """
    if isinstance(weight, StackedWeight):
        out = torch.cat([_linear(x, part, None) for part in weight.parts], dim=1)
        return out if bias is None else out.add_(bias)
    if isinstance(weight, WeightFormat):
        x = weight.rounded(x)
    x = _rows_apart(x)
    if _is_as_wide(weight, x):
        return F.linear(x, weight, bias)
    num_rows, num_columns = weight.shape
    out = x.new_empty(x.shape[0], num_rows)
    step = _rows_at_once(x.shape[0], num_columns) if x.device.type == "cpu" else num_rows
    scales = weight.row_scales if isinstance(weight, WeightFormat) and x.dtype != torch.float16 else None
    values = weight if scales is None else tensors_of(weight)[0]
    for start in range(0, num_rows, step):
        out[:, start : start + step] = F.linear(x, _widened(values, start, start + step, x.dtype))
    if scales is not None:
        out.mul_(scales)
    if bias is not None:
        out.add_(bias)
    return out


def _linear_with_maps(x: Tensor, weight: Weight, bias: Tensor | None, maps: RowMaps | None) -> Tensor:
    product = _linear(x, weight, bias)
    return product if maps is None else add_maps_(product, x, maps)


def _is_as_wide(weight: Weight, x: Tensor) -> TypeGuard[Tensor]:
    """Whether `weight` can meet `x` as it is."""
    return isinstance(weight, Tensor) and weight.dtype == x.dtype


def _widened(weight: Weight, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    """Output channels [start, stop) of `weight` in `dtype`."""
    return weight[start:stop].to(dtype) if isinstance(weight, Tensor) else weight.rows(start, stop).dequantize(dtype)


def _rows_at_once(num_tokens: int, num_columns: int) -> int:
    """Output channels of a matrix on a CPU that are widened at once for a product with `num_tokens` rows.

    For few rows a piece should stay in a core's cache (2**18 floats are one MiB): whole, a matrix of 45 million values
    would take twelve times as long. Each piece reads all rows again: more rows pay for larger ones.
    """
    values = min(max(2**18, 2**11 * num_tokens), 2**20)
    return max(_CHANNELS_APART, values // num_columns // _CHANNELS_APART * _CHANNELS_APART)


_CHANNELS_APART = 16
"""Pieces begin at multiples of this output channel, where products of few rows begin anew anyway: a product by pieces
is then that of the whole matrix, in most shapes to the bit."""


def rotate_(heads: Tensor, rotations: Tensor) -> None:
    """Turn the channel pairs of `heads` [T, heads, D] by `rotations` [T, D / 2] (complex64), in place.

    The product is taken in float32: at half precision, angles of neighbouring positions would coincide.
    """
    tokens, count, channels = heads.shape
    pairs = torch.view_as_complex(heads.float().view(tokens, count, channels // 2, 2))
    pairs.mul_(rotations.unsqueeze(1))
    if heads.dtype != torch.float32:
        heads.copy_(torch.view_as_real(pairs).view(tokens, count, channels))


def qkv(
    hidden: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    weight: Weight,
    bias: Tensor | None,
    rotations: Tensor,
    pool: KVPool,
    entries: Tensor,
    num_heads: int,
    *,
    head_norms: Tensor | None = None,
    projection_norms: Tensor | None = None,
    maps: RowMaps | None = None,
    num_rows: Tensor | None = None,
) -> Tensor:
    """RMSNorm, the three projections, RoPE, and the write of keys and values into the pool.

    `hidden` [T, H], `weight` [(N + 2 M) D, H], `bias` [(N + 2 M) D] or None, `rotations` [T, D / 2] complex64,
    `pool` [num_blocks, 2, block_size, M, D] (written), `entries` [T, 2] int64: where each row's key and value go.
    `head_norms` [2, D]: weights of an RMSNorm with the same `eps` over each head before RoPE, the first for queries,
    the second for keys; None means none. `projection_norms` [(N + M) D]: the same over all queries of a row together,
    and over all its keys. Without `norm_weight` `hidden` is projected as it is. `maps` are added to the projections of
    their rows. Returns the queries [T, N, D], which share memory with nothing that is kept.
    """
    if num_rows is not None:
        rows = live_rows(num_rows)
        live = hidden[rows], norm_weight, eps, weight, bias, rotations[rows], pool, entries[rows], num_heads
        own = None if maps is None else maps.rows(rows)
        found = qkv(*live, head_norms=head_norms, projection_norms=projection_norms, maps=own)
        return undefined_beyond(found, hidden)
    kv_heads, channels = pool.shape[3], pool.shape[4]
    projected = _linear_with_maps(_normed(hidden, norm_weight, eps), weight, bias, maps)
    sizes = [num_heads * channels, kv_heads * channels]
    if projection_norms is not None:
        parts = torch.split(projected[:, : sum(sizes)], sizes, dim=1)
        for part, norm in zip(parts, torch.split(projection_norms, sizes), strict=True):
            part.copy_(rms_norm(part, norm, eps))
    turned = projected[:, : sum(sizes)].view(-1, num_heads + kv_heads, channels)
    if head_norms is not None:
        for heads, norm in zip((turned[:, :num_heads], turned[:, num_heads:]), head_norms, strict=True):
            heads.copy_(rms_norm(heads, norm, eps))
    rotate_(turned, rotations)
    new_entries = projected[:, num_heads * channels :].reshape(-1, kv_heads, channels)
    kv_pool.write_entries(pool, entries.view(-1), new_entries)
    return projected[:, : num_heads * channels].view(-1, num_heads, channels)


def linear_residual(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    residual: Tensor,
    *,
    maps: RowMaps | None = None,
    num_rows: Tensor | None = None,
) -> None:
    """Add `x` [T, K] times `weight` [H, K] transposed (and `bias` [H], and `maps`) to `residual` [T, H], in place."""
    if num_rows is not None:
        rows = live_rows(num_rows)
        x, residual, maps = x[rows], residual[rows], None if maps is None else maps.rows(rows)
    if maps is not None:
        add_maps_(residual, x, maps)
    if not _is_as_wide(weight, x):
        residual.add_(_linear(x, weight, bias))
        return
    residual.addmm_(_rows_apart(x), weight.t())
    if bias is not None:
        residual.add_(bias)


def gate_up(
    hidden: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    weight: Weight,
    bias: Tensor | None,
    *,
    activation: str = "silu",
    maps: RowMaps | None = None,
    num_rows: Tensor | None = None,
) -> Tensor:
    """RMSNorm, the gate and up projections, and the gates: activation(gate) * up, [T, I].

    `hidden` [T, H]; `weight` [2 I, H] and `bias` [2 I] hold the gate's rows first, then the up projection's.
    `activation` is "silu" (SwiGLU) or "gelu_tanh" (GeGLU); without `norm_weight` `hidden` is projected as it is. `maps`
    are added to the projections of their rows.
    """
    if num_rows is not None:
        rows = live_rows(num_rows)
        own = None if maps is None else maps.rows(rows)
        found = gate_up(hidden[rows], norm_weight, eps, weight, bias, activation=activation, maps=own)
        return undefined_beyond(found, hidden)
    gate, up = _linear_with_maps(_normed(hidden, norm_weight, eps), weight, bias, maps).chunk(2, dim=-1)
    return activated(gate, activation).mul_(up)


def activated(gate: Tensor, activation: str) -> Tensor:
    """`gate` after "silu" or "gelu_tanh", in new memory."""
    return F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")


def lm_head(
    hidden: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Weight,
    *,
    cap: float | None = None,
    maps: RowMaps | None = None,
    num_rows: Tensor | None = None,
) -> Tensor:
    """Final norm and projection of `hidden` [T, H] by `weight` [V, H]: float32 logits [T, V].

    With a soft `cap` above 0 each becomes cap * tanh(logit / cap), after `maps` are added.
    """
    if num_rows is not None:
        rows = live_rows(num_rows)
        own = None if maps is None else maps.rows(rows)
        return undefined_beyond(lm_head(hidden[rows], norm_weight, eps, weight, cap=cap, maps=own), hidden)
    logits = _linear_with_maps(rms_norm(hidden, norm_weight, eps), weight, None, maps)
    return soft_capped(logits, cap).float()


def lm_head_argmax(
    hidden: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Weight,
    *,
    cap: float | None = None,
    maps: RowMaps | None = None,
    num_rows: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The token of the largest logit of each row, int64 [T], and that logit, float32 [T]: `lm_head` and an argmax.

    Of equal logits the lowest token wins. A row with a NaN has the score NaN, and one without any finite logit -inf or
    inf: whether a row's logits are sound can be read off its score.
    """
    return _best(lm_head(hidden, norm_weight, eps, weight, cap=cap, maps=maps, num_rows=num_rows), num_rows)


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
) -> tuple[Tensor, Tensor]:
    """A draw from the softmax of logits / temperature in each row: `lm_head`, and `sample` without cuts and penalties.

    `temperature`, `seeds`, `indices`, `steps` and `first_token` as there. Returns tokens int64 [T], rows of `weight`,
    and scores float32 [T].
    """
    logits = lm_head(hidden, norm_weight, eps, weight, cap=cap, maps=maps, num_rows=num_rows)
    rows = SamplingRows(temperature, seeds, indices)
    return sample(logits, rows, steps, first_token=first_token, num_rows=num_rows)


def sample(
    logits: Tensor, rows: SamplingRows, steps: Tensor, *, first_token: int = 0, num_rows: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Choose a token of each row of `logits` float32 [T, V]: penalties, temperature, min-p, top-k, top-p, and a draw.

    A draw is the argmax of score / temperature + Gumbel noise, whose numbers depend on the row's seed, index and step
    (`steps` int64 [T] in [0, 2**32)) and the token alone. A row of temperature 0 takes the argmax of its scores. Where
    `logits` are a part of the vocabulary's, `first_token` is the token of their first column.

    Returns tokens int64 [T] and the winning values float32 [T]. Such a value is finite unless the row's logits held a
    NaN or infinity, or were all -inf; then the token means nothing.
    """
    vocab = logits.shape[1]
    scores = logits if rows.penalties is None else penalised(logits, rows.penalties)
    greedy = (rows.temperature == 0).unsqueeze(1)
    drawn = scores / rows.temperature.unsqueeze(1).masked_fill(greedy, 1.0)
    if rows.cuts is not None:
        drawn = cut_top(cut_min_p_(drawn, rows.cuts.min_p), rows.cuts.top_k, rows.cuts.top_p)
    drawn += gumbel(rows.seeds, rows.indices, steps, vocab, first_token)
    return _best(torch.where(greedy, scores, drawn), num_rows)


def count_tokens(output_counts: Tensor, tokens: Tensor, *, num_rows: Tensor | None = None) -> None:
    """Add one to `output_counts` int32 [T, V] (written) at each row's token of `tokens` int64 [T], each in [0, V)."""
    if num_rows is not None:
        output_counts, tokens = output_counts[live_rows(num_rows)], tokens[live_rows(num_rows)]
    output_counts.scatter_add_(1, tokens.unsqueeze(1), output_counts.new_ones(tokens.shape[0], 1))


def _best(scores: Tensor, num_rows: Tensor | None) -> tuple[Tensor, Tensor]:
    """The first of the largest of each row, NaN the largest of all, and its value."""
    if num_rows is not None:
        tokens, best = _best(scores[live_rows(num_rows)], None)
        return undefined_beyond(tokens, scores), undefined_beyond(best, scores)
    tokens = scores.argmax(dim=-1)
    return tokens, scores.gather(1, tokens.unsqueeze(1)).squeeze(1)


def copy_entries(pool: KVPool, source: Tensor, target: Tensor, *, num_rows: Tensor | None = None) -> None:
    """Copy entries of `pool` from `source` to `target`, both int64 [n] of flat entries (see above), in place.

    One source may have many targets; no target may be the source of another copy.
    """
    if num_rows is not None:
        source, target = source[live_rows(num_rows)], target[live_rows(num_rows)]
    kv_pool.copy_entries(pool, source, target)


def begin_step(rows: DecodeRows, rotation_table: Tensor, block_size: int) -> None:
    """Derive `kv_lengths`, `active_rows`, `entries` and `rotations` of the rows that live.

    `rotation_table` complex64 [positions, D / 2] holds the rotation of every position. Entries of layers that a row
    does not run, and everything of rows that do not live, are left as they are.
    """
    live = live_rows(rows.num_rows)
    positions = rows.positions[live]
    rows.kv_lengths[live] = (positions + 1).int()
    rows.rotations[live] = rotation_table[positions]
    active = rows.steps[live, None] < rows.cutoffs[live]  # [rows, L]
    rows.active_rows.copy_(active.sum(dim=0))
    blocks = rows.block_tables[:, torch.arange(len(positions), device=positions.device), positions // block_size]
    keys = blocks.long() * (2 * block_size) + positions % block_size
    entries = torch.stack((keys, keys + block_size), dim=-1)  # [L, rows, 2]
    rows.entries[:, live] = torch.where(active.t()[:, :, None], entries, rows.entries[:, live])


def end_step(rows: DecodeRows, tokens: Tensor, scores: Tensor) -> None:
    """Keep the chosen `tokens` int64 [B] and `scores` float32 [B] of the rows that live, and advance these by one."""
    live, taken = live_rows(rows.num_rows), int(rows.taken) % len(rows.chosen)
    rows.chosen[taken, live] = tokens[live]
    rows.scores[taken, live] = scores[live]
    rows.tokens[live] = tokens[live]
    rows.positions[live] += 1
    rows.steps[live] += 1
    rows.taken.add_(1)
