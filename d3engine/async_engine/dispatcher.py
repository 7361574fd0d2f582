"""Who waits for what: readers on one side, the engine's replies on the other, and the end that all of them hear of.

Nothing here takes a lock that is held while anything is made, and inboxes are `SimpleQueue`s: the garbage collector may
end a forgotten reader at any point, on any thread.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from d3engine.async_engine.batcher import Reply
from d3engine.async_engine.messages import Abort, Add, Ask, Leave, Message
from d3engine.async_engine.slots import Notifier, ReplyFuture
from d3engine.errors import EngineClosedError
from d3engine.request.engine_request import EngineRequest
from d3engine.request.outputs import RequestOutput
from d3engine.request.params import RequestOutputKind


class Dispatcher:
    """Connects the readers of one engine with the loop that owns it, by way of `send`."""

    def __init__(self, send: Callable[[Message], object]) -> None:
        self._send = send
        self._keys = itertools.count(1)
        self._unanswered: dict[int, ReplyFuture] = {}
        self._unread: set[int] = set()
        self._done: list[ReplyFuture] = []
        self._busy_since = time.monotonic()
        self._is_draining = False
        self.end: BaseException | None = None

    # -- the readers' side ----------------------------------------------------------------------------------------

    @property
    def is_working(self) -> bool:
        """Whether the engine has yet to answer anybody."""
        return bool(self._unanswered)

    @property
    def busy_since(self) -> float:
        """When it last got something to do after it had nothing, in seconds of `time.monotonic()`."""
        return self._busy_since

    def begin(self, prepared: EngineRequest, notifier: Notifier) -> ReplyFuture:
        """Queue a request; its outputs come into the slot. Raises what has ended the engine, if something has."""
        if self._is_draining:
            self.check()
            raise EngineClosedError("the engine is being drained: it takes no more requests")
        slot = ReplyFuture(next(self._keys), notifier, merges=prepared.params.output_kind is RequestOutputKind.DELTA)
        self._unread.add(slot.key)
        self._open(slot, Add(slot.key, prepared))
        return slot

    def ask(self, method: str, notifier: Notifier) -> ReplyFuture:
        """Have a method of the engine called; what it returns comes into the slot."""
        slot = ReplyFuture(next(self._keys), notifier)
        self._open(slot, Ask(slot.key, method))
        return slot

    def abort(self, request_id: str) -> None:
        """End a request by its id; its reader gets a last output."""
        self.check()
        self._send(Abort(request_id))

    def _open(self, slot: ReplyFuture, message: Message) -> None:
        if not self._unanswered:
            self._busy_since = time.monotonic()
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
        """Nobody reads this slot any more: the request ends, if it has not."""
        if self._unanswered.pop(key, None) is not None:
            self._send(Leave(key))
        self._unread.discard(key)
        self._tell_drained()

    def tell(self, slot: ReplyFuture, error: BaseException) -> None:
        """Raise an error to the reader of a slot."""
        self._fill([(slot, [error])])

    def drain(self, notifier: Notifier) -> ReplyFuture:
        """Take no more requests; True comes into the slot when nobody reads any."""
        self._is_draining = True
        slot = ReplyFuture(next(self._keys), notifier)
        self._done.append(slot)
        self._tell_drained()
        return slot

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
        """The engine has ended: everybody hears of it, and so will whoever comes later."""
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
