"""Requests in flight, and outputs that wait for their callers: any call of `step` computes for all."""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import lru_cache

from d3engine.engine.call_lock import EngineState
from d3engine.errors import require
from d3engine.executor.interface import Computed
from d3engine.request.outputs import RequestOutput, Timings
from d3engine.request.params import RequestOutputKind
from d3engine.scheduling.plan import Plan, Sampled
from d3engine.scheduling.running import NewTokens
from d3engine.scheduling.scheduler import Scheduler
from d3engine.scheduling.sequence import Sequence
from d3engine.text.output import OutputProcessor
from d3engine.text.tokenizer import Tokenizer


class OutputQueue:
    """Outputs that have not been handed out, in their order.

    Those of a claimed request (of `generate` or `stream`) wait for its owner; all others are for `step()`.
    """

    def __init__(self) -> None:
        self._for_step: list[RequestOutput] = []
        self._claimed: dict[str, list[RequestOutput]] = {}

    def __len__(self) -> int:
        """How many wait for `step()`."""
        return len(self._for_step)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._claimed or any(output.request_id == request_id for output in self._for_step)

    def claim(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """The list in which from now on the outputs of these requests wait, for its owner to take them out."""
        waiting: list[RequestOutput] = []
        self._claimed |= dict.fromkeys(request_ids, waiting)
        return waiting

    def drop(self, request_ids: Iterable[str]) -> None:
        """The owner of these claimed requests has left."""
        for request_id in request_ids:
            self._claimed.pop(request_id, None)

    def put(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            self._claimed.get(output.request_id, self._for_step).append(output)

    def take(self) -> list[RequestOutput]:
        """Hand out what waits for `step()`."""
        taken, self._for_step = self._for_step, []
        return taken


NUM_KEPT = 64
"""Sums to remember: most requests share a few schedules and lengths, but each may bring its own."""


class NominalDepth:
    """The mean depth that the schedules promise over the longest answers allowed, whatever is really generated."""

    def __init__(self) -> None:
        self._layers = 0
        self._tokens = 0
        self._layers_of = lru_cache(NUM_KEPT)(lambda schedule, tokens: int(schedule.depths(tokens).sum()))

    def count(self, sequence: Sequence) -> None:
        tokens = sequence.max_length - len(sequence.prompt_token_ids)
        self._layers += self._layers_of(sequence.schedule, tokens)
        self._tokens += tokens

    def mean(self) -> float | None:
        """Layers per token over all sequences so far; None before the first."""
        return self._layers / self._tokens if self._tokens else None


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

    def deliver(
        self, plan: Plan, sampled: Sampled, tokens: Iterable[NewTokens], begun: float, computed: Computed
    ) -> None:
        """Lay out what came of a step, `begun` at that time of the monotonic clock, for whom it is for."""
        captured = [states.float().cpu().numpy() for states in computed.captured]
        self._put(self.outputs.process(plan, sampled, tokens, captured, computed.num_before))
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

    def drop(self, ids: list[str]) -> None:
        """End requests whose outputs no caller will take; finished ones stay."""
        if self._life.is_sound:  # after a fault the scheduler may be in any state
            self._scheduler.abort(ids)
        self.outputs.drop(ids)
        self.delivery.drop(ids)
