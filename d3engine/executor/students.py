"""Steps of which some rows run a student's weights: each row by the executor of its
weights, over one pool and one KV cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import numpy as np

from d3engine.executor.bridging import BridgeStore
from d3engine.executor.interface import Computed, Executor, ExecutorStats
from d3engine.executor.shares import Share, joined, share_of
from d3engine.model.students import bytes_beyond
from d3engine.model.weights import LlamaWeights
from d3engine.scheduling.kv_cache import FlatCopies
from d3engine.scheduling.plan import Plan

_Executor = TypeVar("_Executor", bound=Executor)


class StudentExecutors(Generic[_Executor]):
    """An executor for each student that plans name, made when one first does."""

    def __init__(
        self,
        store: BridgeStore | None,
        own: LlamaWeights,
        make: Callable[[LlamaWeights], _Executor],
        stats: ExecutorStats,
    ) -> None:
        self.store, self._own, self._make, self._stats = store, own, make, stats
        self._made: dict[str, _Executor] = {}

    def named(self, plan: Plan) -> list[str | None] | None:
        """By chunk, whose weights it runs; None where all run the model's own."""
        if self.store is None or not self.store.students:
            return None
        names = [
            sequence.schedule.student_at(step)
            for sequence, step in zip(plan.sequences, plan.steps.tolist(), strict=True)
        ]
        for chunk in () if plan.drafts is None else plan.sampled[sorted(plan.drafts.proposing)].tolist():
            sequence = plan.sequences[chunk]
            if sequence.draft is not None:
                names[chunk] = sequence.draft.rule.student(sequence.step)
        return names if any(name is not None for name in names) else None

    def of(self, name: str) -> _Executor:
        """The executor of a student that a checked schedule names."""
        if name not in self._made:
            assert self.store is not None, "a plan names a student that no schedule was checked for"
            weights = self.store.student_weights(name, self._own)
            self._stats.student_bytes += bytes_beyond(weights, self._own)
            self._made[name] = self._make(weights)
        return self._made[name]

    def made(self) -> list[tuple[str, _Executor]]:
        """Those that there are, by name."""
        return list(self._made.items())

    def make_known(self) -> None:
        """Make those that schedules have named by now: before any request, the one of the engine's policy."""
        for name in () if self.store is None else self.store.students:
            self.of(name)

    def run(self, plan: Plan, names: list[str | None], main: _Executor, copy: Callable[[FlatCopies], None]) -> Computed:
        """Run a plan of which some chunks are students'; `copy` copies entries of the pool."""
        one = set(names)
        if len(one) == 1:
            (name,) = one
            assert name is not None
            return self.of(name).run(plan)
        assert plan.multi_step is None, "rows of a run have the same weights"
        copy(plan.copies_before)
        found: list[tuple[Share, Computed]] = []
        for name in sorted(one, key=lambda name: name or ""):
            share = share_of(plan, np.array([chunk for chunk, own in enumerate(names) if own == name]))
            found.append((share, (main if name is None else self.of(name)).run_share(share.plan)))
        copy(plan.copies_after)
        return joined(plan, found)
