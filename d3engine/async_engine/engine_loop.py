"""The loop that owns an engine: take messages from an inbox, step, and give the replies of
a step to a function; it knows neither event loops nor processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from d3engine.errors import EngineClosedError, EngineDeadError
from d3engine.request.engine_request import EngineRequest
from d3engine.request.outputs import RequestOutput

if TYPE_CHECKING:
    from d3engine.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class Add:
    """Queue a request, whose outputs are for `key`."""

    key: int
    prepared: EngineRequest


@dataclass(frozen=True, slots=True)
class Leave:
    """The reader of `key` has left."""

    key: int


@dataclass(frozen=True, slots=True)
class Abort:
    """End a request by the id that its caller knows it by; its reader hears of it."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Ask:
    """Call a method of the engine, maybe with texts; what it returns is for `key`."""

    key: int
    method: str
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Done:
    """What came for `key` was done by another thread: its reader gets a value, or an error, in its turn."""

    key: int
    reply: Any


@dataclass(frozen=True, slots=True)
class Stop:
    """End the loop."""


ASKED: Final = frozenset({"stats", "reset_prefix_cache"})
"""The methods that may be asked for."""

Message: TypeAlias = Add | Leave | Abort | Ask | Done | Stop


Reply: TypeAlias = "tuple[int, Any]"
"""A key, and for it an output, what a method returned, or the exception that ended it."""

SECONDS_PER_ANSWER: Final = 0.25e-3
"""Several times as long as to wake a reader, to write to his socket and to wake his client takes."""
FRAME_SECONDS: Final = 1 / 60
"""A display shows text no more often."""


class OutputBatcher:
    """The replies of one loop that wait; `hand_over` gets those of one key in order, and must not raise."""

    def __init__(self, hand_over: Callable[[list[Reply]], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._hand_over = hand_over
        self._clock = clock
        self._waiting: dict[int, list[Reply]] = {}
        self._urgent: set[int] = set()
        self._last = clock()

    def put(self, key: int, reply: Any) -> None:
        self._waiting.setdefault(key, []).append((key, reply))
        if not isinstance(reply, RequestOutput) or _begins_or_ends(reply):
            self._urgent.add(key)

    def send(self, *, more_is_soon: bool = False) -> None:
        """Hand over what is due: everything, unless the next step's outputs are to come soon."""
        if not self._waiting:
            return
        now = self._clock()
        if more_is_soon and now - self._last < min(FRAME_SECONDS, SECONDS_PER_ANSWER * len(self._waiting)):
            due = {key: self._waiting.pop(key) for key in self._urgent}
        else:
            due, self._waiting = self._waiting, {}
            self._last = now
        self._urgent.clear()
        if due:
            self._hand_over([reply for replies in due.values() for reply in replies])


def _begins_or_ends(output: RequestOutput) -> bool:
    """Whether this has an end, or what came when the request's first token did."""
    times = output.metrics
    if output.finished or times.last_token_time == times.first_token_time:
        return True
    return any(answer.finish_reason is not None for answer in output.outputs)


class EngineLoop:
    """One engine, which only this loop may touch from now on.

    Args:
        engine: the engine, which the caller of `run` closes.
        hand_over: gets replies as an `OutputBatcher` lets them go; must not raise.
        before_step: called before each step; for tests, which make it hang or fail there.
        beat: gets the time of every turn.

    Attributes:
        inbox: where messages are put, by any thread.
        last_turn: when it last began to wait or to step, in seconds of `time.monotonic()`.
    """

    def __init__(
        self,
        engine: Engine,
        hand_over: Callable[[list[Reply]], None],
        before_step: Callable[[], object] | None = None,
        beat: Callable[[float], object] = lambda seconds: None,
    ) -> None:
        self.inbox: SimpleQueue[Message] = SimpleQueue()
        self._beat = beat
        self.last_turn = time.monotonic()
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

    def run_to_end(self) -> Exception:
        """Work until told to stop, and return why it has ended."""
        try:
            self.run()
        except EngineDeadError as error:
            return error
        except BaseException as fault:
            end = EngineDeadError(f"the engine has ended: {fault!r}")
            end.__cause__ = fault
            return end
        return EngineClosedError("the engine is closed")

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
            case Ask(key, method, arguments):
                assert method in ASKED
                self._answer(key, lambda: self._batcher.put(key, getattr(self._engine, method)(*arguments)))
            case Done(key, reply):
                self._batcher.put(key, reply)
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
        self.last_turn = time.monotonic()
        self._beat(self.last_turn)
