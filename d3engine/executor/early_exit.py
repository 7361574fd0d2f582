"""Early exit inside a step: the plan's spans, cut where a confidence is looked at, each
without the rows that have left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from d3engine.executor.interface import Computed
from d3engine.kernels.kv_pool import KVPool
from d3engine.model.llama import Llama
from d3engine.scheduling.kv_cache import IntArray
from d3engine.scheduling.plan import BoolArray, ExitingChunks, Plan, Span, rows_of


class EarlyExits:
    """The rows of one step that may leave: who has, after how many layers, and with which logits.

    `hidden` [R, H] is what the executor's layers work on in place. A row that has left keeps its last state there.
    `logits` gives those [n, V] of some rows' states.
    """

    def __init__(self, plan: Plan, model: Llama, hidden: Tensor, logits: Callable[[IntArray], Tensor]) -> None:
        self._plan = plan
        self._model = model
        self._hidden = hidden
        self._logits = logits
        self._depths = plan.depths.copy()
        self._gone = np.zeros(len(plan.sequences), dtype=bool)
        self._known: list[tuple[IntArray, Tensor]] = []  # places among plan.sampled, and the logits [n, V] found there

    def spans(self) -> Iterator[Span]:
        """The spans to run, one after the other: who is in the next one is decided when it is asked for."""
        looks: list[tuple[ExitingChunks, Tensor | None]] = []
        for span in self._plan.spans:
            for layers in self._pieces(span.layers):
                if span.part != "mlp":  # of a layer in two parts the input is what the first one gets
                    exits = self._plan.exits
                    looks = [(group, self._input(group)) for group in exits if self._looks(group, layers[-1])]
                yield self._without_gone(replace(span, layers=layers))
                if span.part == "attention":
                    continue
                for group, before in looks:
                    self._look(group, layers[-1], before)
        yield from self._projections()

    def copy_entries(self, pool: KVPool, entries: Tensor) -> None:
        """Let the entry of its last layer stand in all layers that a row left out, where its rule is "copy".

        `entries` [L, R, 2] are all rows' places in `pool`. The blocks of all layers are taken before a step, so there
        is no block to alias.
        """
        sources, targets = [], []
        for chunk in self._left("copy").tolist():
            depth, row = int(self._depths[chunk]), int(self._plan.query_starts[chunk])
            left_out = entries[depth:, row]
            sources.append(entries[depth - 1, row].expand_as(left_out).reshape(-1))
            targets.append(left_out.reshape(-1))
        if sources:
            self._model.kernels.copy_entries(pool, torch.cat(sources), torch.cat(targets))

    def computed(self) -> Computed:
        """The logits: of rows that left those found there, of the others those after their last layer."""
        rows = self._plan.logit_rows
        if not self._known:
            return Computed(self._logits(rows), self._depths)
        places = np.concatenate([places for places, _ in self._known])
        found = torch.cat([logits for _, logits in self._known])
        logits = found.new_empty((rows.size, found.shape[1]))
        logits[self._tensor(places)] = found
        others = np.setdiff1d(np.arange(rows.size), places)
        if others.size:
            logits[self._tensor(others)] = self._logits(rows[others])
        return Computed(logits, self._depths)

    # -- who runs ----------------------------------------------------------------------------------------------

    def _pieces(self, layers: range) -> list[range]:
        """`layers` cut behind every checked layer, and before it if its input is checked too."""
        cuts = {layers.start, layers.stop}
        for layer in layers:
            for group in self._plan.exits:
                if self._looks(group, layer):
                    cuts |= {layer, layer + 1} if group.rule.confidence == "cosine" else {layer + 1}
        return [range(low, high) for low, high in pairwise(sorted(cuts))]

    def _looks(self, group: ExitingChunks, layer: int) -> bool:
        is_last = layer == self._model.config.num_layers - 1
        return group.rule.checks_after(layer) and not is_last and not self._gone[group.chunks].all()

    def _without_gone(self, span: Span) -> Span:
        """The span without the rows that have left; what it projects stays."""
        chunks = np.arange(span.num_chunks) if span.chunks is None else span.chunks
        staying = chunks[~self._gone[chunks]]
        if staying.size == chunks.size:
            return span
        if staying.size == 0:
            return replace(span, num_chunks=0, num_rows=0, chunks=None, rows=None)
        rows = rows_of(staying, self._plan.query_starts)
        return replace(span, num_chunks=staying.size, num_rows=rows.size, chunks=staying, rows=rows)

    def _projections(self) -> Iterator[Span]:
        """Spans that run nothing but leave, where the rule is "project", entries of the rows that left."""
        left = self._left("project")
        ends = [*np.unique(self._depths[left]).tolist(), self._model.config.num_layers]
        for low, high in pairwise(ends):
            rows = self._rows(left[self._depths[left] <= low])
            yield Span(range(low, high), 0, 0, None, None, projected_rows=rows)

    def _left(self, on_skip: str) -> IntArray:
        """The chunks that have left and whose skipped layers are filled so."""
        gone = self._gone.nonzero()[0]
        return gone[[self._plan.sequences[chunk].schedule.on_skip == on_skip for chunk in gone.tolist()]]

    # -- who leaves --------------------------------------------------------------------------------------------

    def _input(self, group: ExitingChunks) -> Tensor | None:
        """The states of the group's rows before a layer, a copy; None where the confidence does not need them."""
        if group.rule.confidence != "cosine":
            return None
        return self._hidden[self._tensor(self._rows(group.chunks[~self._gone[group.chunks]]))]

    def _look(self, group: ExitingChunks, layer: int, before: Tensor | None) -> None:
        """Let the rows of a group leave after `layer` that are confident enough; `before` is what `_input` gave."""
        here = ~self._gone[group.chunks]
        chunks = group.chunks[here]
        rows = self._rows(chunks)
        after = self._hidden[self._tensor(rows)]
        logits = None
        if before is not None:
            confidence = F.cosine_similarity(before.float(), after.float(), dim=-1)
        else:
            logits = self._logits(rows)
            confidence = _SOFTMAX[group.rule.confidence](logits)
        if self._model.ranks is not None:  # ranks must never part over a rounding
            self._model.ranks.collectives.agree_(confidence)
        leaving: BoolArray = confidence.cpu().double().numpy() >= group.thresholds[here]
        if group.rule.batch == "batch_min":
            leaving[:] = leaving.all()
        if not leaving.any():
            return
        self._gone[chunks[leaving]] = True
        self._depths[chunks[leaving]] = layer + 1
        if logits is not None:
            places = np.searchsorted(self._plan.sampled, chunks[leaving])
            self._known.append((places, logits[torch.from_numpy(leaving).to(logits.device)]))

    def _rows(self, chunks: IntArray) -> IntArray:
        """The row of each of these chunks, which have one each."""
        return self._plan.query_starts[chunks]

    def _tensor(self, array: IntArray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(self._hidden.device)


def _softmax_max(logits: Tensor) -> Tensor:
    return logits.softmax(dim=-1).amax(dim=-1)


def _softmax_diff(logits: Tensor) -> Tensor:
    first, second = logits.softmax(dim=-1).topk(2, dim=-1).values.unbind(dim=-1)
    return first - second


_SOFTMAX = {"softmax_max": _softmax_max, "softmax_diff": _softmax_diff}
