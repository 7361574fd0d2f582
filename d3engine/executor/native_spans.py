"""Spans of a step run natively on a residual stream that the host looks at between them, as early exits do."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from d3engine.depth import NEVER
from d3engine.kernels.native.library import Decoder
from d3engine.kernels.native.model import NativeMaps
from d3engine.kernels.native.runs import STEERINGS, HiddenStates, Hooks, Rows
from d3engine.scheduling.kv_cache import IntArray
from d3engine.scheduling.plan import Plan, Span


class NativeSpans:
    """The layers and the LM head of a plan's rows, by the library.

    `hidden` [R, H], float32, is what the rows go on from, and where they leave what they have come to. `maps` has those
    of each row's adapter; None where none has one.
    """

    def __init__(self, decoder: Decoder, plan: Plan, hidden: Tensor, maps: list[NativeMaps | None] | None) -> None:
        self._decoder = decoder
        self._plan = plan
        self._hidden = hidden.numpy()
        self._maps = maps

    def run(self, span: Span) -> None:
        """Run the rows of a span through its layers; their entries go into the pool.

        A layer whose halves are two spans, for others' sake, runs whole in the second.
        """
        if span.part == "attention":
            return
        every = np.arange(span.num_rows) if span.rows is None else span.rows
        for rows in self._parts(every):  # entries of one part are in the pool before the next one comes
            captures = np.empty((rows.size, 2), np.int32)
            captures[:, 0], captures[:, 1] = span.layers.stop, np.arange(rows.size)
            captured = np.empty((1, rows.size, self._hidden.shape[1]), np.float32)
            hooks = Hooks(np.empty(0, STEERINGS), captures, captured)
            given, states = self._given(rows, span.layers)
            self._decoder.run(given, 1, yields=np.zeros(rows.size, np.bool_), states=states, hooks=hooks)
            self._hidden[rows] = captured[0]

    def logits(self, rows: IntArray) -> Tensor:
        """Float32 logits [n, V] of these rows' states."""
        logits = np.empty((rows.size, self._decoder.vocab_size), np.float32)
        first = 0
        for part in self._parts(rows):
            given, states = self._given(part, range(0))
            self._decoder.run(given, 1, logits=logits[None, first : first + part.size], states=states)
            first += part.size
        return torch.from_numpy(logits)

    def _parts(self, rows: IntArray) -> Iterator[IntArray]:
        """As many at a time as go through layers together."""
        most = self._decoder.max_rows
        return (rows[first : first + most] for first in range(0, rows.size, most))

    def _given(self, rows: IntArray, layers: range) -> tuple[Rows, HiddenStates]:
        """These rows as the library takes them: through `layers` alone, from their states on."""
        plan = self._plan
        cutoffs = np.zeros((rows.size, plan.tables.shape[1]), np.int32)  # which no step is before
        cutoffs[:, layers.start : layers.stop] = NEVER
        none = np.full(rows.size, -1)
        return (
            Rows(
                plan.token_ids[rows],
                plan.positions[rows],
                np.zeros(rows.size, np.int64),
                plan.slots[plan.row_chunks[rows]],
                cutoffs,
                plan.tables,
                adapters=self._maps and [self._maps[row] for row in rows.tolist()],
            ),
            HiddenStates(self._hidden, none, none, rows.astype(np.int64)),
        )
