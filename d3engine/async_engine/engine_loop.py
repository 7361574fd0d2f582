"""The loop that owns an engine: take in what callers want, step, hand over what came of it, all at once.

It knows neither event loops nor processes: messages come through an inbox, and replies leave through a function that
gets those of a step together, or of a few steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from queue import Empty, SimpleQueue
from typing import Protocol

from d3engine.async_engine.batcher import OutputBatcher, Reply
from d3engine.async_engine.messages import ASKED, Abort, Add, Ask, Leave, Message, Refuse, Stop
from d3engine.errors import EngineDeadError
from d3engine.executor.interface import Executor
from d3engine.request.engine_request import EngineRequest
from d3engine.request.outputs import RequestOutput
from d3engine.stats import EngineStats


class Steppable(Protocol):
    """What the loop needs of `Engine`."""

    executor: Executor

    def add(self, prepared: EngineRequest) -> str: ...

    def step(self, *, at_once: bool = False) -> list[RequestOutput]: ...

    def abort_request(self, request_ids: str | Iterable[str]) -> None: ...

    def has_unfinished_requests(self) -> bool: ...

    def is_ahead(self) -> bool: ...

    def stats(self) -> EngineStats: ...

    def reset_prefix_cache(self) -> None: ...


class HeartbeatClock(Protocol):
    """When a loop last began to wait or to step, in seconds of `time.monotonic()`."""

    last_turn: float


class LocalHeartbeatClock:
    """Of a loop in this process."""

    def __init__(self) -> None:
        self.last_turn = time.monotonic()


class EngineLoop:
    """One engine, which nobody else may touch from now on.

    Args:
        engine: the engine, which whoever has called `run` closes.
        hand_over: gets replies as an `OutputBatcher` lets them go; must not raise.
        before_step: called before each step; for tests, which make it hang or fail there.
        pulse: where it writes at every turn when that was.

    Attributes:
        inbox: where messages are put, by any thread.
    """

    def __init__(
        self,
        engine: Steppable,
        hand_over: Callable[[list[Reply]], None],
        before_step: Callable[[], object] | None = None,
        pulse: HeartbeatClock | None = None,
    ) -> None:
        self.inbox: SimpleQueue[Message] = SimpleQueue()
        self.pulse = pulse or LocalHeartbeatClock()
        self._engine = engine
        self._batcher = OutputBatcher(hand_over)
        self._before_step = before_step
        self._keys: dict[str, int] = {}
        self._ids: dict[int, str] = {}
        self._has_aborted = False
        self._stopped = False

    def run(self) -> None:
        """Work until told to stop. Raises whatever ends the engine."""
        try:
            while not self._stopped:
                self._take_in()
                if not self._stopped and self._engine.has_unfinished_requests():
                    self._step()
                self._send()
        finally:
            self._batcher.send()  # whatever has ended it, its readers hear of that after all that came before

    def _take_in(self) -> None:
        """Do what has been asked for; if there is nothing else to do, prepare for it, then wait for it."""
        self._turn()
        if not self._engine.has_unfinished_requests():
            while self.inbox.empty() and self._engine.executor.prepare_next():
                self._turn()
            message = self.inbox.get()
            self._turn()
            self._do(message)
        while not self._stopped:
            try:
                message = self.inbox.get_nowait()
            except Empty:
                break
            self._do(message)
        self._send()

    def _do(self, message: Message) -> None:
        match message:
            case Add(key, prepared):
                self._answer(key, lambda: self._add(key, prepared))
            case Leave(key):
                self._leave(key)
            case Abort(request_id):
                self._engine.abort_request(request_id)
                self._has_aborted = True
            case Ask(key, method):
                assert method in ASKED
                self._answer(key, lambda: self._batcher.put(key, getattr(self._engine, method)()))
            case Refuse(key, error):
                self._batcher.put(key, error)
            case Stop():
                self._stopped = True

    def _answer(self, key: int, act: Callable[[], None]) -> None:
        """What fails here is one caller's fault, unless it has ended the engine."""
        try:
            act()
        except EngineDeadError:
            raise
        except Exception as error:
            self._batcher.put(key, error)

    def _add(self, key: int, prepared: EngineRequest) -> None:
        if self._has_aborted:
            self._step()  # an id is free again when its last output has been taken
        request_id = self._engine.add(prepared)
        self._keys[request_id], self._ids[key] = key, request_id

    def _leave(self, key: int) -> None:
        request_id = self._ids.pop(key, None)
        if request_id is not None:
            del self._keys[request_id]
            self._engine.abort_request(request_id)
            self._has_aborted = True

    def _step(self) -> None:
        self._turn()
        if self._before_step is not None:
            self._before_step()
        self._has_aborted = False
        for output in self._engine.step(at_once=True):
            key = self._keys.get(output.request_id)
            if key is None:
                continue  # its reader has left
            self._batcher.put(key, output)
            if output.finished:
                del self._keys[output.request_id], self._ids[key]

    def _send(self) -> None:
        self._batcher.send(more_is_soon=self._engine.is_ahead())

    def _turn(self) -> None:
        self.pulse.last_turn = time.monotonic()
