"""What callers of an `AsyncEngine` hold: the outputs of a request, for a task or a thread; the engine for threads."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from d3engine.async_engine.dispatcher import Dispatcher, LoopWaker, Notifier, ReplyFuture, Tap, ThreadWaker
from d3engine.engine.new_requests import refuse_others
from d3engine.engine.stats import EngineStats
from d3engine.errors import require
from d3engine.request.engine_request import EngineRequest
from d3engine.request.outputs import RequestOutput
from d3engine.request.params import SamplingParams
from d3engine.text.chat_template import Messages
from d3engine.text.prompts import Prompt


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Whether an engine still works; read without asking it, so a hung engine is seen too.

    Attributes:
        last_turn: when it last began a step or a wait, in seconds of `time.monotonic()`; never before the work came
            that it has now. While `is_working`, its age is how long the running step has taken.
        is_working: whether anybody waits for it.
        error: why it has ended, in words; None while it lives.
        is_sleeping: whether its weights are freed until it is woken.
    """

    last_turn: float
    is_working: bool
    error: str | None
    is_sleeping: bool = False


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
        The rest is for the reader that awaits the next output, and so is the last one, and every output that was there
        before he began to. What `take` raises ends the request, and is raised to him.
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
    """As `AsyncAnswer`, for one thread."""

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


def check_alone(params: object, request_id: object, priority: object, lora_request: object) -> None:
    """Refuse what would stand beside a prepared request, which has all of it."""
    if params is None and request_id is None and priority == 0 and lora_request is None:
        return
    given = ("params", params, None), ("request_id", request_id, None), ("priority", priority, 0)
    for name, value, default in (*given, ("lora_request", lora_request, None)):
        require(value == default, name, value, f"{default} beside a prepared request, which has its own")


class SyncEngine:
    """Made by `AsyncEngine.sync()`. Any number of threads may use it; each reads its prompts itself."""

    def __init__(
        self,
        owner: object,
        dispatcher: Dispatcher,
        prepare: Callable[..., EngineRequest],
        chat_prompt: Callable[..., dict[str, list[int]]],
    ) -> None:
        self._owner = owner  # which ends its engine with the last reference
        self._dispatcher = dispatcher
        self._prepare = prepare
        self.chat_prompt = chat_prompt

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        lora_request: Any = None,
    ) -> EngineRequest:
        """Read and check a request for `generate`, without side effects. Raises `InvalidValueError`."""
        return self._prepare(prompt, params, request_id, priority, lora_request=lora_request)

    def generate(
        self,
        prompt: Prompt | EngineRequest,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        lora_request: Any = None,
        **of_vllm: Any,
    ) -> Answer:
        """The outputs of one request, to be read with `for`; everything else as `AsyncEngine.generate` says."""
        refuse_others(of_vllm, "generate")
        if not isinstance(prompt, EngineRequest):
            given = prompt, params, request_id, priority
            return Answer(self._dispatcher, partial(self._prepare, *given, lora_request=lora_request))
        check_alone(params, request_id, priority, lora_request)
        return Answer(self._dispatcher, lambda: prompt)

    def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        lora_request: Any = None,
        **template_arguments: Any,
    ) -> Answer:
        """The outputs that answer a conversation, as `generate` gives them; further arguments are `Engine.chat`'s."""

        def read() -> EngineRequest:
            prompt = self.chat_prompt(messages, **template_arguments)
            return self._prepare(prompt, params, request_id, priority, lora_request=lora_request)

        return Answer(self._dispatcher, read)

    def abort(self, request_id: str) -> None:
        """End a request: its reader gets a last output with finish_reason "abort". Unknown ids are passed over."""
        self._dispatcher.abort(request_id)

    def stats(self) -> EngineStats:
        """What the engine holds now, and what it has done since it began; asked between two steps."""
        stats: EngineStats = self._dispatcher.ask_blocking("stats")
        return stats
