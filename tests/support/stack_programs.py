"""Programs of the page of stacks that serve, each in a process of its own, until a test has asked what it wants."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
from contract import BEHIND, HANG_SECONDS

ARGUMENTS = ", ".join(f"{name}={value!r}" for name, value in BEHIND.items())
"""Of the engine behind a stack, as they stand in a program."""


def free_port() -> int:
    """A port that nobody has at this moment."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@contextmanager
def serving_program(folder: Path, program: str, ready: str, command: Sequence[str] = ("program.py",)) -> Iterator[Path]:
    """A program that runs as `python COMMAND`, once GET `ready` answers 200; what it says is in the file that comes."""
    # Its whole group of processes ends with the block.
    (folder / "program.py").write_text(program)
    log = folder / "said.txt"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "BENTOML_HOME": str(folder), "BENTOML_DO_NOT_TRACK": "1"}
    with log.open("w") as said:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=folder,
            env=environment,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_until_ready(process, ready, log)
        yield log
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_until_ready(process: subprocess.Popen[bytes], ready: str, log: Path) -> None:
    """Wait until GET `ready` answers 200; fails with the log of a process that has ended."""
    until = time.monotonic() + 2 * HANG_SECONDS
    while time.monotonic() < until:
        assert process.poll() is None, log.read_text(errors="replace")
        try:
            if httpx.get(ready, timeout=HANG_SECONDS).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise AssertionError(f"the program does not answer:\n{log.read_text(errors='replace')}")
