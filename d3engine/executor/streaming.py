"""A run of graphs whose tokens the host takes step by step: the device is given a few
steps more than the host waits for, since a launch cannot be taken back."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from d3engine.kernels.decode_rows import DecodeRows, tokens_and_scores
from d3engine.scheduling.kv_cache import IntArray
from d3engine.scheduling.plan import Chosen, Plan, RunControl
from d3engine.scheduling.sequence import Sequence

LAUNCHED_AHEAD = 4
"""Steps that the device has been given and the host has not seen, at most."""


class HostTokens:
    """Memory of the host to which a device copies what its steps have chosen, in its own time: a row for each step that
    the host has not seen, used in turn."""

    def __init__(self, rows: DecodeRows) -> None:
        self._device = rows.yielded
        self._is_pinned = rows.yielded.is_cuda
        shape = LAUNCHED_AHEAD + 1, rows.yielded.shape[1]
        self._host = torch.empty(shape, dtype=rows.yielded.dtype, pin_memory=self._is_pinned)
        chosen, scores = tokens_and_scores(self._host, rows.tokens.shape[0])
        self._chosen, self._scores = chosen.numpy(), scores.numpy()

    def fetch(self, taken: int) -> Callable[[], None]:
        """Let the device copy a step's tokens when it has chosen them; the result waits until it has."""
        self._host[taken % len(self._host)].copy_(self._device[taken % len(self._device)], non_blocking=True)
        if not self._is_pinned:
            return lambda: None  # without a device a step is done when its launch returns
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device.device))  # the current device may be another
        return event.synchronize

    def of_step(self, taken: int, count: int) -> Chosen:
        """What the first `count` rows have chosen in a step that was waited for."""
        step = [taken % len(self._host)]
        return Chosen(self._chosen[step, :count], self._scores[step, :count])  # copies, as every choice by a list is


class StreamingRun:
    """A run of `count` rows; `add` gives it its steps, at first and whenever it becomes longer."""

    def __init__(self, control: RunControl, count: int, tokens: HostTokens) -> None:
        self.control = control
        self.num_steps = 0
        self._count = count
        self._tokens = tokens
        self._launches: deque[Callable[[], None]] = deque()
        self._waits: deque[Callable[[], None]] = deque()  # of steps that are launched
        self._num_taken = 0

    def add(self, launches: Iterable[Callable[[], None]]) -> None:
        """Go on with these steps behind the others."""
        self._launches.extend(launches)
        self.num_steps = self._num_taken + len(self._waits) + len(self._launches)

    def next_step(self) -> Chosen:
        """Wait for the next step's tokens, and launch what may be launched before."""
        while self._launches and len(self._waits) <= LAUNCHED_AHEAD and not self.control.is_ended:
            self._launches.popleft()()
            num_launched = self._num_taken + len(self._waits)
            self._waits.append(self._tokens.fetch(num_launched))
            self.control.words[1] = num_launched + 1
        taken, self._num_taken = self._num_taken, self._num_taken + 1
        self._waits.popleft()()
        return self._tokens.of_step(taken, self._count)


@dataclass(frozen=True)
class GoingOn:
    """Those of `count` chunks whose answers go on behind the opening, and the token that each has there."""

    count: int
    chunks: IntArray  # [n], in order
    sequences: list[Sequence]
    token_ids: IntArray  # [n]

    @classmethod
    def of(cls, plan: Plan, opening: Chosen) -> GoingOn:
        """Of the chunks of `plan`, each of which has chosen a token, [1, C], in its opening."""
        token_ids, scores = opening.token_ids[0], opening.scores[0]
        chunks = [
            chunk
            for chunk, (token, score) in enumerate(zip(token_ids.tolist(), scores.tolist(), strict=True))
            if math.isfinite(score) and not plan.sequences[chunk].would_end(token, after=1)
        ]
        sequences = [plan.sequences[chunk] for chunk in chunks]
        return cls(len(token_ids), np.array(chunks, np.int64), sequences, token_ids[chunks])

    def spread(
        self, token_ids: npt.NDArray[np.int64], scores: npt.NDArray[np.float32]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """What the run's rows have chosen, [S, n] each, as columns of all chunks, [S, C]."""
        if len(self.chunks) == self.count:
            return token_ids, scores
        everywhere = np.zeros((len(token_ids), self.count), token_ids.dtype)
        of_all = np.zeros(everywhere.shape, scores.dtype)
        everywhere[:, self.chunks], of_all[:, self.chunks] = token_ids, scores
        return everywhere, of_all
