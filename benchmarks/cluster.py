"""What routing is worth among replicas: real schedulers, each with its own clock, with fake tokens and no model.

By a roofline each layer that any row runs is read once, or computed for as long as its rows take, and their entries are
read on top: one young row makes a step long for all rows beside it. *Load* is the rate of requests over the one that
replicas with full batches could just serve at full depth. Every routing meets the same requests.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from typing import Any

import numpy as np
from rich.console import Console
from tqdm import tqdm

from benchmarks.fake_sequences import BLOCK_SIZE, fake_scheduler, fake_sequence, fake_tokens, layers_run
from benchmarks.report import Parser, option, print_table, settings_of, summary
from d3engine.depth import D3, FullDepth, Schedule
from d3engine.depth.labels import policy_in_words
from d3engine.integrations.proxy import ROUTINGS, Busy, Routing, least_loaded
from d3engine.request.admission import Immediate, IntervalAdmission
from d3engine.scheduling.plan import Plan
from d3engine.scheduling.sequence import Sequence as TokenSequence

ARRIVALS = ("poisson", "bursts")


class OfTwo:
    """Of two that are drawn the one with fewer requests, which is what Ray Serve does by itself."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(0)

    def choose(self, now: float, prefix: bytes, busy: Busy) -> str:
        drawn = self._random.choice(list(busy), size=min(2, len(busy)), replace=False)
        return least_loaded({str(name): busy[str(name)] for name in drawn})


ROUTERS: dict[str, Callable[[float], Routing]] = {"of two at random": lambda window: OfTwo(), **ROUTINGS}


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step. The numbers are of Llama-2-7B in bfloat16 on a device that reads 2 TB/s and computes 300
    TFLOP/s: what data sheets say, not what was measured.

    `fixed` is what a step takes whatever it runs, the LM head among it; `layer` is to read a layer's weights, `row` to
    multiply one row with them, `entry` to read the keys and values of one token in one layer.
    """

    fixed: float = 1e-3
    layer: float = 2.0e-4
    row: float = 1.35e-6
    entry: float = 8.2e-9

    def of(self, plan: Plan) -> float:
        seconds = self.fixed
        for span in plan.spans:
            if span.num_rows:
                stops = plan.stops[: span.num_chunks] if span.chunks is None else plan.stops[span.chunks]
                a_layer = max(self.layer, span.num_rows * self.row) + self.entry * int(stops.sum())
                seconds += len(span.layers) * a_layer
        return seconds


@dataclass(frozen=True)
class Settings:
    """What is simulated. Requests of the first `warm_up` seconds fill the replicas and are not counted."""

    replicas: int = option(4)
    slots: int = option(64)
    num_layers: int = 32
    alpha: float = option(0.9)
    start: float = option(0.6)
    tokens: int = option(256)  # of an answer, on average
    most_tokens: int = 1024
    prefixes: int = option(64)
    prefix_tokens: int = 256
    own_tokens: int = 64
    kept_prefixes: int = 16  # that a replica has room for, beside its running sequences
    seconds: float = option(8.0)
    warm_up: float = option(3.0)
    window: float = option(0.2)
    admit_every: int = option(1)
    seeds: int = option(3)

    @property
    def schedule(self) -> Schedule:
        policy = FullDepth() if self.alpha == 1 else D3(self.alpha, self.start)
        return policy.schedule(self.num_layers)

    def rate(self, load: float, time: StepTime) -> float:
        """Requests a second at this load: full batches of answers half done, prompts left out."""
        entries = self.slots * (self.prefix_tokens + self.own_tokens + self.tokens // 2)
        a_layer = max(time.layer, self.slots * time.row) + time.entry * entries
        step = time.fixed + self.num_layers * a_layer
        return load * self.replicas * self.slots / (self.tokens * step)


@dataclass(frozen=True)
class Arrival:
    """A request: when it comes, how its prompt begins, and how long its answer is."""

    time: float
    prefix: int
    tokens: int


@dataclass
class Request:
    """What became of one, in seconds of the simulation."""

    arrived: float
    first_token: float = 0.0
    last_token: float = 0.0
    tokens: int = 0


def draw_arrivals(settings: Settings, kind: str, rate: float, seed: int) -> list[Arrival]:
    """Requests of `settings.seconds`. Bursts are four times as dense as the lulls between them; both last two seconds
    on average. Answers are log-normal, prefixes as unequally popular as words are (Zipf)."""
    random = np.random.default_rng([seed, ARRIVALS.index(kind)])
    popularity = (1 / np.arange(1, settings.prefixes + 1)).cumsum()
    popularity /= popularity[-1]
    found: list[Arrival] = []
    now, dense, changes = 0.0, True, 0.0
    while True:
        if kind == "bursts" and now >= changes:
            dense, changes = not dense, now + random.exponential(2.0)
        pace = rate if kind == "poisson" else rate * (1.6 if dense else 0.4)
        gap = random.exponential(1 / pace)
        if kind == "bursts" and now + gap > changes:
            now = changes  # nobody came before the pace changed
            continue
        now += gap
        if now >= settings.seconds:
            return found
        length = int(random.lognormal(np.log(settings.tokens) - 0.18, 0.6))
        prefix = int(popularity.searchsorted(random.random(), side="right"))
        found.append(Arrival(now, prefix, int(np.clip(length, 2, settings.most_tokens))))


class Replica:
    """One scheduler, and the step that it is at."""

    def __init__(self, settings: Settings) -> None:
        length = settings.prefix_tokens + settings.own_tokens + settings.most_tokens
        self.scheduler = fake_scheduler(
            settings.num_layers,
            settings.slots,
            length,
            batched_tokens=settings.slots + 512,
            spare_blocks=settings.kept_prefixes * (settings.prefix_tokens // BLOCK_SIZE),
            admission=Immediate() if settings.admit_every == 1 else IntervalAdmission(settings.admit_every),
        )
        self.plan: Plan | None = None

    @property
    def outstanding(self) -> int:
        return self.scheduler.num_running + self.scheduler.num_waiting

    def begin(self) -> Plan | None:
        """The next step, which then is under way."""
        self.plan = self.scheduler.schedule()
        return self.plan

    def end(self) -> list[int]:
        """The step is over; returns the requests that got a token."""
        assert self.plan is not None
        return [int(out.sequence.request_id) for out in self.scheduler.update(self.plan, fake_tokens(self.plan))]


@dataclass
class Counted:
    """Sums over the steps that began within the counted time."""

    steps: int = 0
    layers: int = 0
    tokens: int = 0


@dataclass
class Simulation:
    """Replicas behind a router."""

    settings: Settings
    router: Routing
    time: StepTime
    requests: list[Request] = field(default_factory=list)
    counted: Counted = field(default_factory=Counted)

    def __post_init__(self) -> None:
        self.replicas = [Replica(self.settings) for _ in range(self.settings.replicas)]
        self._schedule = self.settings.schedule
        self._ends: list[tuple[float, int]] = []

    def run(self, arrivals: Sequence[Arrival], watch: Callable[[], Any] = lambda: None) -> None:
        """Take every request to its end; `watch` hears of each arrival."""
        for arrival in arrivals:
            self._advance(arrival.time)
            busy = {str(nth): replica.outstanding for nth, replica in enumerate(self.replicas)}
            place = int(self.router.choose(arrival.time, b"%d" % arrival.prefix, busy))
            self.replicas[place].scheduler.add(self._sequence(arrival))
            self.requests.append(Request(arrival.time))
            if self.replicas[place].plan is None:
                self._begin(place, arrival.time)
            watch()
        self._advance(float("inf"))

    def _sequence(self, arrival: Arrival) -> TokenSequence:
        number, settings = len(self.requests), self.settings
        own = [settings.prefixes + number % 1000] * settings.own_tokens
        prompt = [arrival.prefix] * settings.prefix_tokens + own
        return fake_sequence(number, prompt, arrival.tokens, self._schedule, shares_prompt=True)

    def _advance(self, until: float) -> None:
        """Let the steps that end by `until` end, and the next ones begin."""
        while self._ends and self._ends[0][0] <= until:
            now, place = heapq.heappop(self._ends)
            for number in self.replicas[place].end():
                request = self.requests[number]
                request.first_token = request.first_token or now
                request.last_token = now
                request.tokens += 1
            self._begin(place, now)

    def _begin(self, place: int, now: float) -> None:
        plan = self.replicas[place].begin()
        if plan is None:
            return
        heapq.heappush(self._ends, (now + self.time.of(plan), place))
        if self.settings.warm_up <= now < self.settings.seconds:
            self.counted.steps += 1
            self.counted.layers += layers_run(plan)
            self.counted.tokens += len(plan.sampled)


def simulate(
    settings: Settings, routing: str, kind: str, load: float, seed: int, watch: Callable[[], Any] = lambda: None
) -> dict[str, float]:
    """The figures of one run; times in milliseconds."""
    time = StepTime()
    simulation = Simulation(settings, ROUTERS[routing](settings.window), time)
    simulation.run(draw_arrivals(settings, kind, settings.rate(load, time), seed), watch)
    counted = simulation.counted
    waits = [1000 * (r.first_token - r.arrived) for r in simulation.requests if r.arrived >= settings.warm_up]
    paces = [
        1000 * (r.last_token - r.first_token) / (r.tokens - 1)
        for r in simulation.requests
        if r.arrived >= settings.warm_up and r.tokens > 1
    ]
    counters = [replica.scheduler.counters for replica in simulation.replicas]
    return {
        "layers_saved": settings.num_layers * counted.steps / counted.layers,
        "tokens_per_second": counted.tokens / (settings.seconds - settings.warm_up),
        "wait": float(np.mean(waits)),
        "wait_95": float(np.quantile(waits, 0.95)),
        "time_per_token": float(np.mean(paces)),
        "cached": sum(c.cached_prompt_tokens for c in counters) / sum(c.prompt_tokens for c in counters),
    }


def measure(
    settings: Settings, routings: Sequence[str], kinds: Sequence[str], loads: Sequence[float]
) -> dict[str, Any]:
    """Every routing under every kind of arrival and load, over the seeds; without the environment."""
    cells = []
    every = list(product(kinds, loads, routings))
    with tqdm(total=len(every) * settings.seeds, unit="run", disable=None) as bar:
        for kind, load, routing in every:
            runs = []
            for seed in range(settings.seeds):
                bar.set_description(f"{kind}, load {load:g}, {routing}")
                runs.append(simulate(settings, routing, kind, load, seed, bar.refresh))
                bar.update()
            figures = {name: summary([run[name] for run in runs]) for name in runs[0]}
            cells.append({"arrivals": kind, "load": load, "routing": routing, **figures})
    return {
        "benchmark": "cluster",
        "settings": asdict(settings),
        "step_time": asdict(StepTime()),
        "requests_per_second": {f"{load:g}": settings.rate(load, StepTime()) for load in loads},
        "cells": cells,
    }


# -- the page --------------------------------------------------------------------------------------------------


COLUMNS = {
    "layers_saved": ("layers saved", 1.0, 2),
    "tokens_per_second": ("tokens/s", 1.0, 0),
    "wait": ("mean wait, ms", 1.0, 0),
    "wait_95": ("95 % of waits, ms", 1.0, 0),
    "time_per_token": ("ms per token", 1.0, 2),
    "cached": ("prompt tokens cached, %", 100.0, 0),
}
"""Figure -> heading, what it is multiplied by, and digits after the point."""


def show(report: dict[str, Any], console: Console) -> None:
    """Print one row a cell: the median over the seeds, and the least and the most."""
    settings = Settings(**report["settings"])
    policy = "full depth" if settings.alpha == 1 else policy_in_words(D3(settings.alpha, settings.start))
    console.print(
        f"{settings.replicas} replicas of {settings.slots} slots, {settings.num_layers} layers, {policy},"
        f" {settings.tokens} tokens an answer on average, admission every"
        f" {'step' if settings.admit_every == 1 else f'{settings.admit_every} steps'}, {settings.seeds} seeds of"
        f" {settings.seconds:g} s ({settings.warm_up:g} s not counted)"
    )
    about = ("arrivals", "load", "routing")
    rows = [
        (
            *(cell["arrivals"], f"{cell['load']:g}", cell["routing"]),
            *(_spread(cell[name], scale, digits) for name, (_, scale, digits) in COLUMNS.items()),
        )
        for cell in report["cells"]
    ]
    print_table(console, (*about, *(title for title, *_ in COLUMNS.values())), rows, left=about)


def _spread(figure: dict[str, Any], scale: float, digits: int) -> str:
    median, least, most = (f"{figure[name] * scale:.{digits}f}" for name in ("median", "min", "max"))
    return median if least == most else f"{median} ({least}-{most})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the simulation and print its table."""
    parser = Parser("cluster", __doc__, arguments, Settings)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.8], help="over what full depth could serve")
    parser.add_argument("--arrivals", nargs="+", choices=ARRIVALS, default=list(ARRIVALS))
    parser.add_argument("--routings", nargs="+", choices=list(ROUTERS), default=list(ROUTERS))
    options = parser.given()
    settings = settings_of(Settings, options)
    if not 0 <= settings.warm_up < settings.seconds:
        parser.error(f"--warm-up {settings.warm_up} leaves none of --seconds {settings.seconds}")
    if min(options.loads) <= 0:
        parser.error(f"--loads {min(options.loads)} is not above 0")
    parser.publish(measure(settings, options.routings, options.arrivals, options.loads), show, width=160)
    return 0


if __name__ == "__main__":
    sys.exit(main())
