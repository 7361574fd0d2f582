"""Serving: tokens per second and waiting times over HTTP, beside the same engine without a server, in turns.

The one idea: a server is measured from outside, as its users see it: a process of its own, and a client that keeps so
many streams going, or sends requests at random times. The bare engine answers the same prompts in a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from benchmarks.report import environment, positive, spread, summary, tell

PROMPTS = [
    f"Question: {name} has {count} pens. {name} finds {found}. {name} buys 2. How many pens does {name} have now?\n"
    "Answer:"
    for name in ("Tom", "Ann", "Ben", "Mia")
    for count, found in ((5, 3), (7, 4), (9, 6), (12, 8))
]
DEPTHS = {"full": {"policy": "full"}, "d3": {"policy": "d3", "alpha": 0.8, "start": 0.7}}
"""What each request asks for."""

START_SECONDS = 300


@dataclass(frozen=True)
class Settings:
    """What is measured; `requests` for each stream, of `tokens` tokens each, in each of `repeats` rounds."""

    model: str = "demo"
    streams: tuple[int, ...] = (1, 8, 64)
    depths: tuple[str, ...] = tuple(DEPTHS)
    rates: tuple[float, ...] = ()
    tokens: int = 64
    requests: int = 4
    repeats: int = 3
    threads: int = 1


@dataclass(frozen=True)
class Answered:
    """One request: when it was sent, when its first and last tokens came, and how many there were."""

    sent: float
    first: float
    last: float
    tokens: int

    @property
    def per_token(self) -> float:
        """Seconds per token after the first."""
        return (self.last - self.first) / max(1, self.tokens - 1)


# -- the server --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def server(settings: Settings, rows: int) -> Iterator[str]:
    """`d3engine serve` in a process of its own; its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "d3engine", "serve", settings.model, "--port", str(port), "--depth", "full"]
    command += ["--threads", str(settings.threads), "--max-num-seqs", str(rows), "--max-queue", str(16 * rows)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            _await_port(process, port)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def _await_port(process: subprocess.Popen[str], port: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            assert process.stderr is not None
            raise SystemExit(f"the server has not started: {process.stderr.read()}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.1)
    raise SystemExit(f"the server has not started within {START_SECONDS} seconds")


async def closed_loop(url: str, settings: Settings, streams: int, depth: str) -> list[Answered]:
    """So many streams, each of which sends its next request when the last one is answered."""
    import aiohttp

    async def stream(session: aiohttp.ClientSession, first: int) -> list[Answered]:
        return [await _ask(session, url, settings, first + nth, depth) for nth in range(settings.requests)]

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        found = await asyncio.gather(*(stream(session, settings.requests * nth) for nth in range(streams)))
    return [answered for one in found for answered in one]


async def open_loop(url: str, settings: Settings, rate: float, depth: str) -> list[Answered]:
    """Requests at random times, `rate` a second on average (a Poisson process), whether or not others are answered."""
    import aiohttp

    numbers = random.Random(1)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        tasks = []
        for nth in range(16 * settings.requests):
            tasks.append(asyncio.create_task(_ask(session, url, settings, nth, depth)))
            await asyncio.sleep(numbers.expovariate(rate))
        return list(await asyncio.gather(*tasks))


async def _ask(session: Any, url: str, settings: Settings, nth: int, depth: str) -> Answered:
    body = {
        "model": settings.model,
        "prompt": PROMPTS[nth % len(PROMPTS)],
        "max_tokens": settings.tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "depth": DEPTHS[depth],
    }
    sent, first, last, tokens = time.perf_counter(), 0.0, 0.0, 0
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise SystemExit(f"the server answered {response.status}: {await response.text()}")
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[len(b"data: ") :])
            if event.get("error"):
                raise SystemExit(f"the server answered with an error: {event['error']}")
            if event["choices"]:
                last = time.perf_counter()
                first = first or last
            elif event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
    return Answered(sent, first, last, tokens)


def figures(answered: Sequence[Answered]) -> dict[str, float]:
    """Of one round: tokens per second, and percentiles of the time to the first token and of the time per token."""
    seconds = max(one.last for one in answered) - min(one.sent for one in answered)
    waits = [one.first - one.sent for one in answered]
    paces = [one.per_token for one in answered]
    return {
        "tokens_per_second": sum(one.tokens for one in answered) / seconds,
        "first_token_p50": percentile(waits, 50),
        "first_token_p99": percentile(waits, 99),
        "per_token_p50": percentile(paces, 50),
        "per_token_p99": percentile(paces, 99),
    }


def percentile(values: Sequence[float], percent: int) -> float:
    """The least value that at least so many percent do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


# -- the bare engine -----------------------------------------------------------------------------------------------


class Bare:
    """The same engine in a process of its own (this module with `--bare`), which answers rounds on command."""

    def __init__(self, settings: Settings, rows: int) -> None:
        command = [sys.executable, "-m", "benchmarks.serving", "--bare", json.dumps([vars(settings), rows])]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ}
        )

    def tokens_per_second(self, depth: str) -> float:
        """One round."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(depth + "\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def answer_rounds(settings: Settings, rows: int) -> None:
    """What the bare engine's process does: a round for each line that it reads."""
    import torch

    from d3engine import Engine, SamplingParams
    from d3engine.depth.policy import policy_from_dict

    torch.set_num_threads(settings.threads)
    prompts = [PROMPTS[nth % len(PROMPTS)] for nth in range(rows * settings.requests)]
    with Engine(settings.model, max_num_seqs=rows, num_threads=settings.threads, depth="auto") as engine:
        for line in sys.stdin:
            depth = policy_from_dict(DEPTHS[line.strip()])
            params = SamplingParams(temperature=0, max_tokens=settings.tokens, ignore_eos=True, depth=depth)
            start = time.perf_counter()
            outputs = engine.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - start
            print(sum(len(output.outputs[0].token_ids) for output in outputs) / seconds, flush=True)


# -- a run -----------------------------------------------------------------------------------------------------------


def measure(settings: Settings, *, show_progress: bool | None = None) -> dict[str, Any]:
    """All rounds: a row for each number of streams (or rate of arrival) and depth."""
    report: dict[str, Any] = {"benchmark": "serving", "settings": vars(settings), "streams": [], "arrivals": []}
    hidden = None if show_progress is None else not show_progress
    total = len(settings.depths) * (len(settings.streams) + len(settings.rates)) * (settings.repeats + 1)
    with tqdm(unit="round", total=total, disable=hidden) as bar:
        for streams in settings.streams:
            bar.set_description(f"{streams} streams")
            with server(settings, streams) as url:
                bare = Bare(settings, streams)
                rounds = _rounds(settings, lambda d, u=url, n=streams: closed_loop(u, settings, n, d), bare, bar)  # type: ignore[misc]
                bare.close()
            report["streams"] += [{"streams": streams, **row} for row in rounds]
        for rate in settings.rates:
            bar.set_description(f"{rate:g} requests a second")
            with server(settings, 64) as url:
                rounds = _rounds(settings, lambda d, u=url, r=rate: open_loop(u, settings, r, d), None, bar)  # type: ignore[misc]
            report["arrivals"] += [{"requests_per_second": rate, **row} for row in rounds]
    return report


def _rounds(settings: Settings, serve: Any, bare: Bare | None, bar: tqdm[Any]) -> list[dict[str, Any]]:
    """A round that counts for nothing, then the others, at every depth in turn."""
    found: dict[str, dict[str, list[float]]] = {depth: {} for depth in settings.depths}
    for number in range(settings.repeats + 1):
        for depth in settings.depths:
            values = figures(asyncio.run(serve(depth)))
            if bare is not None:
                values["bare_tokens_per_second"] = bare.tokens_per_second(depth)
                values["of_the_bare_engine"] = values["tokens_per_second"] / values["bare_tokens_per_second"]
            for name, value in values.items() if number else ():
                found[depth].setdefault(name, []).append(value)
            bar.update()
    rows = [{"depth": depth, **{name: summary(v) for name, v in own.items()}} for depth, own in found.items()]
    if {"full", "d3"} <= set(found):
        gains = {"d3_over_full": "tokens_per_second", "bare_d3_over_full": "bare_tokens_per_second"}
        for name, figure in gains.items():
            if figure in found["d3"]:
                pairs = zip(found["d3"][figure], found["full"][figure], strict=True)
                rows[list(found).index("d3")][name] = statistics.median(a / b for a, b in pairs)
    return rows


def show(report: dict[str, Any], console: Console) -> None:
    """Print a table of closed loops, and one of arrivals if there were any."""
    settings = report["settings"]
    console.print(
        f"{settings['model']}: {settings['threads']} threads, {settings['tokens']} tokens a request,"
        f" {settings['repeats']} rounds; medians, least and most of the rounds. The client runs on the same machine."
    )
    for title, rows in (("streams", report["streams"]), ("requests_per_second", report["arrivals"])):
        if not rows:
            continue
        titles = (title.replace("_", " "), "depth", "tokens/s", "of the bare engine", "first token, ms, p50", "p99")
        table = Table(*titles, "per token, ms, p50", "p99", "D3 over full depth", "the same, bare")
        for row in rows:
            gains = [f"{row[name]:.2f}" if name in row else "-" for name in ("d3_over_full", "bare_d3_over_full")]
            shares = spread(row["of_the_bare_engine"]) if "of_the_bare_engine" in row else "-"
            times = ("first_token_p50", "first_token_p99", "per_token_p50", "per_token_p99")
            table.add_row(
                str(row[title]),
                row["depth"],
                spread(row["tokens_per_second"]),
                shares,
                *(spread(row[name], 1e3) for name in times),
                *gains,
            )
        console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo", help="what `d3engine serve` takes")
    parser.add_argument("--streams", nargs="*", type=positive, default=[1, 8, 64], help="requests at once")
    parser.add_argument("--depths", nargs="+", choices=list(DEPTHS), default=list(DEPTHS))
    parser.add_argument("--rates", nargs="*", type=float, default=[], help="requests a second at random times, as well")
    parser.add_argument("--tokens", type=positive, default=64, help="new tokens per request")
    parser.add_argument("--requests", type=positive, default=4, help="requests of each stream in a round")
    parser.add_argument("--repeats", type=positive, default=3, help="rounds")
    parser.add_argument("--threads", type=positive, default=1, help="of the engine")
    parser.add_argument("--json", metavar="FILE", help="also write all figures to this file")
    parser.add_argument("--bare", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.bare:
        settings, rows = json.loads(given.bare)
        answer_rounds(Settings(**settings), rows)
        return 0
    settings = Settings(
        model=given.model,
        streams=tuple(given.streams),
        depths=tuple(given.depths),
        rates=tuple(given.rates),
        tokens=given.tokens,
        requests=given.requests,
        repeats=given.repeats,
        threads=given.threads,
    )
    report = measure(settings)
    report["environment"] = environment("benchmarks.serving", arguments)
    tell(report, show, width=170, file=given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
