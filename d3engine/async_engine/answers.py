"""The outputs of one request as an iterator, for a task that awaits them or a thread that blocks for them.

The one idea: a request lives as long as somebody may still read it. Its end, an error, a cancelled task, `close` and
the garbage collector all lead to the same place, and what has not finished by then is aborted.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Self

from d3engine.async_engine.dispatcher import Dispatcher
from d3engine.async_engine.slots import Notifier, ReplyFuture
from d3engine.async_engine.wakers import LoopWaker, Tap, ThreadWaker
from d3engine.errors import require
from d3engine.request.engine_request import EngineRequest
from d3engine.request.outputs import RequestOutput


class _LeftError(Exception):
    """For the one who reads while another leaves."""


class _Reading:
    """What both kinds have in common: a slot while the request lives."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._slot: ReplyFuture | None = None
        self._next: deque[RequestOutput] = deque()
        self._is_over = False
        self._reading = threading.Lock()

    def _begin_reading(self) -> None:
        """Until `_reading` is released; a context manager of our own would take longer than all else here."""
        if not self._reading.acquire(blocking=False):
            raise RuntimeError("these outputs are being read already: one reader at a time")

    def _begin(self, prepared: EngineRequest, notifier: Notifier) -> ReplyFuture:
        if self._is_over:
            raise _LeftError  # while the prompt was read
        return self._dispatcher.begin(prepared, notifier)

    def _shown(self, output: RequestOutput) -> RequestOutput:
        if output.finished:
            self._leave()
        return output

    def _leave(self) -> None:
        self._is_over = True
        self._next.clear()
        if self._slot is not None:
            self._dispatcher.leave(self._slot.key)

    def _close(self) -> None:
        """Leave, and let go who may be reading."""
        if self._is_over:
            return
        self._leave()
        if self._slot is not None:
            self._dispatcher.tell(self._slot, _LeftError())

    def __del__(self) -> None:
        if not self._is_over:
            self._leave()


class AsyncAnswer(_Reading):
    """The outputs of one request, for one task; begun when the first is asked for.

    Leaving it in any way ends the request within one step of the engine.
    """

    def __init__(
        self, dispatcher: Dispatcher, notifier: Callable[[], LoopWaker], prepare: Callable[[], Awaitable[EngineRequest]]
    ) -> None:
        super().__init__(dispatcher)
        self._find_waker = notifier
        self._prepare = prepare
        self._notifier: LoopWaker | None = None
        self._tap: Tap | None = None

    def tap(self, take: Callable[[Sequence[RequestOutput]], int]) -> None:
        """Show outputs to `take` first, which the event loop calls as soon as they are there.

        It gets those that have come at once, one or more, and says how many of the first it takes: these are done with.
        The rest is for whoever awaits the next output, and so is the last one, and every output that was there before
        he began to. What `take` raises ends the request, and is raised to him.
        """

        def all_but_last(outputs: Sequence[RequestOutput]) -> int:
            shown = outputs[:-1] if outputs[-1].finished else outputs
            return take(shown) if shown else 0

        self._tap = all_but_last

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._is_over:
            raise StopAsyncIteration
        self._begin_reading()
        try:
            if self._slot is None or self._notifier is None:
                prepared = await self._prepare()
                self._notifier = self._find_waker()
                self._slot = self._begin(prepared, self._notifier)
            if not self._next:
                self._next.extend(await self._notifier.take(self._slot, self._tap))
            return self._shown(self._next.popleft())
        except _LeftError:
            raise StopAsyncIteration from None
        except BaseException:
            self._leave()
            raise
        finally:
            self._reading.release()

    async def aclose(self) -> None:
        """End the request, if it has not ended. Idempotent."""
        self._close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._close()


class Answer(_Reading):
    """The outputs of one request, for one thread; begun when the first is asked for.

    Leaving it in any way ends the request within one step of the engine.
    """

    def __init__(self, dispatcher: Dispatcher, prepare: Callable[[], EngineRequest]) -> None:
        super().__init__(dispatcher)
        self._prepare = prepare
        self._notifier = ThreadWaker()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> RequestOutput:
        if self._is_over:
            raise StopIteration
        self._begin_reading()
        try:
            if self._slot is None:
                self._slot = self._begin(self._prepare(), self._notifier)
            if not self._next:
                self._next.extend(self._notifier.take(self._slot))
            return self._shown(self._next.popleft())
        except _LeftError:
            raise StopIteration from None
        except BaseException:
            self._leave()
            raise
        finally:
            self._reading.release()

    def close(self) -> None:
        """End the request, if it has not ended. Idempotent."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._close()


def check_alone(params: object, request_id: object, priority: object) -> None:
    """Refuse what would stand beside a prepared request, which has all of it."""
    if params is None and request_id is None and priority == 0:
        return
    for name, value, default in (("params", params, None), ("request_id", request_id, None), ("priority", priority, 0)):
        require(value == default, name, value, f"{default} beside a prepared request, which has its own")
