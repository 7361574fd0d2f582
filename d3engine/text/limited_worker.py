"""The child process in which strangers' programs are compiled and run, and the frames it is spoken to in.

The one idea: what a chat template or a grammar may use is limited by the kernel. A timer of processor time ends this
process wherever it is, even inside one call that would take years, and a limit on its address space turns a huge value
into a `MemoryError`. The parent starts another process then. Processor time and not wall clock, so that nothing fails
because a machine is busy.

Imported by the parent too, for the frames, so it imports nothing that takes time: not torch, and jinja2 with the first
request for it only.
"""

from __future__ import annotations

import json
import os
import signal
import struct
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

EXIT_OUT_OF_MEMORY = 70
"""Exit status of a process that ran into its memory limit; nothing of it can be trusted to work on."""
TIME_SIGNAL = getattr(signal, "SIGPROF", 0)  # 0 where no child can be started, but this file imported (Windows)
"""Ends a process that has used up its time."""

_LENGTH = struct.Struct(">Q")
_ANY_SIZE = 1 << 40  # the parent is trusted


def write_frame(descriptor: int, message: dict[str, Any]) -> None:
    """Write a message to a pipe: eight bytes of length, then JSON in ASCII, which carries lone surrogates too."""
    body = json.dumps(message).encode("ascii")
    rest = memoryview(_LENGTH.pack(len(body)) + body)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def read_frame(descriptor: int, max_bytes: int) -> dict[str, Any]:
    """Return the next message. Raises `EOFError` where the pipe ends, or announces more than `max_bytes`."""
    (length,) = _LENGTH.unpack(_read(descriptor, _LENGTH.size))
    if length > max_bytes:
        raise EOFError
    message: dict[str, Any] = json.loads(_read(descriptor, length))
    return message


def _read(descriptor: int, size: int) -> bytes:
    pieces, missing = [], size
    while missing:
        piece = os.read(descriptor, min(missing, 1 << 20))
        if not piece:
            raise EOFError
        pieces.append(piece)
        missing -= len(piece)
    return b"".join(pieces)


def main() -> None:
    """Answer requests from stdin on stdout until stdin ends, as it does when the parent ends."""
    requests, replies = os.dup(0), os.dup(1)
    _prepare_process()
    write_frame(replies, {"ready": True})
    while True:
        try:
            request = read_frame(requests, _ANY_SIZE)
        except EOFError:
            return
        try:
            answer = _job(request["job"])
            _limit_memory(request["memory_bytes"])
            signal.setitimer(signal.ITIMER_PROF, request["seconds"])
            reply = answer(request)
            write_frame(replies, reply)
            signal.setitimer(signal.ITIMER_PROF, 0)
        except MemoryError:
            os._exit(EXIT_OUT_OF_MEMORY)


@cache
def _job(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """The function that answers, by "module:name": the parent's to choose, and imported before anything is limited."""
    module, function = name.split(":")
    found: Callable[[dict[str, Any]], dict[str, Any]] = getattr(import_module(module), function)
    return found


def _prepare_process() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    # A parent may ignore or block signals, and a child inherits that.
    signal.signal(TIME_SIGNAL, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {TIME_SIGNAL})
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):  # nothing but frames goes to the parent
        os.dup2(null, descriptor)


def _limit_memory(more_bytes: int | None) -> None:
    """Allow this process `more_bytes` beyond the address space it has now; None: the parent watches instead."""
    if more_bytes is None:
        return
    import resource

    with open("/proc/self/statm", encoding="ascii") as statm:
        pages = int(statm.read().split()[0])
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    wanted = pages * resource.getpagesize() + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
