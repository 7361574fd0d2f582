"""An EAGLE-3 head as the second model of a `DraftTargetExecutor`: it reads what its target leaves behind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from d3engine.executor.eager import EagerExecutor
from d3engine.executor.hidden_states import Due
from d3engine.executor.interface import Computed, Executor, ExecutorStats
from d3engine.model.eagle3 import LAYER, Eagle3Head
from d3engine.model.llama import inverse_frequencies
from d3engine.scheduling.plan import Plan
from d3engine.scheduling.sequence import Sequence


class Eagle3Executor(Executor):
    """Drafts for `target`, whose hidden states it watches.

    Its row of position p has the embedding of token p and the state of position p - 1, and yields token p + 1: the
    target's state, or behind the answer's last token its own of the row before. There is no row 0.
    """

    def __init__(self, head: Eagle3Head, target: EagerExecutor) -> None:
        self._head = head
        self._target = target
        self.stats = ExecutorStats()
        self.model, self.pool = target.model, target.pool  # a head is no whole model, its entries stand with states
        self._texts: defaultdict[int, _Text] = defaultdict(lambda: defaultdict(_KeptRows))  # by slot
        frequencies, self._attention_scaling = inverse_frequencies(head.config, len(target.rope.table))
        self._frequencies = frequencies.to(target.device)
        target.watch = self._watch

    # -- what the target leaves behind -------------------------------------------------------------------------

    def _watch(self, plan: Plan, hidden: Tensor) -> Iterator[Due]:
        """Keep what the rows [R, H] of sequences that draft by this head are in front of the head's layers."""
        states = hidden.new_zeros((hidden.shape[0], len(self._head.layers), hidden.shape[1]))
        for place, layer in enumerate(self._head.layers):
            yield layer, partial(states[:, place].copy_, hidden)
        yield self.model.config.num_layers, partial(self._keep, plan, states)

    def _keep(self, plan: Plan, states: Tensor) -> None:
        for chunk, sequence in enumerate(plan.sequences):
            if not _drafts(sequence):
                continue
            first, last = int(plan.query_starts[chunk]), int(plan.query_starts[chunk + 1])
            fused = linear(states[first:last].flatten(1), self._weight("fc"))
            self._texts[int(plan.slots[chunk])]["target"].write(int(plan.starts[chunk]), fused)

    # -- drafting ----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def run(self, plan: Plan) -> Computed:
        """The logits of the sampled rows, over the target's vocabulary: minus infinity where the head has no token."""
        self.stats.eager_steps += 1
        last_states: dict[int, Tensor] = {}
        for chunk, sequence in enumerate(plan.sequences):
            start, stop = max(int(plan.starts[chunk]), 1), int(plan.stops[chunk])
            if start < stop:
                last = int(plan.query_starts[chunk + 1])
                tokens = torch.from_numpy(plan.token_ids[last - (stop - start) : last].astype("int64"))
                text = self._texts[int(plan.slots[chunk])]
                last_states[chunk] = self._rows(text, tokens.to(self._target.device), start, sequence.num_tokens)[-1]
        sampled = torch.stack([last_states[chunk] for chunk in plan.sampled.tolist()]) if plan.sampled.size else None
        logits = torch.full((plan.sampled.size, self._head.config.vocab_size), -torch.inf, device=self._target.device)
        if sampled is not None:
            found = linear(self._normed(sampled, "norm"), self._weight("lm_head"))
            logits[:, self._head.token_ids] = found.float()
        return Computed(logits)

    def _rows(self, text: _Text, tokens: Tensor, start: int, num_known: int) -> Tensor:
        """The last states [n, H] of neighbouring rows from position `start` on, whose keys and values are kept."""
        config, stop = self._head.config, start + len(tokens)
        positions = torch.arange(start, stop, device=tokens.device)
        states = text["target"].read(start - 1, stop - 1)
        if stop > num_known:
            drafted = text["own"].read(start - 1, stop - 1)
            states = torch.where((positions >= num_known)[:, None], drafted, states)
        embedded = self._target.model.embed(tokens)
        both = torch.cat(
            (self._normed(embedded, LAYER + "input_layernorm"), self._normed(states, LAYER + "hidden_norm")), dim=1
        )
        queries, keys, values = (
            linear(both, self._weight(f"{LAYER}self_attn.{name}_proj")).view(len(both), -1, config.head_dim)
            for name in "qkv"
        )
        text["keys"].write(start, self._rotated(keys, positions).flatten(1))
        text["values"].write(start, values.flatten(1))
        all_keys, all_values = (
            text[name]
            .read(1, stop)
            .view(stop - 1, -1, config.head_dim)
            .repeat_interleave(config.group_size, dim=1)
            .transpose(0, 1)
            for name in ("keys", "values")
        )
        seen = torch.arange(1, stop, device=positions.device)[None, :] <= positions[:, None]
        attended = scaled_dot_product_attention(
            self._rotated(queries, positions).transpose(0, 1), all_keys, all_values, attn_mask=seen
        )
        states = states + linear(attended.transpose(0, 1).flatten(1), self._weight(LAYER + "self_attn.o_proj"))
        normed = self._normed(states, LAYER + "post_attention_layernorm")
        gated = silu(linear(normed, self._weight(LAYER + "mlp.gate_proj")))
        gated *= linear(normed, self._weight(LAYER + "mlp.up_proj"))
        states = states + linear(gated, self._weight(LAYER + "mlp.down_proj"))
        text["own"].write(start, states)
        return states

    def _rotated(self, heads: Tensor, positions: Tensor) -> Tensor:
        """Rotary embedding of `heads` [n, N, D], whose channels are two halves; a row has the position of its state."""
        angles = (positions - 1)[:, None].float() * self._frequencies
        turn = torch.cat((angles, angles), dim=1)[:, None]
        low, high = heads.float().chunk(2, dim=-1)
        turned = heads.float() * turn.cos() + torch.cat((-high, low), dim=-1) * turn.sin()
        return (turned * self._attention_scaling).to(heads.dtype)

    def _normed(self, states: Tensor, name: str) -> Tensor:
        return rms_norm(states, states.shape[-1:], self._weight(name), self._head.config.rms_norm_eps)

    def _weight(self, name: str) -> Tensor:
        return self._head.weights[name + ".weight"]


def _drafts(sequence: Sequence) -> bool:
    return sequence.draft is not None and sequence.draft.rule.model is not None


class _KeptRows:
    """Rows by position, with room for as many as were written."""

    def __init__(self) -> None:
        self._rows: Tensor | None = None

    def write(self, start: int, rows: Tensor) -> None:
        """Write neighbouring rows [n, width]."""
        stop = start + len(rows)
        if self._rows is None or len(self._rows) < stop:
            grown = rows.new_zeros((2 * stop, rows.shape[1]))
            if self._rows is not None:
                grown[: len(self._rows)] = self._rows
            self._rows = grown
        self._rows[start:stop] = rows

    def read(self, start: int, stop: int) -> Tensor:
        """The rows of positions [start, stop); zeros where none were written."""
        assert self._rows is not None, "the target has run, or a row before"
        found = self._rows[start:stop]
        lacking = stop - start - len(found)
        return torch.cat((found, found.new_zeros((lacking, found.shape[1])))) if lacking > 0 else found


_Text: TypeAlias = "defaultdict[str, _KeptRows]"
"""What is kept of one text: "target", its fused states, "own" ones, "keys" and "values"."""
