"""Readers on one side, the engine's replies on the other. No lock is held while anything
is made, and inboxes are `SimpleQueue`s: the garbage collector may end a forgotten reader at any point."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from d3engine.async_engine.engine_loop import Abort, Add, Ask, Leave, Message, Reply
from d3engine.errors import EngineClosedError
from d3engine.request.engine_request import EngineRequest
from d3engine.request.outputs import CompletionOutput, RequestOutput
from d3engine.request.params import RequestOutputKind


@dataclass(slots=True)
class _Part:
    """Deltas of one sequence; `last` has what they do not add up to."""

    last: CompletionOutput
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Any]] = field(default_factory=list)

    def add(self, delta: CompletionOutput) -> None:
        self.last = delta
        self.texts.append(delta.text)
        self.token_ids += delta.token_ids
        self.depths += delta.depths
        self.logprobs += delta.logprobs or ()

    def whole(self) -> CompletionOutput:
        last = self.last  # named in full, since `dataclasses.replace` takes several times as long
        return CompletionOutput(
            index=last.index,
            text="".join(self.texts),
            token_ids=self.token_ids,
            cumulative_logprob=last.cumulative_logprob,
            logprobs=None if last.logprobs is None else self.logprobs,
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            depths=self.depths,
            hidden_states=last.hidden_states,
        )


class MergedDeltas:
    """Deltas of one request, joined at a cost that grows with what they hold and not with how many there are."""

    def __init__(self, first: RequestOutput) -> None:
        self._last = first
        self._parts: dict[int, _Part] = {}
        self._prompt_logprobs: list[Any] = []
        self.add(first)

    def add(self, delta: RequestOutput) -> None:
        self._last = delta
        self._prompt_logprobs += delta.prompt_logprobs or ()
        for output in delta.outputs:
            if output.index not in self._parts:
                self._parts[output.index] = _Part(output)
            self._parts[output.index].add(output)

    def whole(self) -> RequestOutput:
        last = self._last
        return RequestOutput(
            request_id=last.request_id,
            prompt=last.prompt,
            prompt_token_ids=last.prompt_token_ids,
            prompt_logprobs=None if last.prompt_logprobs is None else self._prompt_logprobs,
            outputs=[self._parts[index].whole() for index in sorted(self._parts)],
            finished=last.finished,
            metrics=last.metrics,
            num_cached_tokens=last.num_cached_tokens,
            embedding=last.embedding,
        )


class Notifier(Protocol):
    """Tells the readers of slots that there is something to take."""

    @property
    def is_gone(self) -> bool:
        """Whether they can never be woken again."""

    def wake(self, slots: Iterable[ReplyFuture]) -> None:
        """Wake them, from any thread. Raises `RuntimeError` if they are gone."""


class ReplyFuture:
    """For one reader: the outputs of a request, or what a method returned.

    Args:
        key: the number of the request.
        waker: of its reader.
        merges: whether what comes are deltas, so that none may be left out; otherwise the latest counts.

    Attributes:
        error: the exception that waits, behind replies or alone.
    """

    def __init__(self, key: int, notifier: Notifier, *, merges: bool = False) -> None:
        self.key = key
        self.notifier = notifier
        self._merges = merges
        self._lock = threading.Lock()
        self._waiting: list[Any] = []
        self.error: BaseException | None = None

    def put(self, replies: list[Any]) -> bool:
        """Fill it with what has come at once, a list that is its own from now on; returns whether its reader must be
        woken.

        Deltas that come at once are his one by one; those that he has left until more comes are joined with it. An
        exception, which is the last of all, is raised to him after what waits.
        """
        with self._lock:
            if self.error is not None:
                return False
            must_wake = not self._waiting
            if isinstance(replies[-1], BaseException):
                self.error = replies.pop()
            if replies:
                if not self._merges:
                    self._waiting = replies[-1:]
                elif must_wake:
                    self._waiting = replies
                else:
                    self._join(replies)
            return must_wake

    def _join(self, deltas: Iterable[RequestOutput]) -> None:
        first, *others = self._waiting
        joined = first if isinstance(first, MergedDeltas) else MergedDeltas(first)
        for delta in (*others, *deltas):
            joined.add(delta)
        self._waiting = [joined]

    def take(self) -> list[Any]:
        """All that waited, in order. Raises the exception that came after it, once nothing else waits."""
        with self._lock:
            if not self._waiting and self.error is not None:
                raise self.error
            replies, self._waiting = self._waiting, []
        if len(replies) == 1 and isinstance(replies[0], MergedDeltas):
            return [replies[0].whole()]
        return replies


Tap: TypeAlias = "Callable[[Sequence[Any]], int]"
"""Takes the first of what came at once for a reader that waits, and says how many; for the rest it is woken."""


class LoopWaker:
    """Of all readers on one event loop. However far the loop is behind, one call at most waits in it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._filled: list[ReplyFuture] = []
        self._is_called = False
        self._readers: dict[int, tuple[asyncio.Future[list[Any]], Tap | None]] = {}

    @property
    def is_gone(self) -> bool:
        return self._loop.is_closed()

    def wake(self, slots: Iterable[ReplyFuture]) -> None:
        with self._lock:
            if not self._is_called:
                self._loop.call_soon_threadsafe(self._wake_readers)
                self._is_called = True
            self._filled += slots

    def _wake_readers(self) -> None:
        with self._lock:
            filled, self._filled = self._filled, []
            self._is_called = False
        for slot in filled:
            reader, tap = self._readers.get(slot.key, _NOBODY)
            if reader is None or reader.done():
                continue
            if tap is None:
                reader.set_result([])  # to look into his slot himself
            else:
                self._pour(slot, reader, tap)

    @staticmethod
    def _pour(slot: ReplyFuture, reader: asyncio.Future[list[Any]], tap: Tap) -> None:
        """Hand what waits to the tap, and what it leaves to the reader, who hears of errors, the tap's among them."""
        try:
            replies = slot.take()
            if replies and (taken := tap(replies)):
                replies = replies[taken:]
            if not replies and slot.error is not None:
                replies = slot.take()  # what came meanwhile, or else the error
            if replies:
                reader.set_result(replies)
        except Exception as error:
            reader.set_exception(error)

    async def take(self, slot: ReplyFuture, tap: Tap | None = None) -> list[Any]:
        """What waits in a slot, or what comes next and `tap` does not take. Raises what ended it."""
        while True:
            replies = slot.take()
            if replies:
                return replies
            assert slot.key not in self._readers, "a slot has one reader"
            reader: asyncio.Future[list[Any]] = self._loop.create_future()
            self._readers[slot.key] = reader, tap
            try:
                replies = await reader
            finally:
                del self._readers[slot.key]
            if replies:
                return replies


_NOBODY = None, None


class ThreadWaker:
    """Of one reader, who blocks his thread."""

    is_gone = False

    def __init__(self) -> None:
        self._event = threading.Event()

    def wake(self, slots: Iterable[ReplyFuture]) -> None:
        self._event.set()

    def take(self, slot: ReplyFuture) -> list[Any]:
        """What waits in a slot, or what comes next. Raises what ended it."""
        while True:
            self._event.clear()
            replies = slot.take()
            if replies:
                return replies
            self._event.wait()


class Dispatcher:
    """Connects the readers of one engine with the loop that owns it, by way of `send`."""

    def __init__(self, send: Callable[[Message], object]) -> None:
        self._send = send
        self._keys = itertools.count(1)
        self._unanswered: dict[int, ReplyFuture] = {}
        self._unread: set[int] = set()
        self._done: list[ReplyFuture] = []
        self.busy_since = time.monotonic()  # when it last got something to do after it had nothing
        self._num_drains = 0
        self.end: BaseException | None = None

    # -- the readers' side ----------------------------------------------------------------------------------------

    @property
    def is_working(self) -> bool:
        """Whether the engine has yet to answer anybody."""
        return bool(self._unanswered)

    def begin(self, prepared: EngineRequest, notifier: Notifier) -> ReplyFuture:
        """Queue a request; its outputs come into the slot. Raises what has ended the engine, if something has."""
        if self._num_drains:
            self.check()
            raise EngineClosedError("the engine is being drained: it takes no more requests")
        slot = ReplyFuture(next(self._keys), notifier, merges=prepared.params.output_kind is RequestOutputKind.DELTA)
        self._unread.add(slot.key)
        self._open(slot, Add(slot.key, prepared))
        return slot

    def ask(self, method: str, notifier: Notifier, *arguments: str) -> ReplyFuture:
        """Have a method of the engine called; what it returns comes into the slot."""
        slot = ReplyFuture(next(self._keys), notifier)
        self._open(slot, Ask(slot.key, method, arguments))
        return slot

    def ask_blocking(self, method: str, *arguments: str) -> Any:
        """The same, and block the thread for what it returns."""
        notifier = ThreadWaker()
        slot = self.ask(method, notifier, *arguments)
        try:
            return notifier.take(slot)[0]
        finally:
            self.leave(slot.key)

    def abort(self, request_id: str) -> None:
        self.check()
        self._send(Abort(request_id))

    def _open(self, slot: ReplyFuture, message: Message) -> None:
        if not self._unanswered:
            self.busy_since = time.monotonic()
        self._unanswered[slot.key] = slot
        try:
            self.check()  # after it can be found: whatever ends the engine from now on finds it
        except BaseException:
            self.leave(slot.key)
            raise
        self._send(message)

    def check(self) -> None:
        """Raise what has ended the engine, if something has."""
        if self.end is not None:
            raise _own(self.end)

    def leave(self, key: int) -> None:
        """The reader of this slot has left: its request ends, if it has not."""
        if self._unanswered.pop(key, None) is not None:
            self._send(Leave(key))
        self._unread.discard(key)
        self._tell_drained()

    def tell(self, slot: ReplyFuture, error: BaseException) -> None:
        self._fill([(slot, [error])])

    def drain(self, notifier: Notifier) -> ReplyFuture:
        """Take no more requests; the slot gets True when no reader is left."""
        self._num_drains += 1
        slot = ReplyFuture(next(self._keys), notifier)
        self._done.append(slot)
        self._tell_drained()
        return slot

    def undo_drain(self) -> None:
        """Take requests again, unless another `drain` forbids it."""
        self._num_drains -= 1

    def _tell_drained(self) -> None:
        if self._unread or not self._done:
            return
        with suppress(IndexError):  # several threads may find the last reader gone
            while not self._unread:
                self._fill([(self._done.pop(), [True])])

    # -- the engine's side ----------------------------------------------------------------------------------------

    def deliver(self, replies: Iterable[Reply]) -> None:
        """Hand over what the engine has for its readers. Never raises."""
        together: dict[int, list[Any]] = {}
        for key, reply in replies:
            together.setdefault(key, []).append(reply)
        filled = []
        for key, of_one in together.items():
            last = of_one[-1]
            is_last = not isinstance(last, RequestOutput) or last.finished
            slot = self._unanswered.pop(key, None) if is_last else self._unanswered.get(key)
            if slot is not None:
                filled.append((slot, of_one))
        self._fill(filled)

    def end_all(self, error: BaseException) -> None:
        """The engine has ended: all readers are woken with its error, later ones too."""
        if self.end is None:
            self.end = error
        while self._unanswered:
            _, slot = self._unanswered.popitem()
            self._fill([(slot, [_own(self.end)])])

    def _fill(self, replies: Iterable[tuple[ReplyFuture, list[Any]]]) -> None:
        """Fill slots, each with what has come for it at once, and wake their readers: those who wait in one place
        together."""
        to_wake: dict[Notifier, list[ReplyFuture]] = {}
        for slot, of_one in replies:
            if slot.put(of_one):
                to_wake.setdefault(slot.notifier, []).append(slot)
            elif slot.notifier.is_gone:
                self.leave(slot.key)
        for notifier, slots in to_wake.items():
            try:
                notifier.wake(slots)
            except RuntimeError:  # their event loop is closed
                for slot in slots:
                    self.leave(slot.key)


def _own(error: BaseException) -> BaseException:
    """A copy for one caller: a traceback is written into each that is raised."""
    copy = type(error)(*error.args)
    copy.__cause__ = error.__cause__
    return copy
