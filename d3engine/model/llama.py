"""The Llama forward pass over a plan's rows, and its rotary position embedding (rope)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from d3engine.kernels.kv_pool import NO_WINDOW, KVPool
from d3engine.kernels.low_rank import LM_HEAD, RowMaps
from d3engine.kernels.matrices import Weight
from d3engine.kernels.reference import rms_norm
from d3engine.kernels.sampling import SamplingRows
from d3engine.model.adapters import RowAdapters
from d3engine.model.config import ModelConfig
from d3engine.model.rope_config import RopeConfig
from d3engine.model.shard import Ranks
from d3engine.model.weights import LlamaWeights


class Llama:
    """The weights of one model and the operations that run it; with `ranks`, of this rank's shard.

    The methods return results of the whole model: every rank calls them with the same rows. A layer knows neither
    sequences nor depth; the caller decides which rows it runs and where their KV entries go.
    """

    def __init__(self, config: ModelConfig, weights: LlamaWeights, kernels: Any, ranks: Ranks | None = None) -> None:
        self.config = config
        self.weights = weights
        self.kernels = kernels
        self.ranks = ranks
        self.windows = tuple(NO_WINDOW if window is None else window for window in config.windows)
        self._scale = config.attention_scale
        self._caps = config.soft_caps

    def embed(self, token_ids: Tensor) -> Tensor:
        """Hidden states [T, H] of int64 `token_ids` [T]."""
        table, dtype = self.weights.embedding, self.weights.dtype
        if self.ranks is None:
            found = self.kernels.embed(table, token_ids, dtype)
        else:
            found = self.ranks.embed(token_ids, table, dtype)
        return scaled_embedding_(found, self.config)

    def layer(
        self,
        index: int,
        hidden: Tensor,
        rotations: Tensor,
        pool: KVPool,
        entries: Tensor,
        attention: Any,
        num_rows: Tensor | None = None,
        adapters: RowAdapters | None = None,
    ) -> None:
        """Run layer `index` over `hidden` [T, H] in place, and write the rows' KV entries into `pool`.

        `rotations` [T, D / 2], `entries` [T, 2]; `attention` is what the kernels prepared for this layer. `num_rows`
        int32 [1] on the device: later rows are left unchanged. `adapters` are those of the rows.
        """
        self.attention(index, hidden, rotations, pool, entries, attention, num_rows, adapters)
        self.mlp(index, hidden, num_rows, adapters)

    def attention(
        self,
        index: int,
        hidden: Tensor,
        rotations: Tensor,
        pool: KVPool,
        entries: Tensor,
        attention: Any,
        num_rows: Tensor | None = None,
        adapters: RowAdapters | None = None,
    ) -> None:
        """The attention block of `layer`, with its arguments."""
        weights = self.weights.layers[index]
        queries = self._qkv(index, hidden, rotations, pool, entries, num_rows, adapters)
        attended = self.kernels.paged_attention(
            queries,
            pool,
            attention,
            self._scale,
            window=self.windows[index],
            cap=self._caps.attention,
            num_rows=num_rows,
        )
        maps = _maps(adapters, index, "output")
        norm = weights.attention_post_norm
        self._add(attended, weights.output, weights.output_bias, norm, hidden, num_rows, maps)

    def mlp(
        self, index: int, hidden: Tensor, num_rows: Tensor | None = None, adapters: RowAdapters | None = None
    ) -> None:
        """The MLP block of `layer`, over `hidden` [T, H] in place."""
        weights, eps = self.weights.layers[index], self.config.rms_norm_eps
        gated = self.kernels.gate_up(
            hidden,
            weights.mlp_norm,
            eps,
            weights.gate_up,
            weights.gate_up_bias,
            activation=self.config.activation,
            num_rows=num_rows,
            maps=_maps(adapters, index, "gate_up"),
        )
        maps = _maps(adapters, index, "down")
        self._add(gated, weights.down, weights.down_bias, weights.mlp_post_norm, hidden, num_rows, maps)

    def _add(
        self,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None,
        post_norm: Tensor | None,
        hidden: Tensor,
        num_rows: Tensor | None,
        maps: RowMaps | None,
    ) -> None:
        """Add `x` [T, K] times `weight` [H, K] transposed, of all ranks, to the residual stream `hidden` [T, H].

        With `post_norm` [H] the norm of the product is added in its place.
        """
        if post_norm is not None:
            product = torch.zeros_like(hidden)
            self.kernels.linear_residual(x, weight, bias, product, maps=maps, num_rows=num_rows)
            if self.ranks is not None:
                self.ranks.collectives.sum_(product)
            self.kernels.add_norm(product, post_norm, self.config.rms_norm_eps, hidden, num_rows=num_rows)
            return
        if self.ranks is None:
            self.kernels.linear_residual(x, weight, bias, hidden, maps=maps, num_rows=num_rows)
            return
        self.ranks.begin_term_(hidden)
        self.kernels.linear_residual(x, weight, bias, hidden, num_rows=num_rows)
        self.ranks.collectives.sum_(hidden)

    def project(
        self,
        index: int,
        hidden: Tensor,
        rotations: Tensor,
        pool: KVPool,
        entries: Tensor,
        adapters: RowAdapters | None = None,
    ) -> None:
        """Write only the KV entries of layer `index` for `hidden` [T, H] (CALM's rule for an exit)."""
        self._qkv(index, hidden, rotations, pool, entries, adapters=adapters)

    def _qkv(
        self,
        index: int,
        hidden: Tensor,
        rotations: Tensor,
        pool: KVPool,
        entries: Tensor,
        num_rows: Tensor | None = None,
        adapters: RowAdapters | None = None,
    ) -> Tensor:
        """A layer's queries [T, N, D]; writes its keys and values into `pool`."""
        weights = self.weights.layers[index]
        queries: Tensor = self.kernels.qkv(
            hidden,
            weights.attention_norm,
            self.config.rms_norm_eps,
            weights.qkv,
            weights.qkv_bias,
            rotations,
            pool,
            entries,
            self.config.num_heads,
            head_norms=weights.head_norms,
            projection_norms=weights.projection_norms,
            num_rows=num_rows,
            maps=_maps(adapters, index, "qkv"),
        )
        return queries

    def likeliest(
        self, hidden: Tensor, num_rows: Tensor | None = None, adapters: RowAdapters | None = None
    ) -> tuple[Tensor, Tensor]:
        """The most likely token int64 [T] of final hidden states [T, H], and its logit float32 [T]."""
        weights, eps = self.weights, self.config.rms_norm_eps
        best: tuple[Tensor, Tensor] = self.kernels.lm_head_argmax(
            hidden,
            weights.final_norm,
            eps,
            weights.lm_head,
            cap=self._caps.logits,
            num_rows=num_rows,
            maps=_maps(adapters, self.config.num_layers, LM_HEAD),
        )
        return best if self.ranks is None else self.ranks.best(*best)

    def draw(
        self,
        hidden: Tensor,
        rows: SamplingRows,
        steps: Tensor,
        num_rows: Tensor | None = None,
        adapters: RowAdapters | None = None,
    ) -> tuple[Tensor, Tensor]:
        """A sample int64 [T] at each row's temperature for its step, and its winning score float32 [T]."""
        weights, eps = self.weights, self.config.rms_norm_eps
        drawn: tuple[Tensor, Tensor] = self.kernels.lm_head_sample(
            hidden,
            weights.final_norm,
            eps,
            weights.lm_head,
            rows.temperature,
            rows.seeds,
            rows.indices,
            steps,
            first_token=0 if self.ranks is None else self.ranks.shard.tokens.start,
            cap=self._caps.logits,
            num_rows=num_rows,
            maps=_maps(adapters, self.config.num_layers, LM_HEAD),
        )
        return drawn if self.ranks is None else self.ranks.best(*drawn)

    def final_states(self, hidden: Tensor) -> Tensor:
        """Float32 [T, H]: final hidden states [T, H] after the final norm, as a sentence embedding pools them."""
        return rms_norm(hidden, self.weights.final_norm, self.config.rms_norm_eps).float()

    def logits(self, hidden: Tensor, num_rows: Tensor | None = None, adapters: RowAdapters | None = None) -> Tensor:
        """Float32 logits [T, V] of final hidden states [T, H]."""
        weights, eps = self.weights, self.config.rms_norm_eps
        logits: Tensor = self.kernels.lm_head(
            hidden,
            weights.final_norm,
            eps,
            weights.lm_head,
            cap=self._caps.logits,
            num_rows=num_rows,
            maps=_maps(adapters, self.config.num_layers, LM_HEAD),
        )
        return logits if self.ranks is None else self.ranks.logits(logits)


def _maps(adapters: RowAdapters | None, layer: int, matrix: str) -> RowMaps | None:
    return None if adapters is None else adapters.at(layer, matrix)


def scaled_embedding_(states: Tensor, config: ModelConfig) -> Tensor:
    """Rows [T, H] of an embedding times its scale in their dtype, as transformers rounds it, in place."""
    if config.embedding_scale == 1.0:
        return states
    return states.mul_(float(torch.tensor(config.embedding_scale, dtype=states.dtype)))


class Rope:
    """The rotations of positions [0, max_positions) of a model, on one device.

    Channels of a head are adjacent pairs, so a pair is one complex number, which rope multiplies by
    `attention_scaling * exp(i * position * inv_freq)`. `table` complex64 [max_positions, head_dim / 2] holds these
    factors, computed in float32 on the CPU: in bfloat16 neighbouring positions above 256 would coincide. A pair that
    rope does not turn has the factor 1. Where layers with a window have another rope, its factors stand behind those in
    every row; `of_layers` parts them.
    `depends_on_length` is True only for "dynamic" (NTK) rope, whose frequencies change once a sequence outgrows
    max_position_embeddings. A generated token is the last of its sequence when it is first computed, so its rotation
    follows from its position even then: `generated_table` holds those.
    """

    def __init__(self, config: ModelConfig, max_positions: int, device: torch.device | str) -> None:
        self._head_dim, self._rotary_dim = config.head_dim, config.rotary_dim
        frequencies, self.attention_scaling = inverse_frequencies(config, max_positions)
        positions = torch.arange(max_positions)
        tables = [self._turned(positions, frequencies, self.attention_scaling)]
        if config.local_rope is not None:
            local = replace(config, rope=config.local_rope)
            tables.append(self._turned(positions, *inverse_frequencies(local, max_positions)))
        self.table = torch.cat(tables, dim=1).to(device)
        self.depends_on_length = config.rope.rope_type == "dynamic"
        self._trained_length = config.max_position_embeddings
        self._rope = config.rope
        self._unturned = torch.ones(1, config.head_dim // 2, dtype=torch.complex64, device=device)
        self._num_layers, self._layers_without_rope = config.num_layers, config.layers_without_rope
        is_local = [config.local_rope is not None and window is not None for window in config.windows]
        self._local_layers = [layer for layer in range(config.num_layers) if is_local[layer]]
        self.generated_table = self.table
        if self.depends_on_length:
            every = positions.to(device)
            self.generated_table = self.rotations(every, every + 1)

    def rotations(self, positions: Tensor, sequence_lengths: Tensor | None = None) -> Tensor:
        """Return complex64 [T, head_dim / 2], the rotation of every channel pair for each of T rows; or of two ropes.

        positions: int64 [T], each below max_positions. sequence_lengths: int64 [T], read only if
        `depends_on_length`: the length of the row's sequence when the row was first computed, max(prompt
        length, position + 1), because keys keep the frequencies they were written with. (transformers keeps
        the frequencies of its longest past sequence too, until one shorter than the trained length arrives;
        here a row never depends on its neighbours.) Raises `ValueError` if lengths are needed and not given.
        """
        known = self.table.index_select(0, positions)
        if not self.depends_on_length:
            return known
        if sequence_lengths is None:
            raise ValueError("dynamic rope needs the length of each row's sequence: sequence_lengths is None")
        frequencies = self._dynamic_frequencies(sequence_lengths)
        grown = self._turned(positions, frequencies, self.attention_scaling)
        # A select, not a branch: no wait for the device. Short rows take the table, exact for them.
        return torch.where((sequence_lengths > self._trained_length)[:, None], grown, known)

    def of_layers(self, rotations: Tensor) -> list[Tensor]:
        """The rotations of each layer, [T, head_dim / 2] each: of its rope, or ones in a layer without one.

        So every layer runs the same operations on the same shapes. The ones share one row of memory.
        """
        pairs = self._head_dim // 2
        each = [rotations[:, :pairs]] * self._num_layers
        for layer in self._local_layers:
            each[layer] = rotations[:, pairs:]
        for layer in self._layers_without_rope:
            each[layer] = self._unturned.expand_as(each[layer])
        return each

    def _dynamic_frequencies(self, sequence_lengths: Tensor) -> Tensor:
        """Float32 [T, head_dim / 2]: NTK-aware frequencies for sequence lengths int64 [T]."""
        length = sequence_lengths.clamp(min=self._trained_length)[:, None]
        return _frequencies(_ntk_base(self._rope, length, self._trained_length, self._rotary_dim), self._rotary_dim)

    def _turned(self, positions: Tensor, frequencies: Tensor, scaling: float) -> Tensor:
        """Complex64 [T, head_dim / 2]: the rotations of the pairs that rope turns, and ones."""
        turned = _rotations(positions, frequencies, scaling)
        return F.pad(turned, (0, (self._head_dim - self._rotary_dim) // 2), value=1.0)


def inverse_frequencies(config: ModelConfig, max_positions: int) -> tuple[Tensor, float]:
    """Return (inv_freq float32 [rotary_dim / 2] on the CPU, attention_scaling), bit-identical to transformers'.

    So the order of operations is that of transformers' `modeling_rope_utils`: a last-bit change of a frequency shows at
    position 8192. For "dynamic" these are the frequencies up to the trained length, for "longrope" those of texts of up
    to `max_positions`.
    """
    rope = config.rope
    plain = _frequencies(rope.theta, config.rotary_dim)
    match rope.rope_type:
        case "linear":
            return plain / _factor(rope), 1.0
        case "llama3":
            return _llama3(rope, plain), 1.0
        case "yarn":
            return _yarn(config)
        case "longrope":
            return _longrope(config, max_positions)
        case _:
            return plain, 1.0


def _rotations(positions: Tensor, frequencies: Tensor, scaling: float) -> Tensor:
    """Complex64 [T, D]: scaling * exp(i * angle), angles in float32; frequencies are [D] or [T, D]."""
    angles = positions.float()[:, None] * frequencies
    return torch.complex(angles.cos() * scaling, angles.sin() * scaling)


def _frequencies(base: float | Tensor, head_dim: int) -> Tensor:
    """base ** (-2j / head_dim) for each channel pair j, in float32 (Su et al. 2021, section 3.2.2)."""
    device = base.device if isinstance(base, Tensor) else None
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    return 1.0 / (base**exponents)


def _factor(rope: RopeConfig) -> float:
    assert rope.factor is not None  # ModelConfig refuses a rescaling rope type without one
    return rope.factor


def _ntk_base(rope: RopeConfig, length: Tensor, trained_length: int, head_dim: int) -> Tensor:
    """The larger base that stretches `trained_length` positions to `length` (dynamic NTK, by u/emozilla)."""
    factor = _factor(rope)
    stretch = (factor * length / trained_length) - (factor - 1)
    return rope.theta * stretch ** (head_dim / (head_dim - 2))


def _llama3(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Llama 3.1's rescaling: keeps short wavelengths, divides long ones by `factor`, interpolates between.

    Source: `apply_scaling` of Meta's llama-models, as transformers computes it.
    """
    assert rope.original_max_position_embeddings
    assert rope.low_freq_factor
    assert rope.high_freq_factor
    trained, low, high = rope.original_max_position_embeddings, rope.low_freq_factor, rope.high_freq_factor
    factor = _factor(rope)
    wavelength = 2 * math.pi / plain
    is_long = wavelength > trained / low
    is_short = wavelength < trained / high
    scaled = torch.where(is_long, plain / factor, plain)
    smooth = (trained / wavelength - low) / (high - low)
    interpolated = (1 - smooth) * scaled / factor + smooth * scaled
    return torch.where(~is_short & ~is_long, interpolated, scaled)


def _yarn(config: ModelConfig) -> tuple[Tensor, float]:
    """YaRN (Peng et al. 2023, section 3): slow pairs interpolated, fast ones kept, a ramp between."""
    rope, dim = config.rope, config.rotary_dim
    assert rope.original_max_position_embeddings
    trained = rope.original_max_position_embeddings
    factor = rope.factor or config.max_position_embeddings / trained

    def pair_of(rotations: float) -> float:
        """The index of the pair that rotates `rotations` times within the trained length."""
        return (dim * math.log(trained / (rotations * 2 * math.pi))) / (2 * math.log(rope.theta))

    first, last = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001  # the ramp must not divide by zero
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    kept = 1 - ramp
    powers = rope.theta ** (torch.arange(0, dim, 2).float() / dim)
    frequencies = (1.0 / (factor * powers)) * (1 - kept) + (1.0 / powers) * kept
    return frequencies, _yarn_attention_scaling(rope, factor)


def _longrope(config: ModelConfig, max_positions: int) -> tuple[Tensor, float]:
    """LongRoPE (Ding et al. 2024): each pair's frequency has another divisor."""
    rope, dim = config.rope, config.rotary_dim
    assert rope.trained_length
    chosen = torch.tensor(rope.long_factor if rope.is_long(max_positions) else rope.short_factor, dtype=torch.float32)
    frequencies = 1.0 / (chosen * rope.theta ** (torch.arange(0, dim, 2).float() / dim))
    factor = rope.factor or config.max_position_embeddings / rope.trained_length
    default = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(rope.trained_length))
    return frequencies, rope.attention_factor or default


def _yarn_attention_scaling(rope: RopeConfig, factor: float) -> float:
    """The factor of cosines and sines: as given, 0.1 ln(factor) + 1, or a ratio of such terms."""

    def term(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return term(rope.mscale) / term(rope.mscale_all_dim)
    return term(1.0) * (rope.attn_factor or 1.0)
