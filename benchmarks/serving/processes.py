"""Who is measured, each in a process of its own: `d3engine serve`, llama.cpp's server, and the engine alone."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

START_SECONDS = 300


@dataclass(frozen=True)
class Place:
    """What all of them are given: a model and its weights' type, cores, and the longest text of a request."""

    model: str
    weight_dtype: str = "auto"
    threads: int = 1
    length: int = 256


@dataclass(frozen=True)
class Server:
    """One that answers at `url`."""

    url: str
    pid: int

    def model_name(self) -> str:
        """What requests must call its model, which may be another name than the one by which it was started."""
        with urllib.request.urlopen(f"{self.url}/v1/models", timeout=30) as answer:
            return str(json.load(answer)["data"][0]["id"])

    def cpu_seconds(self) -> float:
        """Processor time of it and of what it has started, so far."""
        import psutil

        own = psutil.Process(self.pid)
        times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
        return float(sum(one.user + one.system for one in times))


@contextlib.contextmanager
def d3engine_server(place: Place, rows: int, *options: str) -> Iterator[Server]:
    """`d3engine serve`, of at most so many rows at once."""
    port = free_port()
    command = ["-m", "d3engine", "serve", place.model, "--port", str(port), "--depth", "full"]
    command += ["--threads", str(place.threads), "--weight-dtype", place.weight_dtype]
    command += ["--max-num-seqs", str(rows), "--max-queue", "100000", *options]
    with _running(command, port) as server:
        yield server


@contextlib.contextmanager
def llama_server(file: str, place: Place, rows: int) -> Iterator[Server]:
    """llama.cpp's, of the weights in a GGUF file, with so many slots."""
    port = free_port()
    sizes = [file, str(port), str(rows), str(rows * place.length), str(place.threads)]
    with _running(["-m", "benchmarks.serving.llama_server", *sizes], port) as server:
        yield server


@contextlib.contextmanager
def _running(command: Sequence[str], port: int) -> Iterator[Server]:
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    with process:
        try:
            _await_health(process, port)
            yield Server(f"http://127.0.0.1:{port}", process.pid)
        finally:
            process.terminate()
            try:
                process.communicate(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()


def _await_health(process: subprocess.Popen[str], port: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            assert process.stderr is not None
            raise SystemExit(f"the server has not started: {process.stderr.read()}")
        with contextlib.suppress(OSError, urllib.error.HTTPError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
            return
        time.sleep(0.1)
    raise SystemExit(f"the server has not started within {START_SECONDS} seconds")


def free_port() -> int:
    """One that nobody listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Bare:
    """The engine alone (`benchmarks.serving.bare`), which answers rounds on command."""

    def __init__(self, place: Place, rows: int, tokens: int) -> None:
        given = json.dumps(asdict(place) | {"rows": rows, "tokens": tokens})
        command = [sys.executable, "-m", "benchmarks.serving.bare", given]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def round(self, streams: int, seconds: float, depth: str) -> dict[str, float]:
        """Answer `streams` prompts at once, again and again for so many seconds: tokens, seconds, cpu_seconds."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([streams, seconds, depth]) + "\n")
        self._process.stdin.flush()
        found: dict[str, float] = json.loads(self._process.stdout.readline())
        return found

    def close(self) -> None:
        """End the process."""
        self._process.communicate()
