"""The process of an engine: makes it, runs its loop, and ends when its parent does, which
is when its standard input ends."""

from __future__ import annotations

import logging
import os
import select
import shutil
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import zmq

from d3engine.async_engine import engine_loop as messages
from d3engine.async_engine import wire
from d3engine.async_engine.async_engine import LONG_WORK, work_of
from d3engine.async_engine.engine_loop import EngineLoop, Reply
from d3engine.async_engine.engine_process import SharedHeartbeatClock
from d3engine.depth import policy_from_dict
from d3engine.engine import depth as certification
from d3engine.engine.engine import Engine
from d3engine.engine.settings import plain_settings
from d3engine.errors import EngineClosedError
from d3engine.request.admission import IntervalAdmission
from d3engine.request.outputs import RequestOutput
from d3engine.utils.garbage import collect_seldom, freeze_loaded

_LOOK_SECONDS = 1.0
_PATIENCE_SECONDS = 60.0


def main() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # systemd sends it to this one too; the parent ends both in its turn
    collect_seldom()
    logging.getLogger(certification.__name__).setLevel(logging.ERROR)  # the parent logs every policy already
    parent = os.getppid()
    start: wire.Start = wire.decode_message(bytes.fromhex(sys.stdin.readline()))
    threading.Thread(
        target=_end_with, args=(parent, Path(start.pulse).parent), name="d3engine-parent", daemon=True
    ).start()
    torch.set_num_threads(start.threads)
    context = zmq.Context()
    replies = context.socket(zmq.PUSH)
    replies.connect(start.replies)
    try:
        engine = Engine(start.model, **arguments_of(start.arguments))
    except BaseException as error:
        _end(replies, error)
        return
    freeze_loaded()
    _send(replies, [_ready(engine)])
    beat = SharedHeartbeatClock(Path(start.pulse)).beat
    loop = EngineLoop(engine, lambda batch: _send(replies, map(_reply, batch)), beat=beat)
    threading.Thread(target=_receive, args=(context, start.requests, engine, loop), daemon=True).start()
    end = loop.run_to_end()
    if isinstance(end, EngineClosedError):  # after a fault callers hear of it at once, and no file is written
        engine.close()
    _end(replies, end)


def _end(replies: Any, error: BaseException) -> None:
    """Say why, and wait for the parent to have heard it: it closes the standard input then."""
    _send(replies, [wire.End(wire.failure_of(error))])
    sys.stdout.flush()
    sys.stderr.flush()
    threading.Event().wait(_PATIENCE_SECONDS)
    os._exit(1)


def _end_with(parent: int, folder: Path) -> None:
    """End this process when its parent has ended, whatever it is doing; a parent that was killed leaves its folder."""
    while True:
        readable, _, _ = select.select([sys.stdin], [], [], _LOOK_SECONDS)
        if (readable and not os.read(sys.stdin.fileno(), 1)) or os.getppid() != parent:
            shutil.rmtree(folder, ignore_errors=True)
            os._exit(1)


def _send(socket: Any, replies: Any) -> None:
    socket.send(wire.encode(list(replies)))


def _reply(reply: Reply) -> Any:
    key, what = reply
    if isinstance(what, RequestOutput):
        return wire.output_without_prompt(key, what)
    if isinstance(what, BaseException):
        return wire.Refused(key, wire.failure_of(what))
    return wire.Value(key, what)


def _receive(context: Any, address: str, engine: Engine, loop: EngineLoop) -> None:
    """Put what comes into the loop's inbox, requests checked again: this process trusts no message."""
    socket = context.socket(zmq.PULL)
    socket.connect(address)
    inbox = Inbox(engine, loop)
    while True:
        inbox.take(wire.decode_message(socket.recv()))


_OF_ADAPTERS = frozenset({"load_lora_adapter", "unload_lora_adapter"})


class Inbox:
    """Puts requests into a loop's inbox; what takes long to read is read by other threads, and the rest goes on.

    What is said of a request that is still being read comes behind it.
    """

    def __init__(self, engine: Engine, loop: EngineLoop) -> None:
        self._engine = engine
        self._put = loop.inbox.put
        self._readers = {kind: ThreadPoolExecutor(1, f"d3engine-reader-{kind}") for kind in ("long", "form", "adapter")}
        self._unread: dict[int, ThreadPoolExecutor] = {}

    def take(self, message: wire.Message) -> None:
        match message:
            case wire.Add() as add:
                self._add(add)
            case wire.Leave(key):
                self._leave(key)
            case wire.Abort(request_id):
                self._abort(request_id)
            case wire.Ask() as ask if ask.method in _OF_ADAPTERS:
                self._readers["adapter"].submit(self._adapt, ask)  # in the order in which they come
            case wire.Ask(key, method, arguments):
                self._put(messages.Ask(key, method, arguments))
            case wire.Stop():
                self._put(messages.Stop())

    def _add(self, add: wire.Add) -> None:
        kind = self._kind_of(add)
        if kind is None:
            self._put(_prepared(self._engine, add))
            return
        reader = self._unread[add.key] = self._readers[kind]
        reader.submit(self._read, add)

    def _kind_of(self, add: wire.Add) -> str | None:
        """Which threads read a request; None: it is read at once."""
        if add.adapter is not None and not self._engine.adapters.is_loaded(_lora_request(add)):
            return "adapter"
        depth = add.params.get("depth")
        with suppress(Exception):  # what is wrong with a policy, its request says
            if depth is not None and not self._engine.bridges.has_all_of(policy_from_dict(depth)):
                return "adapter"
        if add.params.get("structured_outputs") is not None:
            return "form"
        return "long" if work_of(add.params) >= LONG_WORK else None

    def _adapt(self, ask: wire.Ask) -> None:
        reply = None
        try:
            getattr(self._engine, ask.method)(*ask.arguments)
        except Exception as error:
            reply = error
        self._put(messages.Done(ask.key, reply))

    def _leave(self, key: int) -> None:
        reader = self._unread.get(key)
        if reader is None:
            self._put(messages.Leave(key))
        else:
            reader.submit(self._put, messages.Leave(key))

    def _abort(self, request_id: str) -> None:
        self._put(messages.Abort(request_id))
        if self._unread:
            for reader in self._readers.values():
                reader.submit(self._put, messages.Abort(request_id))

    def _read(self, add: wire.Add) -> None:
        self._put(_prepared(self._engine, add))
        del self._unread[add.key]


def _prepared(engine: Engine, add: wire.Add) -> messages.Message:
    try:
        params = wire.params_of(add.params)
        prepared = engine.prepare(add.token_ids, params, add.request_id, add.priority, lora_request=_lora_request(add))
    except Exception as error:
        return messages.Done(add.key, error)
    return messages.Add(add.key, replace(prepared, prompt=add.prompt, flow=add.flow))


def _lora_request(add: wire.Add) -> dict[str, str] | None:
    return None if add.adapter is None else dict(zip(("lora_name", "lora_path"), add.adapter, strict=True))


def arguments_of(plain: dict[str, Any]) -> dict[str, Any]:
    """The engine's arguments again; see `engine_process.plain_arguments`."""
    arguments = dict(plain)
    if isinstance(arguments.get("depth"), dict):
        arguments["depth"] = policy_from_dict(arguments["depth"])
    if arguments.get("admission") is not None:
        arguments["admission"] = IntervalAdmission(arguments["admission"])
    return arguments


def _ready(engine: Engine) -> wire.Ready:
    """What the other process must know, but for what it reads from the model's files itself."""
    plain = plain_settings(engine.settings)
    return wire.Ready(plain, engine.scheduler.cache.pool.num_blocks)
