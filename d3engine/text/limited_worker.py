"""The child process that runs untrusted programs, and the frames of its pipes."""

# The parent imports this module too, so it imports nothing slow: no torch, and jinja2 only with a request for it.
from __future__ import annotations

import json
import os
import signal
import struct
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

EXIT_OUT_OF_MEMORY = 70
"""Exit status of a process that ran into its memory limit; it must not go on."""
# The kernel enforces the limits: a timer of processor time ends the process even inside an endless call, and a limit of
# the address space turns a huge value into a `MemoryError`. Processor time, so that nothing fails on a busy machine.
TIME_SIGNAL = getattr(signal, "SIGPROF", 0)
"""The signal that ends a process at its time limit; 0 on Windows, where the parent ends it."""

_LENGTH = struct.Struct(">Q")
_ANY_SIZE = 1 << 40  # the parent is trusted


def write_frame(descriptor: int, message: dict[str, Any]) -> None:
    """Write a message to a pipe: eight bytes of length, then JSON in ASCII, which carries lone surrogates too."""
    body = json.dumps(message).encode("ascii")
    rest = memoryview(_LENGTH.pack(len(body)) + body)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def read_frame(descriptor: int, max_bytes: int) -> dict[str, Any]:
    """Return the next message. Raises `EOFError` where the pipe ends or a message is longer than `max_bytes`."""
    (length,) = _LENGTH.unpack(_read(descriptor, _LENGTH.size))
    if length > max_bytes:
        raise EOFError
    message: dict[str, Any] = json.loads(_read(descriptor, length))
    return message


def _read(descriptor: int, size: int) -> bytes:
    chunks, missing = [], size
    while missing:
        chunk = os.read(descriptor, min(missing, 1 << 20))
        if not chunk:
            raise EOFError
        chunks.append(chunk)
        missing -= len(chunk)
    return b"".join(chunks)


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
            _limit_time(request["seconds"])
            reply = answer(request)
            write_frame(replies, reply)
            _limit_time(0)
        except MemoryError:
            os._exit(EXIT_OUT_OF_MEMORY)


@cache
def _job(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """The function of a job, "module:name", chosen by the parent and imported before limits are set."""
    module, function = name.split(":")
    found: Callable[[dict[str, Any]], dict[str, Any]] = getattr(import_module(module), function)
    return found


def _prepare_process() -> None:
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        # A child inherits ignored and blocked signals of its parent.
        signal.signal(TIME_SIGNAL, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {TIME_SIGNAL})
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):  # nothing but frames goes to the parent
        os.dup2(null, descriptor)


def _limit_time(seconds: float) -> None:
    """Allow this process `seconds` of processor time from now on, 0: any; on Windows the parent watches instead."""
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _limit_memory(more_bytes: int | None) -> None:
    """Allow this process `more_bytes` beyond its current address space; None: the parent watches instead."""
    if more_bytes is None or sys.platform == "win32":
        return
    import resource

    with open("/proc/self/statm", encoding="ascii") as statm:
        pages = int(statm.read().split()[0])
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    wanted = pages * resource.getpagesize() + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
