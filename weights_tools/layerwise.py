"""A float model that runs texts layer by layer, with one layer in memory; each matrix product is its caller's."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from d3engine.errors import ModelFormatError
from d3engine.kernels import reference
from d3engine.kernels.reference_attention import attended, soft_capped
from d3engine.model.checkpoint import Checkpoint
from d3engine.model.config import ModelConfig
from d3engine.model.expected_tensors import HEAD_NORMS, LM_HEAD
from d3engine.model.llama import Rope, scaled_embedding_

Product: TypeAlias = Callable[[list[Tensor], list[str], list[Tensor]], Iterable[Tensor]]
"""Of each part of a text: inputs [S, L, K], modules whose matrices lie side by side, and the hidden states [S, L, H]
that the outputs are added to, or none -> outputs [S, L, N].
"""

_SEQUENCES_AT_ONCE = 8
"""In one product: the inputs of all are in memory, and the outputs of these."""
_LONGEST = 5.0
"""Lengths of a median row: one that is longer counts as if it had these."""
_COLUMNS_AT_ONCE = 512
"""Of second moments, in one product."""


class LayerwiseModel:
    """A checkpoint's model in float32 over texts of one length."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig, length: int) -> None:
        self.checkpoint, self.config = checkpoint, config
        rope = Rope(config, length, "cpu")
        rotations = rope.rotations(torch.arange(length), torch.full((length,), length))
        self._rotations = rope.of_layers(rotations)

    def embedded(self, prompts: Tensor) -> list[Tensor]:
        """Hidden states of token ids `prompts` int64 [S, L], in parts of a few sequences."""
        embedding = self.checkpoint.read(self.config.tensor_names.embedding)
        looked_up = embedding[prompts].float() * self.config.multipliers.on_embedding
        return list(torch.split(scaled_embedding_(looked_up, self.config), _SEQUENCES_AT_ONCE))

    def layer(self, index: int, states: Sequence[Tensor], product: Product | None = None) -> list[Tensor]:
        """Hidden states behind layer `index`, of those before it, [S, L, H] each.

        All parts meet a matrix before any meets the next one. `product` makes the products; None: the float matrices.
        """
        runs = [self._products(index, one) for one in states]
        outputs: Iterable[Tensor | None] = [None] * len(runs)
        while True:
            asked: list[tuple[Tensor, list[str], Tensor | None]] = []
            ended: list[Tensor] = []
            for run, output in zip(runs, outputs, strict=True):
                try:
                    asked.append(run.send(output))
                except StopIteration as end:
                    ended.append(end.value)
            if ended:
                return ended
            inputs, (modules, *_), added = zip(*asked, strict=True)
            outputs = (product or self.product)(list(inputs), modules, [one for one in added if one is not None])

    def product(self, inputs: list[Tensor], modules: list[str], _: list[Tensor]) -> Iterable[Tensor]:
        """A `Product` of the float matrices."""
        matrix, bias = torch.cat([*self.matrices(modules).values()]), self.bias(modules)
        return (F.linear(one, matrix, bias) for one in inputs)

    def matrices(self, modules: Iterable[str]) -> dict[str, Tensor]:
        """The matrices of modules by their tensors' names."""
        return {f"{module}.weight": self.read(f"{module}.weight") for module in modules}

    def second_moments(self, inputs: Sequence[Tensor], modules: Sequence[str]) -> Tensor:
        """The sum [K, K] of w x x' over all rows x of `inputs`, [..., K] each, which those modules meet (`weighted`).

        Raises `ModelFormatError` where they are not finite.
        """
        columns = inputs[0].shape[-1]
        moments = torch.zeros(columns, columns)
        starts = range(0, columns, _COLUMNS_AT_ONCE)
        for rows in (one.flatten(0, -2) for one in inputs):
            with_weights = weighted(rows)
            for start in starts:  # the upper triangle alone is computed
                stop = min(start + _COLUMNS_AT_ONCE, columns)
                moments[:stop, start:stop].addmm_(with_weights[:, :stop].t(), rows[:, start:stop])
        for start in starts:
            moments[start:, :start] = moments[:start, start:].t()
        if not torch.isfinite(moments).all():
            raise ModelFormatError(
                f"{self.checkpoint.entries[modules[0] + '.weight'].file}: activations are not finite"
            )
        return moments

    def bias(self, modules: Sequence[str]) -> Tensor | None:
        """The biases of modules side by side, with zeros for one without; None: no module has any."""
        names = [f"{module}.bias" for module in modules]
        if not any(name in self.checkpoint.entries for name in names):
            return None
        rows = [self.checkpoint.entries[f"{module}.weight"].shape[0] for module in modules]
        found = [
            self.read(name) if name in self.checkpoint.entries else torch.zeros(count)
            for name, count in zip(names, rows, strict=True)
        ]
        return torch.cat(found)

    def read(self, name: str) -> Tensor:
        """A tensor in float32."""
        return self.checkpoint.read(name).float()

    def logits(self, states: Iterable[Tensor]) -> Iterator[Tensor]:
        """Logits [..., V] of each of the hidden states [..., H] behind the last layer."""
        config, names = self.config, self.config.tensor_names
        head = self.read(names.embedding if config.tie_word_embeddings else LM_HEAD)
        for hidden in states:
            normed = self._normed(hidden, "", names.final_norm)
            yield soft_capped(F.linear(normed, head) / config.multipliers.logits, config.soft_caps.logits)

    def _products(
        self, index: int, hidden: Tensor
    ) -> Generator[tuple[Tensor, list[str], Tensor | None], Tensor | None, Tensor]:
        """Yield what a `Product` takes for each product of a layer, take its outputs; return the hidden states."""
        # What is yielded has no name here: while all parts wait for a product, only its inputs are in memory.
        names = self.config.tensor_names
        prefix, norms = names.layer(index), names.norms
        attention = prefix + "self_attn."
        qkv_modules = [attention + name for name in names.qkv]
        gate_up_modules = [prefix + name for name in names.gate_up]
        heads = self._attended(
            _sent((yield self._normed(hidden, prefix, norms.attention), qkv_modules, None)), attention, index
        )
        added = hidden if norms.attention_post is None else None
        output = _sent((yield heads, [attention + "o_proj"], added))
        hidden = hidden + self._normed(output, prefix, norms.attention_post)
        gated = self._gated(_sent((yield self._normed(hidden, prefix, norms.mlp), gate_up_modules, None)))
        down = _sent((yield gated, [prefix + names.down], hidden if norms.mlp_post is None else None))
        return hidden + self._normed(down, prefix, norms.mlp_post)

    def _normed(self, x: Tensor, prefix: str, name: str | None) -> Tensor:
        """The norm of `x` by the weights of that name; None: `x` itself."""
        if name is None:
            return x
        weight = self.read(f"{prefix}{name.removesuffix('.weight')}.weight") + self.config.norm_offset
        return F.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)

    def _gated(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        gated: Tensor = reference.activated(gate, self.config.activation) * up
        return gated

    def _attended(self, qkv: Tensor, attention: str, index: int) -> Tensor:
        """What the heads make of `qkv` [S, L, Q + 2 K], in the layer's window at most: [S, L, Q]."""
        config, window, length = self.config, self.config.windows[index], qkv.shape[1]
        if config.has_projection_norms:
            parts = list(torch.split(qkv, [config.q_size, config.kv_size, config.kv_size], dim=-1))
            for nth, name in enumerate(HEAD_NORMS):
                parts[nth] = self._normed(parts[nth], attention, name)
            qkv = torch.cat(parts, dim=-1)
        heads = qkv.view(*qkv.shape[:2], -1, config.head_dim).transpose(1, 2)
        query, key, value = torch.split(heads, [config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
        if config.has_head_norms:
            pairs = zip((query, key), HEAD_NORMS, strict=True)
            query, key = (self._normed(heads, attention, name) for heads, name in pairs)
        query, key = (_turned(part, self._rotations[index], config) for part in (query, key))
        cap, scale = config.soft_caps.attention, config.attention_scale
        if cap is None and (window or length) >= length:
            found = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
        else:
            mask = torch.ones(length, length, dtype=torch.bool).tril()
            mask = mask if window is None else mask.triu(1 - window)
            found = attended(query, key, value, mask, scale, cap, enable_gqa=True)
        return found.transpose(1, 2).flatten(2)


def weighted(rows: Tensor) -> Tensor:
    """Rows [T, K] times their weights: 1, or less where one is many times as long as most.

    A model that parks attention at the first token has activations there that would outweigh all others.
    """
    lengths = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    most = (_LONGEST * lengths.median()).clamp(min=1e-12)
    found: Tensor = rows * (most / lengths.clamp(min=most)).square()
    return found


def _sent(outputs: Tensor | None) -> Tensor:
    assert outputs is not None, "only a generator's start is sent None"
    return outputs


def _turned(heads: Tensor, rotations: Tensor, config: ModelConfig) -> Tensor:
    """Heads [..., L, D] in transformers' order of channels, turned by `rotations` [L, D / 2]."""
    stop, axis = config.rotary_dim, -1 if config.has_interleaved_rope else -2
    pairs = heads[..., :stop].reshape(*heads.shape[:-1], *((-1, 2) if axis == -1 else (2, -1)))
    first, second = pairs.unbind(axis)
    turned = torch.complex(first.contiguous(), second.contiguous()) * rotations[:, : stop // 2]
    return torch.cat([torch.stack([turned.real, turned.imag], axis).flatten(-2), heads[..., stop:]], dim=-1)
