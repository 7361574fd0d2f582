"""AsyncEngine: many callers at once over one engine on a thread; a small pool reads long
prompts, and a step's outputs reach an event loop in one call."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeVar

import torch

from d3engine.async_engine.client import AsyncAnswer, Heartbeat, SyncEngine, check_alone
from d3engine.async_engine.dispatcher import LoopWaker
from d3engine.async_engine.engine_thread import EngineThread
from d3engine.engine.engine import Engine
from d3engine.engine.engine_config import RENAMED, EngineConfig
from d3engine.engine.new_requests import refuse_others
from d3engine.engine.settings import EngineProperties
from d3engine.engine.stats import EngineStats
from d3engine.errors import (
    EngineClosedError,
    EngineDeadError,
    FailedError,
    InvalidValueError,
    MissingExtraError,
    require,
    require_number,
)
from d3engine.request.engine_request import EngineRequest
from d3engine.request.params import SamplingParams
from d3engine.text.chat_template import Messages
from d3engine.text.prompts import Prompt
from d3engine.utils.arguments import KW_ONLY, OneOf, accepts, argument
from d3engine.utils.garbage import collect_now

if TYPE_CHECKING:
    from d3engine.async_engine.engine_process import EngineProcess, ProcessFront

STOP_SECONDS = 30.0
"""How long `close` waits for the step that is running."""

SHORT_PROMPT = 1024
"""Characters or token ids: a tokenizer takes a quarter of a millisecond for this number, and to ask a thread a tenth of
one."""

LONG_WORK = 32 * 1024
"""Characters and list entries of a request from which on threads of their own read it, so that short ones need not wait
for it."""

_READERS = 2  # threads of a kind that read prompts: enough to keep a step fed, few enough to leave it the interpreter

T = TypeVar("T")

Front: TypeAlias = "Engine | ProcessFront"
"""What is known of an engine, and what reads requests for it: the engine itself, where it is in this process."""

Transport: TypeAlias = "EngineThread | EngineProcess"
"""Where an engine's loop runs, and how to reach it."""


@dataclass(frozen=True)
class AsyncEngineConfig(EngineConfig):
    """The arguments of `AsyncEngine`: those of `EngineConfig`, and where the engine runs.

    Args:
        transport: "thread" runs the engine on a thread of this process, "process" in a process of its own, which leaves
            this one its whole interpreter and needs the extra `serve`. "auto": a process where the engine computes on a
            GPU and the extra is installed, and a thread otherwise.

    Raises:
        InvalidValueError: for a value out of bounds.
    """

    _: KW_ONLY
    transport: str = argument("auto", OneOf("auto", "thread", "process"))


class AsyncEngine(EngineProperties):
    """An engine for many callers at once, from any event loop and any thread.

    It installs no signal handlers. Its thread ends with `close`, with `async with`, or with the last reference to it.

    Args:
        config: the fields of `AsyncEngineConfig` as arguments: `AsyncEngine(model, max_num_seqs=8)`.

    Raises:
        InvalidValueError, ModelFormatError, MissingExtraError, FailedError: as `Engine` does.
    """

    _restart: Callable[[], tuple[Front, Transport]] | None = None  # none where a caller holds the weights

    @accepts(AsyncEngineConfig, RENAMED)
    def __init__(self, config: AsyncEngineConfig) -> None:
        if config.weights is None:
            self._restart = partial(_started, config)
        self._begin(*_started(config))

    @classmethod
    def from_engine(cls, engine: Engine, *, before_step: Callable[[], object] | None = None) -> Self:
        """Take over an engine, which only this object may use from now on and closes.

        `before_step` is called before each step, on the engine's thread: for tests, which make it hang or fail there.
        """
        self = cls.__new__(cls)
        self._begin(engine, EngineThread(engine, before_step))
        return self

    def _begin(self, front: Front, transport: Transport) -> None:
        self._pools = {
            kind: ThreadPoolExecutor(_READERS, f"d3engine-reader-{kind}")
            for kind in ("short", "long", "form", "adapter")
        }
        self._wakers: weakref.WeakValueDictionary[int, LoopWaker] = weakref.WeakValueDictionary()
        self._last_stats: EngineStats | None = None  # while it sleeps
        self._changing = threading.Lock()  # held while it falls asleep or wakes
        self._attach(front, transport)

    def _attach(self, front: Front, transport: Transport) -> None:
        self.settings = front.settings
        self.tokenizer = front.tokenizer
        self.default_sampling_params = front.default_sampling_params
        self._front = front
        self._transport = transport
        self._dispatcher = transport.dispatcher
        self._end = weakref.finalize(self, _end, transport, list(self._pools.values()), STOP_SECONDS)

    # -- requests ------------------------------------------------------------------------------------------------

    async def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        lora_request: Any = None,
    ) -> EngineRequest:
        """Read and check a request for `generate`, without side effects. Raises `InvalidValueError`.

        A short one is read here and now: to have a thread do it takes longer.
        """
        is_known = params is None or isinstance(params, SamplingParams)
        require(is_known, "sampling_params", params, "SamplingParams, or None")
        read = partial(self._front.prepare, prompt, params, request_id, priority, lora_request=lora_request)
        waits = lora_request is not None and not self._front.adapters.is_loaded(lora_request)
        if waits or not self._front.bridges.has_all_of(None if params is None else params.depth):
            return await self._in_pool("adapter", read)
        if lora_request is None and _is_short(prompt) and (params is None or _is_plain(params)):
            return self._read(read)
        return await self._in_pool(_kind_of(prompt, params), read)

    def generate(
        self,
        prompt: Prompt | EngineRequest,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        lora_request: Any = None,
        **of_vllm: Any,
    ) -> AsyncAnswer:
        """The outputs of one request, to be read with `async for`; nothing happens before.

        What they hold says `params.output_kind`; deltas that wait for a slow reader are merged into one. The end of the
        loop, a cancelled task, `aclose()` or forgetting the iterator ends the request within one step. The arguments
        are those of `Engine.prepare`, or what `prepare` returned, alone.

        The iterator raises `InvalidValueError` for what can never run, `EngineDeadError` as soon as the engine has
        ended by a fault, and `EngineClosedError`.
        """
        refuse_others(of_vllm, "generate")
        if not isinstance(prompt, EngineRequest):
            given = {"request_id": request_id, "priority": priority, "lora_request": lora_request}
            read = partial(self.prepare, prompt, params, **given)
            return AsyncAnswer(self._dispatcher, self._notifier, read)
        check_alone(params, request_id, priority, lora_request)

        async def as_it_is() -> EngineRequest:
            return prompt

        return AsyncAnswer(self._dispatcher, self._notifier, as_it_is)

    def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        lora_request: Any = None,
        **template_arguments: Any,
    ) -> AsyncAnswer:
        """The outputs that answer a conversation, as `generate` gives them; further arguments are `Engine.chat`'s."""

        async def read() -> EngineRequest:
            prompt = await self.chat_prompt(messages, **template_arguments)
            given = {"request_id": request_id, "priority": priority, "lora_request": lora_request}
            return await self.prepare(prompt, params, **given)

        return AsyncAnswer(self._dispatcher, self._notifier, read)

    async def chat_prompt(self, messages: Messages, **template_arguments: Any) -> dict[str, list[int]]:
        """The prompt of a conversation as token ids, for `generate`; the arguments are those of `Engine.chat`."""
        kind = "long" if work_of((messages, template_arguments)) >= LONG_WORK else "short"
        return await self._in_pool(kind, self._front.chat_prompt, messages, **template_arguments)

    async def chat_template(self) -> str | None:
        """The text of the model's own chat template, None without one; its files are read once."""
        return await self._in_pool("short", self._front.chat_template)

    async def abort(self, request_id: str) -> None:
        """End a request: its reader gets a last output with finish_reason "abort". Unknown ids are passed over."""
        self._dispatcher.abort(request_id)

    def sync(self) -> SyncEngine:
        """The same engine for threads, which block for what they want."""
        front, read = self._front, self._read
        return SyncEngine(self, self._dispatcher, partial(read, front.prepare), partial(read, front.chat_prompt))

    # -- the engine itself -----------------------------------------------------------------------------------------

    @property
    def has_process(self) -> bool:
        return not isinstance(self._transport, EngineThread)

    async def stats(self) -> EngineStats:
        """What the engine holds now, and what it has done since it began; asked between two steps.

        While it sleeps, what it held before. After `wake_up` it begins at 0 again.
        """
        return self._last_stats or await self._ask("stats")

    async def is_sleeping(self) -> bool:
        return self._last_stats is not None

    async def sleep(self, level: int = 1) -> None:
        """Free weights and KV cache after the requests in progress; `wake_up` loads the weights again.

        Settings, tokenizer, chat template and adapters stay, and the prefix cache file is written. Requests that begin
        before `wake_up` raise `EngineClosedError`, as a `sync()` from before does ever after. Idempotent; a call that
        is cancelled while it waits leaves the engine awake.

        Raises `InvalidValueError` for another level than vLLM's 1, and `FailedError` where the weights are no files.
        """
        require(level == 1, "level", level, "1: weights and KV cache are freed")
        if self._restart is None:
            raise FailedError("the engine cannot sleep: its weights are no files that could be loaded again")
        if self._last_stats is None:
            transport, dispatcher = self._transport, self._dispatcher
            try:
                await self.drain()
                last = await self.stats()
                await asyncio.get_running_loop().run_in_executor(None, self._fall_asleep, transport, last)
            except BaseException:  # a caller's time limit, perhaps
                if self._last_stats is None:
                    dispatcher.undo_drain()
                raise

    async def wake_up(self) -> None:
        """Load weights again, and adapters as they were before `sleep`. Idempotent; a call that is cancelled goes on.

        Raises as `Engine` does. Where an adapter is no longer there, the engine is awake without it.
        """
        await asyncio.get_running_loop().run_in_executor(None, self._wake_up)

    async def reset_prefix_cache(self) -> None:
        """Forget all shared prompt blocks; running requests keep theirs."""
        await self._ask("reset_prefix_cache")

    @property
    def lora_adapters(self) -> dict[str, str]:
        """Name -> path of the adapters that were loaded by name."""
        return self._front.adapters.paths

    async def load_lora_adapter(self, name: str, path: str | os.PathLike[str]) -> None:
        """Load the adapter of a directory that PEFT has written; requests may name it from then on.

        Raises `InvalidValueError` for a name that is taken, and for what is no LoRA adapter of this model.
        """
        await self._in_pool("adapter", self._front.adapters.load, name, path)
        if self.has_process:
            try:
                await self._ask("load_lora_adapter", name, os.fspath(path))
            except Exception:  # a caller who was cancelled has asked already
                self._front.adapters.unload(name)
                raise

    async def unload_lora_adapter(self, name: str) -> None:
        """Let no further request name an adapter; those that have begun keep it."""
        self._dispatcher.check()
        self._front.adapters.unload(name)
        if self.has_process:
            with suppress(InvalidValueError):  # it may have had no request of it yet
                await self._ask("unload_lora_adapter", name)

    def heartbeat(self) -> Heartbeat:
        """Whether the engine still works, without asking it."""
        dispatcher, is_asleep = self._dispatcher, self._last_stats is not None
        last_turn = max(self._transport.last_turn, dispatcher.busy_since)
        error = None if dispatcher.end is None or is_asleep else str(dispatcher.end)
        return Heartbeat(last_turn, dispatcher.is_working, error, is_asleep)

    async def drain(self, timeout: float | None = None) -> bool:
        """Take no more requests, and wait until all have been read to their end or left.

        Returns whether that was so within `timeout` seconds; those that go on then go on, until `close`. Raises
        `InvalidValueError` for a timeout that is no finite number of at least 0.
        """
        if timeout is not None:
            require_number("timeout", timeout, 0, threading.TIMEOUT_MAX)
        notifier = self._notifier()
        slot = self._dispatcher.drain(notifier)
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                return bool(await notifier.take(slot))  # True, when no reader is left
        return False

    async def close(self) -> None:
        """End the engine after the step that is running; waiting callers get `EngineClosedError`. Idempotent."""
        await asyncio.get_running_loop().run_in_executor(None, self._end)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _notifier(self) -> LoopWaker:
        """The one of the running event loop, which lives as long as anybody waits there."""
        loop = asyncio.get_running_loop()
        notifier = self._wakers.get(id(loop))
        if notifier is None:
            self._wakers[id(loop)] = notifier = LoopWaker(loop)
        return notifier

    async def _ask(self, method: str, *arguments: str) -> Any:
        notifier = self._notifier()
        slot = self._dispatcher.ask(method, notifier, *arguments)
        try:
            return (await notifier.take(slot))[0]
        finally:
            self._dispatcher.leave(slot.key)

    def _fall_asleep(self, transport: Transport, last: EngineStats) -> None:
        with self._changing:
            if self._last_stats is not None or transport is not self._transport:
                return  # another call was first
            self._last_stats = last
            transport.stop(STOP_SECONDS)
            if isinstance(self._dispatcher.end, EngineDeadError):
                self._last_stats = None
                raise self._dispatcher.end
            self._dispatcher.end = EngineClosedError("the engine sleeps: wake_up loads its weights again")
        collect_now()
        torch.cuda.empty_cache()  # what an engine on a thread has had of a GPU

    def _wake_up(self) -> None:
        """Start the engine again, if it sleeps."""
        with self._changing:
            if self._last_stats is None or self._restart is None:
                return
            if not self._end.alive:
                raise EngineClosedError("the engine is closed")
            before, started = self.lora_adapters, self._restart()
            self._end.detach()
            self._attach(*started)
            try:
                self._restore_adapters(before)
            finally:
                self._last_stats = None

    def _restore_adapters(self, wanted: Mapping[str, str]) -> None:
        """Unload and load adapters until they are these. Raises the first fault when all have had their turn."""
        adapters, faults = self._front.adapters, list[InvalidValueError]()
        for name in [name for name, path in adapters.paths.items() if wanted.get(name) != path]:
            adapters.unload(name)
            if self.has_process:
                self._dispatcher.ask_blocking("unload_lora_adapter", name)
        for name in [name for name in wanted if name not in adapters.paths]:
            try:
                adapters.load(name, wanted[name])
                if self.has_process:
                    self._dispatcher.ask_blocking("load_lora_adapter", name, wanted[name])
            except InvalidValueError as error:
                faults.append(error)
        if faults:
            raise faults[0]

    def _check(self) -> None:
        """Raise what has ended the engine; one that sleeps still reads texts and templates."""
        if self._last_stats is None:
            self._dispatcher.check()

    async def _in_pool(self, kind: str, function: Callable[..., T], *arguments: Any, **named: Any) -> T:
        self._check()
        read = partial(self._read, function, *arguments, **named)
        return await asyncio.get_running_loop().run_in_executor(self._pools[kind], read)

    def _read(self, function: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """What the engine reads of a request; why it has ended, if it has."""
        self._check()
        try:
            return function(*arguments, **named)
        except EngineClosedError:  # which it also is after a fault
            self._dispatcher.check()
            raise


def _is_short(prompt: Prompt) -> bool:
    """Whether a prompt is a text or a list of token ids, alone or in a mapping, that is quickly read."""
    given = next(iter(prompt.values()), None) if isinstance(prompt, Mapping) and len(prompt) == 1 else prompt
    return isinstance(given, (str, list)) and len(given) <= SHORT_PROMPT


def _is_plain(params: SamplingParams) -> bool:
    """Whether there is nothing in them that may be long: no form to compile, no words to spell, no lists of ids."""
    given = (params.structured_outputs, params.bad_words, params.allowed_token_ids, params.logit_bias)
    return all(value is None for value in given)


def _kind_of(prompt: Prompt, params: SamplingParams | None) -> str:
    """Which threads read a request: a form may take as long to compile as its limits let it."""
    if params is not None and params.structured_outputs is not None:
        return "form"
    listed = () if params is None else (params.bad_words, params.allowed_token_ids, params.logit_bias)
    return "long" if work_of((prompt, listed)) >= LONG_WORK else "short"


def work_of(value: object) -> int:
    """Characters and entries in a value of strings, lists and mappings, counted as far as `LONG_WORK`."""
    waiting, found = [value], 0
    while waiting and found < LONG_WORK:
        one = waiting.pop()
        if isinstance(one, str):
            found += len(one)
        elif isinstance(one, Mapping):
            waiting += list(one.values())
            found += len(one)
        elif isinstance(one, (list, tuple)):
            found += len(one)
            if found < LONG_WORK and not (one and isinstance(one[0], int)):
                waiting += one
    return found


def _suits_process(config: EngineConfig) -> bool:
    device = str(config.device)
    on_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    has_extra = all(find_spec(package) is not None for package in ("zmq", "msgspec"))
    return on_gpu and has_extra and config.weights is None and sys.platform != "win32"


def _started(config: AsyncEngineConfig) -> tuple[Front, Transport]:
    """An engine on a thread or in a process, and how to reach it. Raises as `Engine` does."""
    transport = config.transport
    if transport == "auto":
        transport = "process" if _suits_process(config) else "thread"
    if transport == "process":
        return start_process(config.model, config.given())
    engine = Engine(config.model, **config.given())
    return engine, EngineThread(engine)


def start_process(model: str | os.PathLike[str], arguments: Mapping[str, Any]) -> tuple[Front, Transport]:
    """An engine in a process of its own, and what it leaves to this one. Raises as `Engine` does."""
    # Its pipes and sockets are those of POSIX, and `poll` waits for both.
    require(sys.platform != "win32", "transport", "process", "auto or thread on Windows")
    try:
        from d3engine.async_engine.engine_process import EngineProcess, ProcessFront, plain_arguments
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "pyzmq", "serve", "an engine in a process of its own") from None
    process = EngineProcess(os.fspath(model), plain_arguments(arguments))
    try:
        front = ProcessFront(process.ready, arguments)
    except BaseException:
        process.stop(timeout=0)
        raise
    process.owns = front.owns
    return front, process


def _end(transport: Transport, pools: Iterable[ThreadPoolExecutor], timeout: float) -> None:
    """Holds nothing of the AsyncEngine's, so that it can be forgotten."""
    transport.stop(timeout)
    for pool in pools:
        pool.shutdown(wait=False)
