"""Who is measured, each in a process of its own: `d3engine serve`, llama.cpp's server, and the engine alone."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from benchmarks.children import Child, ask, checkout_environment
from d3engine.utils.children import python_command

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

    def metric(self, name: str) -> float | None:
        """One of what `/metrics` counts, without "d3engine:"; None of a server that does not tell."""
        try:
            with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as answer:
                found = re.search(rf"^d3engine:{name} (\S+)$", answer.read().decode(), re.MULTILINE)
        except urllib.error.HTTPError:
            return None
        return None if found is None else float(found[1])

    def cpu_seconds(self) -> float:
        """Processor time of it and of what it has started, so far."""
        import psutil

        own = psutil.Process(self.pid)
        times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
        return float(sum(one.user + one.system for one in times))


@dataclass(frozen=True)
class RecordedServer(Server):
    """One that counts how its requests came (`benchmarks.serving.recorded`)."""

    process: subprocess.Popen[str]

    def take_arrivals(self) -> list[int]:
        """How many requests came before each of the steps since this was last asked."""
        found: list[int] = ask(self.process, None)
        return found


@contextlib.contextmanager
def d3engine_server(place: Place, rows: int, *options: str) -> Iterator[Server]:
    """`d3engine serve`, of at most a given number of rows at once."""
    port = free_port()
    with _running(["-m", "d3engine", "serve", *_serve_options(place, rows, port), *options], port) as (server, _):
        yield server


@contextlib.contextmanager
def recorded_server(place: Place, rows: int) -> Iterator[RecordedServer]:
    """The same, which tells how its requests came."""
    port = free_port()
    with _running(["-m", "benchmarks.serving.recorded", *_serve_options(place, rows, port)], port) as (server, process):
        yield RecordedServer(server.url, server.pid, process)


def _serve_options(place: Place, rows: int, port: int) -> list[str]:
    sizes = ["--threads", str(place.threads), "--weight-dtype", place.weight_dtype, "--max-num-seqs", str(rows)]
    return [place.model, "--port", str(port), "--depth", "full", "--max-queue", "100000", *sizes]


@contextlib.contextmanager
def llama_server(file: str, place: Place, rows: int) -> Iterator[Server]:
    """llama.cpp's, of the weights in a GGUF file, with a given number of slots."""
    port = free_port()
    sizes = [file, str(port), str(rows), str(rows * place.length), str(place.threads)]
    with _running(["-m", "benchmarks.serving.llama_server", *sizes], port) as (server, _):
        yield server


@contextlib.contextmanager
def _running(command: Sequence[str], port: int) -> Iterator[tuple[Server, subprocess.Popen[str]]]:
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        python_command(*command), env=checkout_environment(), stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )
    with process:
        try:
            _await_health(process, port)
            yield Server(f"http://127.0.0.1:{port}", process.pid), process
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


class Bare(Child):
    """The engine alone in one of the ways of `benchmarks.serving.bare`, which answers rounds on command."""

    def __init__(self, place: Place, rows: int, tokens: int, way: str) -> None:
        given = asdict(place) | {"rows": rows, "tokens": tokens, "way": way}
        super().__init__("serving.bare", json.dumps(given))

    def round(self, streams: int, seconds: float, depth: str, arrivals: Sequence[int]) -> dict[str, float]:
        """Keep `streams` going for these seconds, or give it `arrivals`: tokens, num_steps, seconds, cpu_seconds."""
        found: dict[str, float] = self.ask([streams, seconds, depth, arrivals])
        return found
