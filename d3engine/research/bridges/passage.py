"""A whole text with bridges over left-out windows, as decoding computes it step by step;
nothing is written in place, so gradients reach the bridges."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from d3engine.depth import NEVER, Schedule
from d3engine.depth.schedule import windows_of
from d3engine.errors import require
from d3engine.kernels import reference
from d3engine.kernels.matrices import Weight
from d3engine.kernels.reference_attention import attended, soft_capped
from d3engine.model.bridges import Bridge, Window
from d3engine.model.config import ModelConfig
from d3engine.model.weights import LayerWeights, LlamaWeights
from d3engine.research.analysis.observer import Observer, rotations_of

Crossings: TypeAlias = dict[int, list[tuple[slice, Window]]]
"""By the first layer of a window: which rows leave it out."""


class Passage:
    """Texts through the model of an observer."""

    def __init__(self, observer: Observer) -> None:
        self.config, self.device = observer.config, observer.device
        self.embedded = observer.embedded
        self._weights = observer.weights

    @torch.no_grad()
    def at_full_depth(self, text: Sequence[int], prompt_length: int, layers: Iterable[int]) -> dict[int, Tensor]:
        """The states [T, H] of a text before each of these layers; before layer L is behind the last one."""
        found, hidden, at = {}, self.embedded(text), 0
        for layer in sorted(set(layers)):
            hidden = self.run(hidden, at, prompt_length, Schedule.nested([NEVER] * self.config.num_layers), stop=layer)
            found[layer], at = hidden, layer
        return found

    def run(
        self,
        hidden: Tensor,
        first: int,
        prompt_length: int,
        schedule: Schedule,
        bridges: Mapping[Window, Bridge] | None = None,
        stop: int | None = None,
    ) -> Tensor:
        """The states [T, H] before layer `stop` (behind the last one), of those before layer `first`.

        The prompt's rows run every layer, and the row at `prompt_length - 1 + i` those of step i; without `bridges`
        skipped layers are passed unchanged. Raises `InvalidValueError` for a schedule whose layers wake up again.
        """
        require(schedule.is_nested, "schedule", schedule, "one whose skipped layers stay skipped")
        crossings = {} if bridges is None else crossings_of(schedule, prompt_length, hidden.shape[0])
        rotations = rotations_of(self.config, hidden.shape[0], prompt_length, hidden.device)
        for layer in range(first, self.config.num_layers if stop is None else stop):
            for rows, window in crossings.get(layer, ()):
                assert bridges is not None
                hidden = crossed_rows(hidden, rows, bridges[window])
            live = min(hidden.shape[0], prompt_length - 1 + int(schedule.cutoffs[layer]))
            ran = self._layer(layer, hidden[:live], rotations[layer][:live])
            hidden = torch.cat((ran, hidden[live:])) if live < hidden.shape[0] else ran
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 [T, V]."""
        return logits_of(self.config, self._weights, hidden)

    def _layer(self, layer: int, hidden: Tensor, rotations: Tensor) -> Tensor:
        weights = self._weights.layers[layer]
        eps = self.config.rms_norm_eps
        normed = normed_rows(hidden, weights.attention_norm, eps)
        heads = self._attended(weights, normed, rotations, self.config.windows[layer])
        added = linear(heads, weights.output, weights.output_bias)
        hidden = hidden + normed_rows(added, weights.attention_post_norm, eps)
        added = linear(gated_rows(self.config, weights, hidden), weights.down, weights.down_bias)
        return hidden + normed_rows(added, weights.mlp_post_norm, eps)

    def _attended(self, weights: LayerWeights, normed: Tensor, rotations: Tensor, window: int | None) -> Tensor:
        """Causal attention [T, Q] before its output matrix, of a sliding window at most."""
        config, rows = self.config, normed.shape[0]
        parts = attention_rows(config, weights, normed, rotations)
        query, key, value = (part.transpose(0, 1)[None] for part in parts)
        behind = rows if window is None else min(window, rows)
        mask = torch.ones(rows, rows, dtype=torch.bool, device=normed.device).tril().triu(1 - behind)
        scale, cap, whole = config.attention_scale, config.soft_caps.attention, behind == rows
        if cap is not None:
            found = attended(query, key, value, mask, scale, cap)
        else:
            found = F.scaled_dot_product_attention(
                query, key, value, attn_mask=None if whole else mask, is_causal=whole, scale=scale, enable_gqa=True
            )
        return found[0].transpose(0, 1).reshape(rows, -1)


def attention_rows(
    config: ModelConfig, weights: LayerWeights, normed: Tensor, rotations: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [T, heads, D] of normed rows [T, H], the first two behind RoPE."""
    sizes = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
    projected = linear(normed, weights.qkv, weights.qkv_bias)
    if weights.projection_norms is not None:
        whole = [config.q_size, config.kv_size]
        parts = torch.split(projected, [*whole, config.kv_size], dim=1)
        norms = [*torch.split(weights.projection_norms, whole), None]
        eps = config.rms_norm_eps
        projected = torch.cat([normed_rows(part, norm, eps) for part, norm in zip(parts, norms, strict=True)], dim=1)
    heads = projected.view(normed.shape[0], -1, config.head_dim)
    queries, keys, values = torch.split(heads, sizes, dim=1)
    if weights.head_norms is not None:
        queries = normed_rows(queries, weights.head_norms[0], config.rms_norm_eps)
        keys = normed_rows(keys, weights.head_norms[1], config.rms_norm_eps)
    return turned(queries, rotations), turned(keys, rotations), values


def gated_rows(config: ModelConfig, weights: LayerWeights, hidden: Tensor) -> Tensor:
    """What the down matrix of an MLP gets [T, I], of the states [T, H] behind the attention."""
    normed = normed_rows(hidden, weights.mlp_norm, config.rms_norm_eps)
    gate, up = linear(normed, weights.gate_up, weights.gate_up_bias).chunk(2, dim=-1)
    return reference.activated(gate, config.activation) * up


def logits_of(config: ModelConfig, weights: LlamaWeights, hidden: Tensor) -> Tensor:
    """Float32 [T, V] of the states [T, H] behind the last layer."""
    normed = normed_rows(hidden, weights.final_norm, config.rms_norm_eps)
    return soft_capped(linear(normed, weights.lm_head, None), config.soft_caps.logits).float()


def normed_rows(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMSNorm of `x`; `x` itself where there is no norm."""
    if weight is None:
        return x
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return scaled.to(x.dtype) * weight


def crossings_of(schedule: Schedule, prompt_length: int, num_rows: int) -> Crossings:
    """Which rows of a text of `num_rows` leave out which windows."""
    found: Crossings = {}
    for step, end in schedule.runs(num_rows - prompt_length + 1):
        for window in windows_of(schedule.active(step)):
            rows = slice(prompt_length - 1 + step, prompt_length - 1 + end)
            found.setdefault(window[0], []).append((rows, window))
    return found


def crossed_rows(hidden: Tensor, rows: slice, bridge: Bridge) -> Tensor:
    """`hidden` with some of its rows behind a bridge, which computes in its own dtype."""
    crossed = bridge.crossed(hidden[rows].to(bridge.weight.dtype)).to(hidden.dtype)
    return torch.cat((hidden[: rows.start], crossed, hidden[rows.stop :]))


def turned(heads: Tensor, rotations: Tensor) -> Tensor:
    """Heads [T, N, D] turned by `rotations` [T, D / 2], in float32."""
    pairs = torch.view_as_complex(heads.float().reshape(*heads.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotations[:, None]).flatten(-2).to(heads.dtype)


def linear(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    return F.linear(x, matrix_of(weight, x.dtype), bias)


def matrix_of(weight: Weight, dtype: torch.dtype) -> Tensor:
    return weight.to(dtype) if isinstance(weight, Tensor) else weight.dequantize(dtype)
