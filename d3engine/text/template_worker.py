"""The child process in which chat templates are compiled and rendered, and the frames it is spoken to in.

The one idea: what a stranger's template may use is limited by the kernel. A timer of processor time ends this process
wherever it is, even inside one call that would take years, and a limit on its address space turns a huge value into a
`MemoryError`. The parent starts another process then. Processor time and not wall clock, so that nothing fails
because a machine is busy.

Imported by the parent too, for the frames, so it imports nothing that takes time: not torch, and jinja2 in `main` only.
"""

from __future__ import annotations

import json
import os
import signal
import struct
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from d3engine.text.template_sandbox import CompiledTemplate

EXIT_OUT_OF_MEMORY = 70
"""Exit status of a process that ran into its memory limit; nothing of it can be trusted to work on."""
TIME_SIGNAL = getattr(signal, "SIGPROF", 0)  # 0 where no child can be started, but this file imported (Windows)
"""Ends a process that has used up its time."""

_LENGTH = struct.Struct(">Q")
_ANY_SIZE = 1 << 40  # the parent is trusted
_KEPT_TEMPLATES = 8


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
    from d3engine.text.template_sandbox import compile_template

    requests, replies = os.dup(0), os.dup(1)
    _prepare_process()
    templates = _Templates(compile_template)
    write_frame(replies, {"ready": True})
    while True:
        try:
            request = read_frame(requests, _ANY_SIZE)
        except EOFError:
            return
        try:
            _limit_memory(request["memory_bytes"])
            signal.setitimer(signal.ITIMER_PROF, request["seconds"])
            reply = _answer(templates, request)
            write_frame(replies, reply)
            signal.setitimer(signal.ITIMER_PROF, 0)
        except MemoryError:
            os._exit(EXIT_OUT_OF_MEMORY)


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


class _Templates:
    """The templates compiled last, by their source."""

    def __init__(self, compile_template: Callable[[str], CompiledTemplate]) -> None:
        self._compile = compile_template
        self._kept: OrderedDict[str, CompiledTemplate] = OrderedDict()

    def compiled(self, source: str) -> CompiledTemplate:
        if source not in self._kept:
            self._kept[source] = self._compile(source)
        self._kept.move_to_end(source)
        while len(self._kept) > _KEPT_TEMPLATES:
            self._kept.popitem(last=False)
        return self._kept[source]


def _answer(templates: _Templates, request: dict[str, Any]) -> dict[str, Any]:
    """Return the form of the messages a template reads; with `variables` what it writes; or why it fails."""
    try:
        template = templates.compiled(request["source"])
        if request["variables"] is None:
            return {"form": asdict(template.form)}
        text = template.render(request["variables"], request["characters"])
    except MemoryError:
        raise
    except Exception as error:  # a template can raise anything; its traceback shows only generated code
        return {"failed": (str(error) or type(error).__name__)[:10_000]}
    return {"too_long": True} if text is None else {"text": text}
