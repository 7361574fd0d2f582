"""Choosing tokens on the device: what each row's request asks for stands there, and a step's last kernels read it."""

from __future__ import annotations

from collections.abc import Sequence as AnySequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from d3engine.kernels.decode_rows import DecodeRows
from d3engine.kernels.sampling import Cuts, Penalties, SamplingRows
from d3engine.model.adapters import RowAdapters
from d3engine.model.llama import Llama
from d3engine.scheduling.kv_cache import IntArray
from d3engine.scheduling.plan import Chosen, Plan
from d3engine.scheduling.sampling_mode import SamplingMode, choice_of
from d3engine.scheduling.sequence import Ahead, Sequence


def choice_of_step(plan: Plan) -> SamplingMode:
    """What choosing the tokens of one step takes; HOST where logits are wanted for more than a token of each row."""
    if plan.prompt_rows or plan.drafts is not None:
        return SamplingMode.HOST
    return max((choice_of(plan.sequences[chunk]) for chunk in plan.sampled.tolist()), default=SamplingMode.GREEDY)


def choose_across_ranks(model: Llama, hidden: Tensor, plan: Plan, kind: SamplingMode) -> Tensor | Chosen:
    """The tokens of final `hidden` [S, H], the step's sampled rows, without anybody's having all of their logits.

    Where it takes the whole row of logits to choose, those are returned: float32 [S, V].
    """
    if kind > SamplingMode.DRAW or not plan.sampled.size:
        return model.logits(hidden)
    if kind is SamplingMode.GREEDY:
        tokens, scores = model.likeliest(hidden)
    else:
        choice = DeviceChoice(model, plan.sampled.size, hidden.device)
        steps = torch.from_numpy(sampled_steps(plan)).to(hidden.device)
        choice.write([plan.sequences[chunk] for chunk in plan.sampled.tolist()], kind)
        tokens, scores = choice.draw(hidden, steps)
    return Chosen(tokens.cpu().numpy()[None], scores.cpu().numpy()[None])


def sampled_steps(plan: Plan) -> IntArray:
    """The generation step of the token that each sampled chunk yields; a prompt's last row yields that of step 0."""
    last = plan.steps + np.diff(plan.query_starts) - 1
    return np.where(plan.steps < 0, 0, last)[plan.sampled].astype(np.int64)


class DeviceChoice:
    """The sampling parameters of up to `rows` rows in device memory, at addresses that stay."""

    def __init__(self, model: Llama, rows: int, device: torch.device) -> None:
        self._model = model
        self._kernels = model.kernels
        self._numbers = torch.zeros(6, rows, dtype=torch.float32, device=device)
        self._integers = torch.zeros(3, rows, dtype=torch.int64, device=device)
        self._tokens_seen: tuple[Tensor, Tensor] | None = None

    def choose(
        self, hidden: Tensor, rows: DecodeRows, kind: SamplingMode, adapters: RowAdapters | None = None
    ) -> tuple[Tensor, Tensor]:
        """A token int64 [B] and its score float32 [B] for final `hidden` [B, H]; it may be captured."""
        if kind is SamplingMode.GREEDY:
            return self._model.likeliest(hidden, rows.num_rows, adapters)
        if kind is SamplingMode.DRAW:
            return self.draw(hidden, rows.steps, rows.num_rows, adapters)
        return self.from_logits(self._model.logits(hidden, rows.num_rows, adapters), rows.steps, kind, rows.num_rows)

    def draw(
        self, hidden: Tensor, steps: Tensor, num_rows: Tensor | None = None, adapters: RowAdapters | None = None
    ) -> tuple[Tensor, Tensor]:
        """The same where every row draws, or takes the likeliest, for the steps int64 [B]."""
        return self._model.draw(hidden, self._rows(hidden.shape[0], SamplingMode.DRAW), steps, num_rows, adapters)

    def from_logits(
        self, logits: Tensor, steps: Tensor, kind: SamplingMode, num_rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The same for `logits` [B, V] of rows at the steps int64 [B]; the tokens count for the next penalties."""
        given = self._rows(logits.shape[0], kind)
        chosen: tuple[Tensor, Tensor] = self._kernels.sample(logits, given, steps, num_rows=num_rows)
        if given.penalties is not None:
            self._kernels.count_tokens(given.penalties.output_counts, chosen[0], num_rows=num_rows)
        return chosen

    def write(self, sequences: AnySequence[Sequence | Ahead], kind: SamplingMode) -> None:
        """Put what the sequences ask for into the first rows."""
        if kind is SamplingMode.GREEDY:
            return
        asked = [sequence.params for sequence in sequences]
        floats = [
            (
                0.0 if params.greedy else params.temperature,
                params.min_p,
                params.top_p,
                params.repetition_penalty,
                params.presence_penalty,
                params.frequency_penalty,
            )
            for params in asked
        ]
        integers = [(s.seed, s.index, s.params.top_k) for s in sequences]
        count = len(sequences)
        self._numbers[:, :count] = torch.from_numpy(np.array(floats, dtype=np.float32).T.copy())
        self._integers[:, :count] = torch.from_numpy(np.array(integers, dtype=np.int64).T.copy())
        if kind is SamplingMode.PENALISE:
            self._write_tokens(sequences)

    def _rows(self, count: int, kind: SamplingMode) -> SamplingRows:
        temperature, min_p, top_p, repetition, presence, frequency = self._numbers[:, :count].unbind()
        seeds, indices, top_k = self._integers[:, :count].unbind()
        rows = SamplingRows(temperature, seeds, indices)
        if kind >= SamplingMode.CUT:
            rows = replace(rows, cuts=Cuts(min_p, top_k, top_p))
        if kind is SamplingMode.PENALISE:
            seen, counts = self._seen_and_counts()
            rows = replace(rows, penalties=Penalties(repetition, presence, frequency, seen[:count], counts[:count]))
        return rows

    def _seen_and_counts(self) -> tuple[Tensor, Tensor]:
        """Which tokens each row's prompt has, and how often its output has each: [rows, V], made when first needed."""
        if self._tokens_seen is None:
            shape, device = (self._numbers.shape[1], self._model.config.vocab_size), self._numbers.device
            seen = torch.zeros(shape, dtype=torch.uint8, device=device)
            self._tokens_seen = seen, torch.zeros(shape, dtype=torch.int32, device=device)
        return self._tokens_seen

    def _write_tokens(self, sequences: AnySequence[Sequence | Ahead]) -> None:
        seen, counts = self._seen_and_counts()
        count = len(sequences)
        seen[:count] = 0
        counts[:count] = 0
        for tensor, token_ids in (
            (seen, [sequence.prompt_token_ids for sequence in sequences]),
            (counts, [sequence.token_ids for sequence in sequences]),
        ):
            rows = np.repeat(np.arange(count), [len(tokens) for tokens in token_ids])
            places = rows * tensor.shape[1] + np.concatenate(token_ids)
            flat, ones = tensor.view(-1), torch.ones(1, dtype=tensor.dtype, device=tensor.device)
            where = torch.from_numpy(places.astype(np.int64)).to(tensor.device)
            if tensor is seen:
                flat[where] = ones
            else:
                flat.index_add_(0, where, ones.expand(where.shape[0]))
