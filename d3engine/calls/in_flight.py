"""Requests in flight: from the queue, through the steps, until their callers have taken their last output."""

from __future__ import annotations

import time
from collections.abc import Iterable

from d3engine.calls.delivery import OutputQueue
from d3engine.calls.life import EngineState
from d3engine.calls.nominal_depth import NominalDepth
from d3engine.errors import require
from d3engine.plan import Plan, Sampled
from d3engine.request.outputs import RequestOutput, Timings
from d3engine.request.params import RequestOutputKind
from d3engine.request.sequence import Sequence
from d3engine.scheduling.running import NewTokens
from d3engine.scheduling.scheduler import Scheduler
from d3engine.text.output import OutputProcessor
from d3engine.text.tokenizer import Tokenizer


class RequestRegistry:
    """The requests of one engine: `outputs` has those that are unfinished, `delivery` what has yet to be taken.

    A request stands in the scheduler, in `outputs` and perhaps in `delivery`; it enters and leaves them together.
    """

    def __init__(
        self, scheduler: Scheduler, tokenizer: Tokenizer | None, life: EngineState, stream_interval: int = 1
    ) -> None:
        self.outputs = OutputProcessor(tokenizer, scheduler.finish, stream_interval)
        self.delivery = OutputQueue()
        self.nominal = NominalDepth()
        self.timings = Timings()
        self._scheduler = scheduler
        self._life = life
        self._num_own = 0

    def __contains__(self, request_id: str) -> bool:
        """Whether an id is taken: its request is unfinished, or the last output of it has not been handed out."""
        return request_id in self.outputs or request_id in self.delivery

    def free_id(self, wanted: str | None) -> str:
        """The id that a request wants, or else a new one. Raises `InvalidValueError` for one that is taken."""
        allowed = "an id of no unfinished request, nor of one whose last output step() has yet to return"
        require(wanted is None or wanted not in self, "request_id", wanted, allowed)
        return self.new_id() if wanted is None else wanted

    def new_id(self) -> str:
        """An id for a request of the engine's own, which no request of the step API has taken."""
        while True:
            self._num_own += 1
            request_id = f"request-{self._num_own}"
            if request_id not in self:
                return request_id

    def add(self, sequences: list[Sequence], text: str | None, kind: RequestOutputKind) -> None:
        """Queue a request, whole or not at all."""
        try:
            self.outputs.add(sequences, text, kind)
            for sequence in sequences:
                sequence.streams = kind is not RequestOutputKind.FINAL_ONLY
                self._scheduler.add(sequence)
                self.nominal.count(sequence)
        except BaseException:
            self.drop([sequences[0].request_id])
            raise

    def deliver(self, plan: Plan, sampled: Sampled, tokens: Iterable[NewTokens], begun: float) -> None:
        """Lay out what came of a step, `begun` at that time of the monotonic clock, for whom it is for."""
        self._put(self.outputs.process(plan, sampled, tokens))
        if sampled.opened is None:
            self.timings.count_steps(plan.num_steps, plan.num_rows, begun, time.monotonic())
        else:
            self.timings.count_steps(1, plan.num_rows, begun, sampled.opened)
            self.timings.count_steps(plan.num_steps - 1, len(plan.slots), sampled.opened, time.monotonic())

    def abort(self, ids: list[str]) -> None:
        """End requests; their last outputs wait for `step()`."""
        self._scheduler.abort(ids)
        self._put(self.outputs.end(ids))

    def _put(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            if output.finished:
                self.timings.count_request(output.metrics)
        self.delivery.put(outputs)

    def claim(self, ids: list[str]) -> list[RequestOutput]:
        """The list in which the outputs of these requests will wait for the caller, and not for `step()`."""
        return self.delivery.claim(ids)

    def drop(self, ids: list[str]) -> None:
        """End requests whose outputs nobody will ask for; nothing happens to finished ones."""
        if self._life.is_sound:  # after a fault the scheduler may be in any state
            self._scheduler.abort(ids)
        self.outputs.drop(ids)
        self.delivery.drop(ids)
