"""The callers' side of an engine in a spawned process: a thread sends, another receives;
the end of the process is the end of a pipe that no other process holds."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
import zmq

from d3engine.async_engine import engine_loop as messages
from d3engine.async_engine import wire
from d3engine.async_engine.dispatcher import Dispatcher
from d3engine.async_engine.engine_loop import Reply
from d3engine.engine.chats import WritesChatPrompts
from d3engine.engine.executors import NOWHERE, adapter_store, bridge_store, new_cache
from d3engine.engine.model_directory import default_sampling_params
from d3engine.engine.new_requests import NewRequests
from d3engine.engine.settings import EngineProperties, settings_of_plain
from d3engine.errors import EngineDeadError, require
from d3engine.request.admission import Immediate, IntervalAdmission
from d3engine.request.engine_request import EngineRequest
from d3engine.request.params import SamplingParams
from d3engine.scheduling.scheduler import Scheduler
from d3engine.text.chat_template import ChatPrompts
from d3engine.text.prompts import Prompt
from d3engine.text.tokenizer import load_tokenizer
from d3engine.utils.children import child_environment, main_command

_FORM = struct.Struct("=d")


class SharedHeartbeatClock:
    """When a loop last began to wait or to step, in seconds of `time.monotonic()`, which all processes share."""

    def __init__(self, path: Path) -> None:
        """Open the pulse at `path`, or begin it there."""
        if not path.exists():
            path.write_bytes(_FORM.pack(time.monotonic()))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _FORM.size)

    @property
    def last_turn(self) -> float:
        seconds: float = _FORM.unpack_from(self._memory)[0]
        return seconds

    def beat(self, seconds: float) -> None:
        _FORM.pack_into(self._memory, 0, seconds)


class ProcessFront(EngineProperties, WritesChatPrompts):
    """Of the engine that `ready` describes, made with `arguments`."""

    def __init__(self, ready: wire.Ready, arguments: Mapping[str, Any]) -> None:
        self.settings = settings_of_plain(ready.settings, arguments.get("admission") or Immediate())
        self.default_sampling_params = default_sampling_params(self.settings.directory)
        tokenizer = Path(arguments.get("tokenizer") or self.settings.directory)
        self.tokenizer = None if arguments.get("skip_tokenizer_init") else load_tokenizer(tokenizer)
        self.bridges = bridge_store(self.settings, device=NOWHERE)
        self.adapters = adapter_store(self.settings, device=NOWHERE)
        self._requests = NewRequests(self.settings, self.tokenizer, self.bridges, self.adapters)
        cache = new_cache(self.settings, self.config, ready.num_blocks)
        self._scheduler = Scheduler(self.settings.scheduler_config, cache)
        self._chat_prompts = ChatPrompts(self.directory, self.tokenizer)

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        *,
        lora_request: Any = None,
    ) -> EngineRequest:
        """As `Engine.prepare`."""
        given = self.default_sampling_params if params is None else params
        prepared = self._requests.prepare(prompt, given, request_id, priority, lora_request)
        self._scheduler.fit(self._requests.probe(prepared))
        wire.plain_params(given)
        return prepared

    def owns(self, prepared: EngineRequest) -> bool:
        """Whether a request was checked against this engine's limits."""
        return prepared.owner is self._requests


_MAIN = "d3engine.async_engine.process_main"
_LOOK_MILLISECONDS = 200
_NOTHING_SENT: tuple[None, list[int]] = (None, [])


class EngineProcess:
    """Starts the process and returns when its engine is ready.

    Args:
        model: as for `Engine`.
        arguments: `Engine`'s, as `plain_arguments` gives them. PyTorch has as many threads there as it has here.

    Raises what making the engine raised there, or `EngineDeadError` if the process ended over it.
    """

    def __init__(self, model: str, arguments: Mapping[str, Any]) -> None:
        self.dispatcher = Dispatcher(self.send)
        self._inbox: SimpleQueue[messages.Message | None] = SimpleQueue()
        self._prompts: dict[int, tuple[str | None, list[int]]] = {}
        self._folder = Path(tempfile.mkdtemp(prefix="d3engine-"))  # for this user alone
        self._pulse = SharedHeartbeatClock(self._folder / "pulse")
        addresses = {name: f"ipc://{self._folder / name}" for name in ("requests", "replies")}
        self._context = zmq.Context()
        self._requests, self._replies = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        self._requests.setsockopt(zmq.SNDHWM, 0)  # what waits is bounded by those who wait for it
        self._requests.bind(addresses["requests"])
        self._replies.bind(addresses["replies"])
        self._life, life = os.pipe()
        try:
            self.process = self._spawn(life)
        except OSError as error:
            self._requests.close(linger=0)
            self._close_sockets()
            raise EngineDeadError(f"the engine's process cannot be started: {error}") from error
        finally:
            os.close(life)
        places = addresses | {"pulse": str(self._folder / "pulse")}
        start = wire.Start(model, dict(arguments), threads=torch.get_num_threads(), **places)
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended already, of which the pipe tells
            self.process.stdin.write(wire.encode(start).hex().encode() + b"\n")
            self.process.stdin.flush()
        self._stopped = threading.Event()
        self.owns: Callable[[EngineRequest], bool] = lambda prepared: True
        try:
            self.ready = self._wait_until_ready()
        except BaseException:
            self._end_process(timeout=0)
            self._requests.close(linger=0)  # a context waits for its sockets when it is collected
            self._close_sockets()
            raise
        threads = {"sender": self._send_all, "receiver": self._receive_all}
        self._threads = [threading.Thread(target=run, name=f"d3engine-{n}", daemon=True) for n, run in threads.items()]
        for thread in self._threads:
            thread.start()

    @property
    def last_turn(self) -> float:
        """When the loop last began to wait or to step, in seconds of `time.monotonic()`."""
        return self._pulse.last_turn

    def send(self, message: messages.Message) -> None:
        self._inbox.put(message)

    def stop(self, timeout: float) -> None:
        """Close the engine after the step that is running; after `timeout` seconds the process is killed."""
        self.send(messages.Stop())
        if not self._stopped.wait(timeout):
            self.dispatcher.end_all(EngineDeadError(f"the engine has not ended within {timeout:g} seconds"))
            self.process.kill()
        if threading.current_thread() not in self._threads:
            for thread in self._threads:
                thread.join()

    # -- the process -----------------------------------------------------------------------------------------------

    def _spawn(self, life: int) -> subprocess.Popen[bytes]:
        # In a session of its own: Ctrl-C in a terminal is for the parent alone, which ends the engine as it sees fit.
        return subprocess.Popen(
            main_command(_MAIN), stdin=subprocess.PIPE, pass_fds=[life], start_new_session=True, env=child_environment()
        )

    def _wait_until_ready(self) -> wire.Ready:
        for reply in self._next_replies():
            if isinstance(reply, wire.Ready):
                return reply
            if isinstance(reply, wire.End):
                raise wire.error_of(reply.failure)
        raise EngineDeadError(f"the engine's process has ended {self._how_it_ended()} before it was ready")

    def _how_it_ended(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self.process.wait(timeout=1)
            return f"by signal {-status}" if status < 0 else f"with status {status}"
        return "or lets go of its pipe"

    def _end_process(self, timeout: float) -> None:
        """Let go of the process, and see to its end."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    # -- what goes to and fro ----------------------------------------------------------------------------------------

    def _send_all(self) -> None:
        """The sender's thread, which alone uses its socket."""
        while (message := self._inbox.get()) is not None:
            try:
                told = wire.encode(self._on_wire(message))
            except Exception as error:  # what cannot be sent
                self.dispatcher.deliver([(message.key, error)] if isinstance(message, messages.Add) else [])
            else:
                self._send_one(told)
        self._requests.close(linger=0)

    def _send_one(self, told: bytes) -> None:
        """Without a process at the other end a send would wait for ever."""
        while not self._stopped.is_set():
            if self._requests.poll(_LOOK_MILLISECONDS, zmq.POLLOUT):
                self._requests.send(told)
                return

    def _on_wire(self, message: messages.Message) -> wire.Message:
        match message:
            case messages.Add(key, request):
                require(self.owns(request), "prepared", request, "prepared by this engine")
                self._prompts[key] = request.prompt, list(request.prompt_token_ids)
                params = wire.plain_params(request.params)
                return wire.Add(
                    key,
                    request.request_id,
                    request.prompt,
                    request.prompt_token_ids,
                    params,
                    request.priority,
                    request.flow,
                    None if request.adapter is None else (request.adapter.name, str(request.adapter.path)),
                )
            case messages.Leave(key):
                self._prompts.pop(key, None)
                return wire.Leave(key)
            case messages.Abort(request_id):
                return wire.Abort(request_id)
            case messages.Ask(key, method, arguments):
                return wire.Ask(key, method, arguments)
            case messages.Stop():
                return wire.Stop()
        raise AssertionError(message)

    def _receive_all(self) -> None:
        """The receiver's thread, until the engine or its process has ended."""
        end: Exception | None = None
        try:
            batch: list[Reply] = []
            for reply in self._next_replies():
                if isinstance(reply, wire.End):
                    end = wire.error_of(reply.failure)
                    break
                if reply is not None:
                    batch.append(self._reply(reply))
                else:
                    self.dispatcher.deliver(batch)
                    batch = []
        except Exception as error:
            end = EngineDeadError(f"what the engine's process says cannot be read: {error!r}")
        self.dispatcher.end_all(end or EngineDeadError(f"the engine's process has ended {self._how_it_ended()}"))
        self._end_process(timeout=5)
        self._close_sockets()
        self._stopped.set()
        self._inbox.put(None)

    def _next_replies(self) -> Iterable[Any]:
        """What comes from the process, and None after each of its messages, until there will be nothing more."""
        poller = zmq.Poller()
        poller.register(self._replies, zmq.POLLIN)
        poller.register(self._life, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._replies not in ready:
                if not self._replies.poll(_LOOK_MILLISECONDS):  # it has ended, and nothing that it said is on its way
                    return
                continue
            yield from wire.decode_replies(self._replies.recv())
            yield None

    def _reply(self, reply: Any) -> Reply:
        match reply:
            case wire.Output(key):
                prompt = self._prompts.get(key, _NOTHING_SENT)
                if reply.finished:
                    self._prompts.pop(key, None)
                return key, wire.output_with_prompt(reply, *prompt)
            case wire.Refused(key, failure):
                self._prompts.pop(key, None)
                return key, wire.error_of(failure)
            case wire.Value(key, value):
                return key, value
        raise AssertionError(reply)

    def _close_sockets(self) -> None:
        self._replies.close(linger=0)
        os.close(self._life)
        shutil.rmtree(self._folder, ignore_errors=True)


def plain_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `Engine` as they go to another process; `process_main.arguments_of` reads them.

    Raises `InvalidValueError` for one that cannot.
    """
    plain = {name: os.fspath(one) if isinstance(one, os.PathLike) else one for name, one in arguments.items()}
    require(plain.pop("weights", None) is None, "weights", "weights", "None where the engine has a process of its own")
    for name in ("device", "dtype", "weight_dtype"):
        if name in plain:
            plain[name] = str(plain[name]).removeprefix("torch.")
    admission = plain.get("admission")
    known = admission is None or type(admission) in (Immediate, IntervalAdmission)
    require(
        known,
        "admission",
        admission,
        "Immediate() or IntervalAdmission(steps) where the engine has a process of its own",
    )
    plain["admission"] = admission.steps if isinstance(admission, IntervalAdmission) else None
    return {name: wire.plain(name, value) for name, value in plain.items()}
