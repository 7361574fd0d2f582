"""The generated tokens of a text in one pass with gradients; the prompt ran at full depth
and is a cache of keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from d3engine.depth import Schedule
from d3engine.errors import D3EngineError, require
from d3engine.kernels.matrices import looked_up
from d3engine.model.bridges import Bridge, Window
from d3engine.model.config import ModelConfig
from d3engine.model.llama import Rope, scaled_embedding_
from d3engine.model.students import MATRICES, NEURONS, VECTORS, Student, with_student
from d3engine.model.weights import LayerWeights, LlamaWeights
from d3engine.research.bridges.passage import (
    attention_rows,
    crossed_rows,
    crossings_of,
    gated_rows,
    linear,
    logits_of,
    normed_rows,
)

Entries: TypeAlias = tuple[Tensor, Tensor]
"""Keys and values [T, kv heads, D] of a layer, keys behind RoPE."""


Layers: TypeAlias = Mapping[int, LayerWeights]
"""The layers of a student that are not the model's own, by number."""


@dataclass(frozen=True, eq=False)
class FullAnswer:
    """A text at full depth: its prompt's entries of every layer, and the states [R, H] of its generated tokens before
    some layers; before layer L is behind the last one. Row r is generation step r + 1."""

    prompt_length: int
    token_ids: Sequence[int]
    entries: Mapping[int, Entries]
    states: Mapping[int, Tensor]

    @property
    def rows(self) -> int:
        return len(self.token_ids) - 1

    @property
    def num_bytes(self) -> int:
        kept = [*self.states.values(), *(tensor for pair in self.entries.values() for tensor in pair)]
        return sum(tensor.nbytes for tensor in kept)


class AnswerPass:
    """Texts through float weights of a model whose layers are those of a Llama without norms behind sublayers."""

    def __init__(self, config: ModelConfig, weights: LlamaWeights) -> None:
        odd = any(layer.attention_post_norm is not None or layer.mlp_post_norm is not None for layer in weights.layers)
        if odd or config.soft_caps.attention is not None or config.rope.rope_type == "dynamic":
            raise D3EngineError("students are made of Llama's layers: without norms behind sublayers, caps or NTK rope")
        self.config = config
        self.weights = weights

    @torch.no_grad()
    def at_full_depth(self, prompt_ids: Sequence[int], token_ids: Sequence[int], layers: set[int]) -> FullAnswer:
        """Run a text, and keep the states before these layers."""
        hidden = self.embedded([*prompt_ids, *token_ids[:-1]])
        prompt, rotations = len(prompt_ids), self.rotations(0, hidden.shape[0])
        entries: dict[int, Entries] = {}
        states: dict[int, Tensor] = {}
        for number, layer in enumerate(self.weights.layers):
            if number in layers:
                states[number] = hidden[prompt:].clone()
            hidden, (keys, values) = self.layer(number, layer, hidden, rotations[number], None)
            entries[number] = keys[:prompt].clone(), values[:prompt].clone()
        states[len(self.weights.layers)] = hidden[prompt:].clone()
        return FullAnswer(prompt, token_ids, entries, states)

    def run(
        self,
        text: FullAnswer,
        schedule: Schedule,
        *,
        first: int = 0,
        stop: int | None = None,
        layers: Layers | None = None,
        later: Sequence[tuple[int, Layers]] = (),
        bridges: Mapping[Window, Bridge] | None = None,
    ) -> Tensor:
        """The states [R, H] before layer `stop` (behind the last one), of those that were kept before `first`.

        `layers` are those of a student; `later` those of the students that take its place, each from a step on. Raises
        `InvalidValueError` for a schedule whose layers wake up again.
        """
        require(schedule.is_nested, "schedule", schedule, "one whose skipped layers stay skipped")
        state, rows, prompt = text.states[first], text.rows, text.prompt_length
        crossings = {} if bridges is None else crossings_of(schedule, prompt, prompt + rows)
        rotations = self.rotations(prompt, prompt + rows)
        levels: list[tuple[Layers, int]] = [(layers or {}, 0)]  # with the row where each begins
        levels += [(own, step - 1) for step, own in later]
        for number in range(first, self.config.num_layers if stop is None else stop):
            for among, window in crossings.get(number, ()):
                assert bridges is not None
                own = slice(among.start - prompt, min(among.stop - prompt, rows))
                state = crossed_rows(state, own, bridges[window])
            live = min(rows, int(schedule.cutoffs[number]) - 1)
            parts, entries = [], text.entries[number]
            for place, (replacing, begin) in enumerate(levels):
                part = slice(begin, min(live, levels[place + 1][1] if place + 1 < len(levels) else rows))
                if part.start < part.stop:
                    layer = replacing.get(number, self.weights.layers[number])
                    ran, entries = self.layer(number, layer, state[part], rotations[number][part], entries)
                    parts.append(ran)
            if live:
                state = torch.cat((*parts, state[live:])) if live < rows or len(parts) > 1 else parts[0]
        return state

    def layer(
        self, number: int, layer: LayerWeights, hidden: Tensor, rotations: Tensor, before: Entries | None
    ) -> tuple[Tensor, Entries]:
        """A layer over rows [R, H] that follow the entries `before`; the rows, and all entries."""
        hidden, entries = self.attention(number, layer, hidden, rotations, before)
        gated = gated_rows(self.config, layer, hidden)
        return hidden + linear(gated, layer.down, layer.down_bias), entries

    def attention(
        self, number: int, layer: LayerWeights, hidden: Tensor, rotations: Tensor, before: Entries | None
    ) -> tuple[Tensor, Entries]:
        """The same of its attention alone."""
        config = self.config
        normed = normed_rows(hidden, layer.attention_norm, config.rms_norm_eps)
        queries, keys, values = attention_rows(config, layer, normed, rotations)
        if before is not None:
            keys, values = torch.cat((before[0], keys)), torch.cat((before[1], values))
        rows, behind = queries.shape[0], keys.shape[0]
        window = config.windows[number]
        mask = torch.ones(rows, behind, dtype=torch.bool).tril(behind - rows)
        if window is not None:
            mask = mask.triu(behind - rows + 1 - window)
        query, key, value = (part.transpose(0, 1)[None] for part in (queries, keys, values))
        found = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=config.attention_scale, enable_gqa=True
        )
        hidden = hidden + linear(found[0].transpose(0, 1).reshape(rows, -1), layer.output, layer.output_bias)
        return hidden, (keys, values)

    def embedded(self, token_ids: Sequence[int]) -> Tensor:
        """The states [T, H] before the first layer."""
        found = looked_up(self.weights.embedding, torch.tensor(token_ids), self.weights.dtype)
        return scaled_embedding_(found, self.config)

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 [T, V]."""
        return logits_of(self.config, self.weights, hidden)

    def rotations(self, start: int, stop: int) -> list[Tensor]:
        """Of the positions [start, stop), by layer."""
        rope = Rope(self.config, stop, self.weights.device)
        return rope.of_layers(rope.rotations(torch.arange(start, stop)))


def layers_of(student: Student, weights: LlamaWeights) -> dict[int, LayerWeights]:
    """A student's layers as a pass runs them, in the dtype of float weights."""
    whole = with_student(weights, student)
    return {number: whole.layers[number] for number in student.layers}


def tensors_of_layer(layer: LayerWeights) -> dict[str, Tensor]:
    """Those of a layer that a student may have others of, by name."""
    return {name: tensor for name in (*MATRICES, *VECTORS) if (tensor := getattr(layer, name)) is not None}


def replaced(layer: LayerWeights, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> LayerWeights:
    """A layer with some tensors put in place of the model's, rounded to `dtype` with gradients."""
    return replace(layer, **{name: tensor.to(dtype) for name, tensor in tensors.items() if name != NEURONS})
