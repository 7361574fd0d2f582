"""A whole sequence through the model, layer by layer. Under a nested schedule the rows of
a layer are the first of their sequence, so no cache is needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from d3engine.depth import Schedule
from d3engine.errors import require, require_integer
from d3engine.kernels import reference
from d3engine.kernels.kv_pool import NO_WINDOW
from d3engine.kernels.matrices import Weight, looked_up
from d3engine.model.config import ModelConfig
from d3engine.model.llama import Rope, scaled_embedding_
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
        self.weights = weights
        self.device = weights.device

    @torch.inference_mode()
    def layers(
        self, token_ids: Sequence[int], prompt_length: int, schedule: Schedule | None = None
    ) -> Iterator[LayerStates]:
        """Yield the states around each layer in turn, for a prompt and what was generated from it.

        Row r holds the token at position r; the row at `prompt_length - 1` yields generated token 0, the next token 1
        and so on, each at its own depth if a schedule is given. Raises `InvalidValueError` for a schedule whose layers
        wake up again, or that runs other weights than the model's own.
        """
        require_integer("prompt_length", prompt_length, 1, len(token_ids))
        require(schedule is None or schedule.is_nested, "schedule", schedule, "one whose skipped layers stay skipped")
        has_bridges = schedule is not None and schedule.bridges is not None
        require(not has_bridges, "bridges", schedule and schedule.bridges, "absent, since skipped layers are observed")
        students = [] if schedule is None else [level.student for level in schedule.students]
        require(not students, "student", ", ".join(students), "absent, since the model's own layers are observed")
        hidden = self.embedded(token_ids)
        rotations = rotations_of(self.config, hidden.shape[0], prompt_length, self.device)
        for layer in range(self.config.num_layers):
            rows = len(token_ids)
            if schedule is not None:  # generation step s is fed at position prompt_length - 1 + s, and runs below it
                rows = min(rows, prompt_length - 1 + int(schedule.cutoffs[layer]))
            before = hidden.clone()
            pool = self.new_pool(rows)
            queries = self.write_entries(layer, hidden[:rows], rotations[layer][:rows], pool, 0)
            self._add_attention(layer, hidden[:rows], queries, pool, 0)
            after_attention = hidden.clone()
            self._mlp(layer, hidden[:rows])
            yield LayerStates(layer, rows, before, after_attention, hidden.clone())

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 [T, V]: what the final norm and the LM head make of hidden states [T, H] of any layer."""
        weights, eps = self.weights, self.config.rms_norm_eps
        cap = self.config.soft_caps.logits
        logits: Tensor = reference.lm_head(hidden, weights.final_norm, eps, weights.lm_head, cap=cap)
        return logits

    # -- the parts of a pass, over entries that the caller keeps -------------------------------------------------------

    def embedded(self, token_ids: Sequence[int]) -> Tensor:
        """The residual stream [T, H] before the first layer."""
        places = torch.tensor(token_ids, device=self.device)
        return scaled_embedding_(looked_up(self.weights.embedding, places, self.weights.dtype), self.config)

    def new_pool(self, length: int) -> Tensor:
        """Room for the keys and values of `length` positions of one layer, [1, 2, length, kv heads, head dim]."""
        config = self.config
        shape = (1, 2, length, config.num_kv_heads, config.head_dim)
        return torch.zeros(shape, dtype=self.weights.dtype, device=self.device)

    def run_layer(self, layer: int, hidden: Tensor, rotations: Tensor, pool: Tensor, first: int = 0) -> None:
        """Let a layer work on `hidden` [T, H], the tokens at positions `first` and after, with the entries before."""
        self.attend(layer, hidden, self.write_entries(layer, hidden, rotations, pool, first), pool, first)

    def write_entries(self, layer: int, hidden: Tensor, rotations: Tensor, pool: Tensor, first: int) -> Tensor:
        """Write the layer's keys and values of `hidden` [T, H] at positions `first` and after; returns the queries."""
        weights, config = self.weights.layers[layer], self.config
        keys = torch.arange(first, first + hidden.shape[0], device=hidden.device)
        return reference.qkv(
            hidden,
            weights.attention_norm,
            config.rms_norm_eps,
            weights.qkv,
            weights.qkv_bias,
            rotations,
            pool,
            torch.stack((keys, keys + pool.shape[2]), dim=-1),
            config.num_heads,
            head_norms=weights.head_norms,
            projection_norms=weights.projection_norms,
        )

    def attend(self, layer: int, hidden: Tensor, queries: Tensor, pool: Tensor, first: int = 0) -> None:
        """Let a layer work on `hidden` [T, H] with these queries, those of `write_entries`, and the pool as it is."""
        self._add_attention(layer, hidden, queries, pool, first)
        self._mlp(layer, hidden)

    def _add_attention(self, layer: int, hidden: Tensor, queries: Tensor, pool: Tensor, first: int) -> None:
        weights, config, rows = self.weights.layers[layer], self.config, hidden.shape[0]
        table = torch.zeros(1, 1, 1, dtype=torch.int64, device=hidden.device)
        (inputs,) = reference.attention_inputs([0, rows], [first + rows], table)
        window, cap = config.windows[layer] or NO_WINDOW, config.soft_caps.attention
        attended = reference.paged_attention(queries, pool, inputs, config.attention_scale, window=window, cap=cap)
        self._add(attended, weights.output, weights.output_bias, weights.attention_post_norm, hidden)

    def _mlp(self, layer: int, hidden: Tensor) -> None:
        """Add a layer's MLP to `hidden` [T, H]."""
        weights, eps = self.weights.layers[layer], self.config.rms_norm_eps
        matrix, activation = (weights.gate_up, weights.gate_up_bias), self.config.activation
        gated = reference.gate_up(hidden, weights.mlp_norm, eps, *matrix, activation=activation)
        self._add(gated, weights.down, weights.down_bias, weights.mlp_post_norm, hidden)

    def _add(self, x: Tensor, weight: Weight, bias: Tensor | None, post_norm: Tensor | None, hidden: Tensor) -> None:
        """Add a product, or its norm, to `hidden` [T, H]."""
        product = hidden if post_norm is None else torch.zeros_like(hidden)
        reference.linear_residual(x, weight, bias, product)
        if post_norm is not None:
            reference.add_norm(product, post_norm, self.config.rms_norm_eps, hidden)


def rotations_of(config: ModelConfig, length: int, prompt_length: int, device: torch.device) -> list[Tensor]:
    """By layer, those of the positions of a text; a rope may depend on the length of its prompt."""
    return _rotations(Rope(config, length, device), torch.arange(length, device=device), prompt_length)


def _rotations(rope: Rope, positions: Tensor, prompt_length: int) -> list[Tensor]:
    lengths = torch.clamp(positions + 1, min=prompt_length) if rope.depends_on_length else None
    return rope.of_layers(rope.rotations(positions, lengths))


class CachedPass:
    """One sequence through the model piece by piece; the entries of every layer lie in the open, to be changed.

    Entries are kept for `max_length` positions of each layer. `prompt_length` matters to ropes that depend on the
    length of a sequence alone.
    """

    def __init__(self, observer: Observer, prompt_length: int, max_length: int) -> None:
        self._observer, self._prompt_length = observer, prompt_length
        self._length = 0
        self._rope = Rope(observer.config, max_length, observer.device)
        self._pools = [observer.new_pool(max_length) for _ in range(self.num_layers)]

    @property
    def num_layers(self) -> int:
        return self._observer.config.num_layers

    @torch.inference_mode()
    def feed(self, token_ids: Sequence[int]) -> list[Tensor]:
        """The residual stream [T, H] of the next T tokens after each layer."""
        observer = self._observer
        hidden, rotations = observer.embedded(token_ids), self._rotations(self._length, len(token_ids))
        states = []
        for layer, pool in enumerate(self._pools):
            observer.run_layer(layer, hidden, rotations[layer], pool, self._length)
            states.append(hidden.clone())
        self._length += len(token_ids)
        return states

    @torch.inference_mode()
    def resume(self, hidden: Tensor, layer: int, first: int) -> Tensor:
        """Let `layer` and all above it work on `hidden` [T, H], tokens fed before, at positions `first` and after.

        Returns what leaves the last layer. Their entries in these layers are overwritten; those of the layers below,
        and of positions before `first`, stay as they are.
        """
        rotations = self._rotations(first, hidden.shape[0])
        for above in range(layer, self.num_layers):
            self._observer.run_layer(above, hidden, rotations[above], self._pools[above], first)
        return hidden

    def copy_newest(self, source: int, target: int) -> None:
        """Let the newest token's entry of layer `source` stand in layer `target`."""
        self._pools[target][:, :, self._length - 1] = self._pools[source][:, :, self._length - 1]

    @torch.inference_mode()
    def project_newest(self, layer: int, hidden: Tensor) -> None:
        """Let the newest token's entry of `layer` be what its state `hidden` [1, H] gives there."""
        newest = self._length - 1
        self._observer.write_entries(layer, hidden, self._rotations(newest, 1)[layer], self._pools[layer], newest)

    def _rotations(self, first: int, count: int) -> list[Tensor]:
        positions = torch.arange(first, first + count, device=self._observer.device)
        return _rotations(self._rope, positions, self._prompt_length)
