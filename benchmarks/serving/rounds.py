"""The rounds of one model: every number of streams, then requests at random times and in bursts, systems in turns."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.report import interval_of_median, option, summary
from benchmarks.serving.asking import DEPTHS, Answered, Client, bursts, figures, poisson
from benchmarks.serving.bare import ALONE, LOCKSTEP, WAYS
from benchmarks.serving.processes import Bare, Place, Server, d3engine_server, llama_server, recorded_server

OURS, PEER = "d3engine", "llama.cpp"
APART = f"{OURS}, engine process"
PATTERNS: dict[str, Callable[[float, int], list[float]]] = {"poisson": poisson, "bursts": bursts}


@dataclass(frozen=True)
class Settings:
    """What is measured: `repeats` rounds of each number of streams, of at least `seconds` each, and arrivals for so
    many seconds at `load` times what the slowest system could answer."""

    models: tuple[str, ...] = option(("demo",), "what `d3engine serve` takes (demo)")
    streams: tuple[int, ...] = option((1, 8, 64), "requests at once")
    depths: tuple[str, ...] = option(("full", "d3"), choices=list(DEPTHS))
    arrivals: tuple[str, ...] = option((), "requests at times of their own, as well", choices=list(PATTERNS))
    load: float = option(0.7, "their share of what the slowest can answer")
    waves: int = option(16, "steps of a wave of admission")
    tokens: int = option(64, "new tokens per request")
    seconds: float = option(1.5, "of a round at least")
    repeats: int = option(2, "rounds")
    threads: int = option(1, "of each server")
    weight_dtype: str = option("auto", "of all of them (auto)", choices=["auto", "float32", "bfloat16"])
    peer: bool = True
    engine_process: bool = option(False, "also with the engine in a separate process")


class Running:
    """The servers of one model; llama.cpp's, which sets its slots aside when it starts, one for each number of them."""

    def __init__(self, place: Place, settings: Settings, file: Path | None) -> None:
        self._stack = contextlib.ExitStack()
        self._place = place
        self._file = file
        self._tokens = settings.tokens
        rows = max(settings.streams)
        self.server = self._stack.enter_context(recorded_server(place, rows))
        self.ours = Measured.of(OURS, self.server, settings.tokens)
        self.others: list[Measured] = []
        if settings.engine_process:
            apart = self._stack.enter_context(d3engine_server(place, rows, "--engine-process"))
            self.others.append(Measured.of(APART, apart, settings.tokens))
        self.bare = {way: Bare(place, rows, settings.tokens, way) for way in WAYS}
        for bare in self.bare.values():
            self._stack.callback(bare.close)

    @contextlib.contextmanager
    def peer(self, rows: int) -> Iterator[Measured | None]:
        """llama.cpp's server, where there is one."""
        if self._file is None:
            yield None
            return
        with llama_server(str(self._file), self._place, rows) as server:
            yield Measured.of(PEER, server, self._tokens)

    @contextlib.contextmanager
    def in_waves(self, rows: int, steps: int) -> Iterator[Measured]:
        """Ours, where requests join the batch every few steps."""
        with d3engine_server(self._place, rows, "--admission-interval", str(steps)) as server:
            yield Measured.of(f"{OURS}, waves of {steps}", server, self._tokens)

    def close(self) -> None:
        """End all of them."""
        self._stack.close()


@dataclass(frozen=True)
class Measured:
    """A server and who asks it."""

    name: str
    server: Server
    client: Client

    @classmethod
    def of(cls, name: str, server: Server, tokens: int) -> Measured:
        """A separate client, which asks for a given number of tokens."""
        return cls(name, server, Client(server.url, server.model_name(), tokens))

    def streams(self, count: int, seconds: float, depth: str) -> dict[str, float]:
        """The figures of several streams, the server's processor time per token among them."""
        return self._round(lambda: self.client.streams(count, seconds, depth))

    def arrivals(self, gaps: Sequence[float], depth: str) -> dict[str, float]:
        """The same of requests that come one after each of the gaps."""
        return self._round(lambda: self.client.arrivals(gaps, depth))

    def _round(self, ask: Callable[[], list[Answered]]) -> dict[str, float]:
        """`tokens_per_step` is there where the server counts its steps."""
        steps, before, own = self.server.metric("engine_steps_total"), self.server.cpu_seconds(), time.process_time()
        found = figures(ask())
        tokens = found["tokens"]
        found["client_cpu_per_token"] = (time.process_time() - own) / tokens
        found["cpu_per_token"] = (self.server.cpu_seconds() - before) / tokens
        if steps is not None:
            found["tokens_per_step"] = tokens / (self.server.metric("engine_steps_total") - steps)
        return found


Rounds = dict[tuple[str, str], list[dict[str, float]]]
"""By system and depth."""


def measure(settings: Settings, model: str, file: Path | None, bar: tqdm[Any]) -> dict[str, Any]:
    """All rounds of one model; `file` has the same weights for llama.cpp."""
    running = Running(Place(model, settings.weight_dtype, settings.threads), settings, file)
    try:
        streams = []
        for count in settings.streams:
            bar.set_description(f"{model}, {count} streams")
            streams += _closed_loops(settings, running, count, bar)
        arrivals = []
        if settings.arrivals:
            rate = settings.load * _slowest(streams) / settings.tokens
            for pattern in settings.arrivals:
                bar.set_description(f"{model}, {pattern}")
                arrivals += _open_loops(settings, running, pattern, rate, bar)
    finally:
        running.close()
    return {"model": model, "streams": streams, "arrivals": arrivals}


def num_rounds(settings: Settings) -> int:
    """How often the bar of one model moves."""
    systems = (1 + settings.engine_process + len(WAYS)) * len(settings.depths) + settings.peer
    closed = len(settings.streams) * settings.repeats * systems
    arrived = len(settings.depths) + ("d3" in settings.depths) + settings.peer
    return closed + len(settings.arrivals) * settings.repeats * arrived


def _closed_loops(settings: Settings, running: Running, count: int, bar: tqdm[Any]) -> list[dict[str, Any]]:
    found: Rounds = {}
    with running.peer(count) as peer:
        for number in range(settings.repeats + 1):
            many, seconds = (count, settings.seconds) if number else (1, 0.0)  # the round that warms up is a short one
            for depth in settings.depths:
                running.server.take_arrivals()
                values = running.ours.streams(many, seconds, depth)
                arrivals = running.server.take_arrivals()
                _keep(found, (OURS, depth), values, number, bar)
                for way, bare in running.bare.items():
                    alone = bare.round(many, seconds, depth, arrivals)
                    _keep(found, (way, depth), _of_bare(alone), number, bar)
                for other in running.others:
                    _keep(found, (other.name, depth), other.streams(many, seconds, depth), number, bar)
            if peer is not None:
                _keep(found, (PEER, "full"), peer.streams(many, seconds, "full"), number, bar)
    return [{"streams": count, **row} for row in rows_of(found)]


def _of_bare(found: dict[str, float]) -> dict[str, float]:
    tokens = found["tokens"]
    rate, cost = tokens / found["seconds"], found["cpu_seconds"] / tokens
    rows = tokens / found["num_steps"]
    return {"tokens": tokens, "tokens_per_second": rate, "cpu_per_token": cost, "tokens_per_step": rows}


def _open_loops(
    settings: Settings, running: Running, pattern: str, rate: float, bar: tqdm[Any]
) -> list[dict[str, Any]]:
    """As many rounds as of streams, of the same times of arrival for everyone."""
    rows, found = max(settings.streams), Rounds()
    gaps = PATTERNS[pattern](rate, max(16, round(rate * 4 * settings.seconds)))
    with running.peer(rows) as peer, running.in_waves(rows, settings.waves) as waves:
        asked = [(running.ours, depth) for depth in settings.depths]
        asked += [(waves, "d3")] if "d3" in settings.depths else []
        asked += [(peer, "full")] if peer is not None else []
        for number, (measured, depth) in itertools.product(range(settings.repeats), asked):
            if not number:
                measured.streams(1, 0.0, depth)  # warms up
            _keep(found, (measured.name, depth), measured.arrivals(gaps, depth), 1, bar)
    return [{"pattern": pattern, "requests_per_second": rate, **row} for row in rows_of(found)]


def _keep(found: Rounds, key: tuple[str, str], values: dict[str, float], number: int, bar: tqdm[Any]) -> None:
    """The round before the first counts for nothing."""
    if number:
        found.setdefault(key, []).append(values)
        bar.update()


def rows_of(found: Rounds) -> list[dict[str, Any]]:
    """A row for each system and depth, with what it is beside the others: the median over rounds, and its interval."""
    rows = []
    for (system, depth), rounds in found.items():
        names = rounds[0]
        row: dict[str, Any] = {"system": system, "depth": depth}
        row |= {name: summary([values[name] for values in rounds]) for name in names}
        for title, other in _compared(system, depth).items():
            if other in found:
                by_clock = _ratios(rounds, found[other], "tokens_per_second")
                row[title] = statistics.median(by_clock)
                row[f"{title}_interval"] = interval_of_median(by_clock)
                row[f"{title}_cpu"] = statistics.median(_ratios(found[other], rounds, "cpu_per_token"))
        rows.append(row)
    return rows


def _compared(system: str, depth: str) -> dict[str, tuple[str, str]]:
    """With which rows one is compared, by the name of the ratio."""
    if system == PEER:
        return {}
    others = {"over_peer": (PEER, "full"), "of_lockstep": (LOCKSTEP, depth), "of_engine": (ALONE, depth)}
    others = {name: other for name, other in others.items() if other[0] != system}
    if system == APART:
        others["over_thread"] = OURS, depth
    elif system not in (OURS, *WAYS):
        others["over_immediate"] = OURS, depth
    elif depth != "full":
        others["over_full"] = system, "full"
    return others


def _ratios(ours: Sequence[dict[str, float]], theirs: Sequence[dict[str, float]], name: str) -> list[float]:
    return [a[name] / b[name] for a, b in zip(ours, theirs, strict=True)]


def _slowest(streams: Sequence[dict[str, Any]]) -> float:
    """Tokens per second at full depth of the slowest server, with as many streams as there may be."""
    most = max(row["streams"] for row in streams)
    rows = [row for row in streams if row["streams"] == most and row["system"] not in WAYS]
    return float(min(row["tokens_per_second"]["median"] for row in rows))


@contextlib.contextmanager
def weights_for_peer(model: str, weight_dtype: str) -> Iterator[Path | None]:
    """A GGUF file of the model's weights in the type in which d3engine holds them."""
    import torch

    from benchmarks.gguf_writing import write_gguf
    from benchmarks.systems import weights_of
    from d3engine.engine.model_directory import model_directory
    from d3engine.model.config import ModelConfig

    directory = model_directory(model)
    config = ModelConfig.from_directory(directory)
    held = _held(directory) if weight_dtype == "auto" else weight_dtype
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "weights.gguf"
        kind = {"float32": "f32", "bfloat16": "16-bit"}[held]
        with torch.inference_mode():
            write_gguf(file, config, weights_of(directory, config), kind, directory)
        yield file


def _held(directory: Path) -> str:
    """The type of weights that "auto" comes to."""
    from d3engine import Engine

    with Engine(directory, device="cpu", kv_cache_memory_bytes=2**24, skip_tokenizer_init=True) as engine:
        return str(engine.settings.weight_dtype).removeprefix("torch.")
