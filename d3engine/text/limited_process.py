"""Child processes with limits for untrusted chat templates and grammars."""

from __future__ import annotations

import atexit
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from d3engine.errors import D3EngineError, require_integer, require_number
from d3engine.text import limited_worker
from d3engine.text.limited_worker import EXIT_OUT_OF_MEMORY, TIME_SIGNAL, read_frame, write_frame
from d3engine.text.process_usage import usage_of
from d3engine.utils.children import python_command

_MOST_CHILDREN = 8  # at one time; more than a server's threads that parse requests, so that few wait
_START_SECONDS = 120.0
_POLL_SECONDS = 0.1
_KERNEL_LIMITS_MEMORY = sys.platform == "linux"
"""Where the kernel does not limit the address space (macOS, Windows), the parent watches, on Windows the time too."""
_PASSED_ON = re.compile("PATH|HOME|TMPDIR|TZ|LANG|SYSTEMROOT|(PYTHON|LC_|LD_|DYLD_).*")
"""Environment variables of a child: what Python and the loader need, and no credentials."""
_CANNOT_START = "the process for chat templates and grammars cannot be started"


@dataclass(frozen=True)
class ProcessLimits:
    """Limits of one request to a child: to compile or render a chat template, or to check a grammar."""

    characters: int = 4_000_000
    """Of the program, and of its output."""
    seconds: float = 10.0
    """Processor time, so that a busy machine makes nothing fail."""
    memory_bytes: int = 512 * 1024**2
    """Beyond what the process takes at its start."""

    def __post_init__(self) -> None:
        require_integer("characters", self.characters, 0)
        require_number("seconds", self.seconds, 0, 86_400, open_low=True)
        require_integer("memory_bytes", self.memory_bytes, 1)

    @property
    def patience_seconds(self) -> float:
        """Wall clock after which a process is ended, as a guard against hanging without processor time."""
        return 60.0 + 30.0 * self.seconds


class LimitError(Exception):
    """One of `ProcessLimits` is exceeded; the text says which."""


class LimitedProcessError(D3EngineError, RuntimeError):
    """The process cannot be started, or has ended for another reason than its limits."""


class ProcessEndedError(LimitedProcessError):
    """The process ended during a request, by a signal from outside or by a crash."""


def ask(job: str, request: dict[str, Any], limits: ProcessLimits) -> dict[str, Any]:
    """Return the reply of the function `job` ("module:name") to a request, in a child (`limited_worker`).

    Threads may call it concurrently. Raises `LimitError` where it exceeds `limits`, and `LimitedProcessError`.
    """
    with _children.one() as child:
        return child.ask({**request, "job": job}, limits)


class _Child:
    """One process, used by one thread at a time.

    It is started once and kept warm; after exceeding a limit or an invalid reply it is ended and never used again.
    """

    def __init__(self) -> None:
        boot = f"import sys; sys.path += sys.argv[1:]; from {limited_worker.__name__} import main; main()"
        # Without the site module: a quick start, and no start-up code of the environment (.pth files).
        command = python_command("-S", "-c", boot, *_import_paths())
        pipe = subprocess.PIPE
        try:
            # In a session or a group of processes that is new: Ctrl-C in a terminal is for the parent alone.
            self._process = subprocess.Popen(
                command,
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                bufsize=0,
                start_new_session=True,
                creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
                env=_environment(),
            )
        except OSError as error:
            raise LimitedProcessError(f"{_CANNOT_START}: {error}") from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._replies = self._process.stdin.fileno(), self._process.stdout.fileno()
        self._killed_for = ""
        try:
            with self._watched(_START_SECONDS):
                read_frame(self._replies, max_bytes=1000)
        except EOFError:
            said = self._start_error()
            self.close()
            raise LimitedProcessError(f"{_CANNOT_START}: {said}") from None
        except BaseException:
            self.close()
            raise

    def ask(self, request: dict[str, Any], limits: ProcessLimits) -> dict[str, Any]:
        """Return the reply; after any exception the process has ended."""
        in_kernel = limits.memory_bytes if _KERNEL_LIMITS_MEMORY else None
        watched = None if _KERNEL_LIMITS_MEMORY else limits
        frame = request | {"seconds": limits.seconds, "memory_bytes": in_kernel, "characters": limits.characters}
        try:
            with self._watched(limits.patience_seconds, watched):
                write_frame(self._requests, frame)
                # JSON in ASCII writes a character as up to six bytes, and twelve beyond Unicode's first plane.
                return read_frame(self._replies, max_bytes=1_000_000 + 12 * limits.characters)
        except (EOFError, OSError, ValueError):  # it has ended, or its reply is no JSON
            self.close()
            raise self._error_of_exit(limits) from None
        except BaseException:  # Ctrl-C too: a late reply would be taken for the next one
            self.close()
            raise

    def is_usable(self) -> bool:
        """Whether it is alive, and was not killed at the moment of its reply."""
        return self._process.poll() is None and not self._killed_for

    def close(self) -> None:
        """End the process. Idempotent."""
        self._process.kill()
        self._process.wait()
        self._close_pipes()

    def forget(self) -> None:
        """Leave the process to the parent of this fork."""
        self._process.returncode = 0  # so that Popen takes it as ended
        self._close_pipes()

    def _close_pipes(self) -> None:
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()

    @contextmanager
    def _watched(self, seconds: float, limits: ProcessLimits | None = None) -> Iterator[None]:
        """Kill the process after `seconds` of wall clock, or where it goes beyond `limits` from now on."""
        done = threading.Event()
        held, used = (0, 0.0) if limits is None else usage_of(self._process.pid)

        def watch() -> None:
            deadline = time.monotonic() + seconds
            while not done.wait(seconds if limits is None else _POLL_SECONDS):
                if limits is not None:
                    now_held, now_used = usage_of(self._process.pid)
                    if now_held > held + limits.memory_bytes:
                        self._killed_for = "memory"
                    elif now_used > used + limits.seconds:
                        self._killed_for = "time"
                if time.monotonic() >= deadline:
                    self._killed_for = self._killed_for or "silence"
                if self._killed_for:
                    self._process.kill()
                    return

        watcher = threading.Thread(target=watch, name="d3engine-limits-watch", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()

    def _error_of_exit(self, limits: ProcessLimits) -> Exception:
        status = self._process.returncode
        if self._killed_for == "memory" or status == EXIT_OUT_OF_MEMORY:
            return LimitError(f"{limits.memory_bytes / 1024**2:g} MiB of memory")
        if self._killed_for == "time" or (TIME_SIGNAL and status == -TIME_SIGNAL):
            return LimitError(f"{limits.seconds:g} seconds of processor time")
        if self._killed_for:
            return LimitedProcessError(f"the process is silent for {limits.patience_seconds:g} s")
        return ProcessEndedError(f"the process has ended with status {status}")

    def _start_error(self) -> str:
        if self._killed_for:
            return f"it is silent for {_START_SECONDS:g} s"
        assert self._process.stderr is not None
        lines = self._process.stderr.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"it ends with status {self._process.wait()}"


def _import_paths() -> list[str]:
    """The child's import paths: those of the packages that the parent would import."""
    specs = {name: find_spec(name) for name in ("jinja2", "markupsafe", "d3engine", "llguidance")}
    optional = {"llguidance"}  # of an extra: without it there are no grammars
    missing = [name for name, spec in specs.items() if name not in optional and (spec is None or spec.origin is None)]
    if missing:
        raise LimitedProcessError(f"{_CANNOT_START}: there is no package {missing[0]}")
    origins = (spec.origin for spec in specs.values() if spec is not None and spec.origin is not None)
    return list(dict.fromkeys(str(Path(origin).absolute().parent.parent) for origin in origins))


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if _PASSED_ON.fullmatch(name)}


class _Children:
    """The children of this process: idle ones, and a semaphore for the number of all."""

    def __init__(self) -> None:
        self._permits = threading.BoundedSemaphore(_MOST_CHILDREN)
        self._idle: list[_Child] = []

    @contextmanager
    def one(self) -> Iterator[_Child]:
        """Lend a live process to one thread."""
        with self._permits:
            child = self._take() or _Child()
            try:
                yield child
            finally:
                if child.is_usable():
                    self._idle.append(child)
                else:
                    child.close()

    def _take(self) -> _Child | None:
        while self._idle:
            with suppress(IndexError):  # another thread was faster
                child = self._idle.pop()
                if child.is_usable():
                    return child
                child.close()
        return None

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def forget(self) -> None:
        """Leave the processes to the parent of this fork, which still uses them."""
        for child in self._idle:
            child.forget()


_children = _Children()


def _reset_after_fork() -> None:
    global _children
    _children.forget()
    _children = _Children()


atexit.register(lambda: _children.close())
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)
