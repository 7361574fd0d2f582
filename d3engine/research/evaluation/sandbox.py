"""Calls of a function of untrusted code, in a child process that may compute and nothing
else."""

from __future__ import annotations

import ast
import json
import os
import secrets
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from d3engine.errors import D3EngineError
from d3engine.research.evaluation import sandbox_child
from d3engine.utils.children import python_command

SECONDS = 5
"""Processor time of a child, its start included: it says the same on a busy machine."""

SILENT_SECONDS = 30.0
"""Wall clock between two looks at a child: one that sleeps at both and ran nothing between them waits for ever."""

WALL_SECONDS = 3600.0
"""Wall clock after which a child that still has processor time left is the machine's fault."""

LIMITS = {
    "RLIMIT_AS": 512 * 1024**2,
    "RLIMIT_FSIZE": 0,
    "RLIMIT_NPROC": 0,
    "RLIMIT_NOFILE": 64,
    "RLIMIT_CORE": 0,
}
"""Bytes of memory and of a written file, processes, open files and bytes of a core dump."""

MOST_BYTES = 8 * 1024**2
"""Of what a child sends."""


_CANNOT = "the process for the code of answers cannot be confined"


class SandboxError(D3EngineError, RuntimeError):
    """The sandbox does not work on this system, or the machine took a child's time: no verdict on the code."""


class CodeError(Exception):
    """The code raised an exception, or ended or blocked its process."""


class CodeTimeError(CodeError):
    """The code used up its processor time."""


class NoLiteral:
    """A result that no literal is equal to, such as a generator."""


def call_function(code: str, name: str, calls: Sequence[Sequence[Any]]) -> list[Any]:
    """The results of a function of `code`, called with each list of arguments (values of JSON) in one process.

    Results arrive as literals, so the code never meets what they are compared with; see `NoLiteral`. Raises
    `CodeError`, or its `CodeTimeError`, for what the code does, and `SandboxError`.
    """
    if sys.platform != "linux":
        raise SandboxError(f"{_CANNOT}: that needs Linux, not {sys.platform}")
    nonce = secrets.token_hex(16)
    limits = {"RLIMIT_CPU": SECONDS, **LIMITS}
    request = {"nonce": nonce, "code": code, "name": name, "calls": [list(one) for one in calls], "limits": limits}
    # As -I -S, but with one hash seed, which -I would not read: the order of a set must not decide.
    command = python_command("-s", "-S", "-B", str(Path(sandbox_child.__file__).absolute()))
    environment = {"PYTHONHASHSEED": "0"}
    environment |= {key: os.environ[key] for key in ("LD_LIBRARY_PATH",) if key in os.environ}
    try:
        with TemporaryDirectory(prefix="d3engine-") as folder:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=environment,
                start_new_session=True,
            )
            try:
                output = _listen(process, json.dumps(request).encode("ascii"))
            finally:
                status, seconds = _end(process)
    except OSError as error:
        raise SandboxError(f"{_CANNOT}: {error}") from error
    return _results(output, nonce, status, seconds)


def _listen(process: subprocess.Popen[bytes], request: bytes) -> bytes:
    """What the child writes until it ends."""
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(BrokenPipeError), process.stdin:  # one that cannot start has said why
        process.stdin.write(request)
    output, ended = bytearray(), os.pidfd_open(process.pid)
    deadline, before = time.monotonic() + WALL_SECONDS, ""
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            selector.register(ended, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in selector.select(SILENT_SECONDS)]
                if process.stdout in ready:
                    chunk = os.read(process.stdout.fileno(), 1 << 16)
                    output += chunk
                    if not chunk:
                        selector.unregister(process.stdout)
                    if len(output) > MOST_BYTES:
                        raise CodeError("it writes without end")
                elif ended in ready:
                    return bytes(output)
                else:
                    now = _asleep_since(process.pid)
                    if now and now == before:
                        raise CodeError("it waits for ever")
                    before = now
                    if time.monotonic() >= deadline:
                        raise SandboxError(
                            f"the code of an answer had no {SECONDS} s of a processor in {WALL_SECONDS:g} s"
                        )
    finally:
        os.close(ended)


def _asleep_since(pid: int) -> str:
    """The processor time of a process that sleeps, in the kernel's words; "" of one that runs or wants to."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    return f"{fields[11]} {fields[12]}" if fields[0] == "S" else ""


def _end(process: subprocess.Popen[bytes]) -> tuple[int, float]:
    """End the child with its group: its exit code, or minus its signal, and its processor time in seconds."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.stdout is not None
    process.stdout.close()
    return process.returncode, usage.ru_utime + usage.ru_stime


def _results(output: bytes, nonce: str, status: int, seconds: float) -> list[Any]:
    """What a child that has ended says of its code."""
    lines = output.decode("utf-8", errors="replace").splitlines()
    said = {}
    for line in lines:
        sender, _, rest = line.partition(" ")
        kind, _, value = rest.partition(" ")
        if sender == nonce:
            said[kind] = value
    if "ready" not in said:
        why = said.get("refused") or (lines[-1] if lines else f"it ended with status {status}")
        raise SandboxError(f"{_CANNOT}: {why}")
    if "returned" in said:
        return [_value(text) for text in json.loads(said["returned"])]
    if status == -signal.SIGXCPU or (status == -signal.SIGKILL and seconds >= SECONDS):
        raise CodeTimeError(f"{SECONDS} s of processor time")
    if status == -signal.SIGKILL:
        raise SandboxError("something killed the process for the code of an answer (is there enough memory?)")
    raise CodeError(said.get("failed", f"it ended with status {status}"))


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return NoLiteral()
