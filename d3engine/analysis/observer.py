"""The observer pass: a whole sequence through the model, layer by layer, with everything in sight.

The one idea: under a nested schedule the tokens that run a layer are the first ones of their sequence, so a slow and
clear pass needs no cache and no batch: layer l runs over the first rows of one matrix, and the others pass unchanged.
What it computes is what the engine computes step by step; a test compares the two, and transformers'.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from d3engine.depth import Schedule
from d3engine.errors import require, require_integer
from d3engine.kernels import reference
from d3engine.model.config import ModelConfig
from d3engine.model.rope import Rope
from d3engine.model.weights import LlamaWeights


@dataclass(frozen=True)
class LayerStates:
    """The residual stream [T, H] around one layer; rows from `num_rows` on passed it by, unchanged."""

    layer: int
    num_rows: int
    before: Tensor
    after_attention: Tensor
    after: Tensor


class Observer:
    """Runs sequences of one model in the open. Meant to be read and trusted, not to be fast."""

    def __init__(self, config: ModelConfig, weights: LlamaWeights) -> None:
        self.config = config
        self._weights = weights
        self._device = weights.embedding.device
        self._scale = config.attention_scale

    @torch.inference_mode()
    def layers(
        self, token_ids: Sequence[int], prompt_length: int, schedule: Schedule | None = None
    ) -> Iterator[LayerStates]:
        """Yield the states around each layer in turn, for a prompt and what was generated from it.

        Row r holds the token at position r; the row at `prompt_length - 1` yields generated token 0, the next token 1
        and so on, each at its own depth if a schedule is given. Raises `InvalidValueError` for a schedule whose layers
        wake up again.
        """
        require_integer("prompt_length", prompt_length, 1, len(token_ids))
        require(schedule is None or schedule.is_nested, "schedule", schedule, "one whose skipped layers stay skipped")
        ids = torch.tensor(token_ids, device=self._device)
        positions = torch.arange(len(token_ids), device=self._device)
        rope = Rope(self.config, len(token_ids), self._device)
        lengths = torch.clamp(positions + 1, min=prompt_length) if rope.depends_on_length else None
        rotations = rope.of_layers(rope.rotations(positions, lengths))
        hidden = self._weights.embedding[ids].to(self._weights.dtype)
        for layer in range(self.config.num_layers):
            rows = len(token_ids)
            if schedule is not None:  # generation step s is fed at position prompt_length - 1 + s, and runs below it
                rows = min(rows, prompt_length - 1 + int(schedule.cutoffs[layer]))
            before = hidden.clone()
            self._attention(layer, hidden[:rows], rotations[layer][:rows])
            after_attention = hidden.clone()
            self._mlp(layer, hidden[:rows])
            yield LayerStates(layer, rows, before, after_attention, hidden.clone())

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 [T, V]: what the final norm and the LM head make of hidden states [T, H] of any layer."""
        weights, eps = self._weights, self.config.rms_norm_eps
        logits: Tensor = reference.lm_head(hidden, weights.final_norm, eps, weights.lm_head)
        return logits

    def _attention(self, layer: int, hidden: Tensor, rotations: Tensor) -> None:
        """Add a layer's causal attention to `hidden` [T, H]; the keys and values live in a block of their own."""
        weights, config = self._weights.layers[layer], self.config
        rows = hidden.shape[0]
        pool = hidden.new_zeros(1, 2, rows, config.num_kv_heads, config.head_dim)
        keys = torch.arange(rows, device=hidden.device)
        queries = reference.qkv(
            hidden,
            weights.attention_norm,
            config.rms_norm_eps,
            weights.qkv,
            weights.qkv_bias,
            rotations,
            pool,
            torch.stack((keys, keys + rows), dim=-1),
            config.num_heads,
            head_norms=weights.head_norms,
        )
        table = torch.zeros(1, 1, 1, dtype=torch.int64, device=hidden.device)
        (inputs,) = reference.attention_inputs([0, rows], [rows], table)
        attended = reference.paged_attention(queries, pool, inputs, self._scale)
        reference.linear_residual(attended, weights.output, weights.output_bias, hidden)

    def _mlp(self, layer: int, hidden: Tensor) -> None:
        """Add a layer's MLP to `hidden` [T, H]."""
        weights, eps = self._weights.layers[layer], self.config.rms_norm_eps
        gated = reference.gate_up(hidden, weights.mlp_norm, eps, weights.gate_up, weights.gate_up_bias)
        reference.linear_residual(gated, weights.down, weights.down_bias, hidden)
