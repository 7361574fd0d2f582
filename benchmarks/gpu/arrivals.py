"""Continuous batching: requests arrive at random, and every strategy meets the same arrivals.

Waits count from the planned arrival. A run lasts a fixed time, of which the first quarter fills the batch uncounted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np

from benchmarks.gpu.common import Round
from benchmarks.gpu.end_to_end import BBH
from benchmarks.gpu.models import graph_figures, new_engine, params_for, random_model
from d3engine.depth import DepthPolicy, FullDepth
from d3engine.engine.engine import Engine
from d3engine.executor.graph_shapes import batch_sizes
from d3engine.request.admission import Admission, Immediate, IntervalAdmission
from d3engine.request.outputs import RequestOutput

LOADS = (0.7, 0.9, 0.4)
"""Arrival rates as parts of what the engine generates at full depth while it never idles."""
UNCOUNTED = 0.25
LONGEST_RUN_S = 15.0
SHORTEST_RUN_S = 4.0
CAPTURED_TOKENS = 64
"""Of an answer under `BBH`: behind them its layers stay the same."""


@dataclass(frozen=True)
class Traffic:
    """Sizes of requests, drawn evenly between the bounds, and how many run at once."""

    prompts: tuple[int, int] = (32, 512)
    answers: tuple[int, int] = (64, 256)
    slots: int = 64
    wave: int = 32

    @property
    def mean_answer(self) -> float:
        """Tokens of an answer on average."""
        return sum(self.answers) / 2


@dataclass(frozen=True)
class Arrival:
    """One request: when it comes, in seconds from the start, and what it asks for."""

    time: float
    prompt: list[int]
    tokens: int


@dataclass
class Switchable:
    """An admission strategy that can be exchanged, so that one engine, and its graphs, serve all runs."""

    current: Admission = field(default_factory=Immediate)

    def admits(self, engine_step: int) -> bool:
        """As the strategy of now says."""
        return self.current.admits(engine_step)


@dataclass
class Watched:
    """What the counted part of one run has shown."""

    start: float  # on the monotonic clock, from which arrivals are counted
    tokens: int = 0
    steps: int = 0
    finished: list[tuple[Arrival, RequestOutput]] = field(default_factory=list)
    kv: list[tuple[int, int]] = field(default_factory=list)  # bytes in use, bytes saved


def run(report: dict[str, Any], current: Round) -> None:
    """Fill in one row for each load, admission and depth."""
    traffic = Traffic() if current.on_gpu else Traffic((4, 12), (4, 10), slots=4, wave=4)
    longest = traffic.prompts[1] + traffic.answers[1]
    report.update(traffic=vars(traffic) | {"mean_answer": traffic.mean_answer}, mode=current.mode, rows=[])
    with random_model("llama2-7b", current) as model:
        report["model"], admission = model.card(), Switchable()
        engine = new_engine(
            model,
            current,
            max_num_seqs=traffic.slots,
            max_model_len=longest + 16,
            kv_tokens=traffic.slots * (longest + 16),
            admission=admission,
        )
        strategies = [
            (admit, policy) for admit in (Immediate(), IntervalAdmission(traffic.wave)) for policy in (FullDepth(), BBH)
        ]
        capture_all(engine, traffic)
        seconds = min(LONGEST_RUN_S, (current.left() - 10) / (len(LOADS) * len(strategies) + 1))
        seconds = max(seconds, SHORTEST_RUN_S) if current.on_gpu else 0.5
        report["seconds_a_run"] = seconds
        full = play(engine, saturating(traffic, model.config.vocab_size), FullDepth(), seconds)
        capacity = full.tokens / (seconds * (1 - UNCOUNTED))
        report["saturated_tokens_per_s"] = capacity
        for load in LOADS if current.on_gpu else LOADS[:1]:
            rate = load * capacity / traffic.mean_answer
            for admit, policy in strategies:
                if current.left() < seconds + 2:
                    report["stopped"] = f"time: before {admit} and {policy} at load {load}"
                    return
                admission.current = admit
                before = graph_figures(engine)
                arrivals = poisson(traffic, rate, seconds, model.config.vocab_size)
                watched = play(engine, arrivals, policy, seconds)
                row = {"load": load, "requests_per_s": rate, "admission": str(admit), "policy": policy.describe()}
                row |= summarise(watched, arrivals, seconds)
                row["graphs"] = {"before": before, "after": graph_figures(engine)}
                report["rows"].append(row)
                current.keep(report)
        engine.close()


def capture_all(engine: Engine, traffic: Traffic) -> None:
    """Answer batches of every size under both policies: no run that is timed waits for the capture of a graph."""
    for size, (policy, tokens) in product(batch_sizes(traffic.slots), ((FullDepth(), 2), (BBH, CAPTURED_TOKENS))):
        engine.generate([[3, 4]] * size, params_for(policy, tokens), use_tqdm=False)


def poisson(traffic: Traffic, rate: float, seconds: float, vocabulary: int) -> list[Arrival]:
    """Requests that come at random at `rate` a second; equal arguments give equal requests."""
    numbers = np.random.default_rng(0)
    arrivals, now = [], 0.0
    while (now := now + float(numbers.exponential(1 / rate))) < seconds:
        prompt = numbers.integers(3, vocabulary, int(numbers.integers(*traffic.prompts, endpoint=True))).tolist()
        arrivals.append(Arrival(now, prompt, int(numbers.integers(*traffic.answers, endpoint=True))))
    return arrivals


def saturating(traffic: Traffic, vocabulary: int) -> list[Arrival]:
    """More requests than any run can answer, all there from the start."""
    numbers, count = np.random.default_rng(1), 64 * traffic.slots
    length = sum(traffic.prompts) // 2
    prompts = numbers.integers(3, vocabulary, (count, length)).tolist()
    return [Arrival(0.0, prompt, int(traffic.mean_answer)) for prompt in prompts]


def play(engine: Engine, arrivals: Sequence[Arrival], depth: DepthPolicy, seconds: float) -> Watched:
    """Let the requests arrive for a given number of seconds, then end those that are left."""
    waiting, seen = list(reversed(arrivals)), dict[str, int]()
    by_id = {str(nth): arrival for nth, arrival in enumerate(arrivals)}
    names = iter(by_id)
    watched = Watched(time.monotonic())
    while (now := time.monotonic() - watched.start) < seconds and (waiting or engine.has_unfinished_requests()):
        while waiting and waiting[-1].time <= now:
            arrival = waiting.pop()
            engine.add_request(next(names), arrival.prompt, params_for(depth, arrival.tokens))
        if not engine.has_unfinished_requests():
            time.sleep(0.0005)
            continue
        outputs = engine.step()
        counted = time.monotonic() - watched.start >= UNCOUNTED * seconds
        for output in outputs:
            grown = len(output.outputs[0].token_ids) - seen.get(output.request_id, 0)
            seen[output.request_id] = len(output.outputs[0].token_ids)
            watched.tokens += grown if counted else 0
            if output.finished and by_id[output.request_id].time >= UNCOUNTED * seconds:
                watched.finished.append((by_id[output.request_id], output))
        watched.steps += counted
        if counted and watched.steps % 8 == 0:
            stats = engine.stats()
            watched.kv.append((stats.kv_bytes_in_use, stats.kv_bytes_saved))
    engine.abort_request(list(by_id))
    while engine.has_unfinished_requests():
        engine.step()
    return watched


def summarise(watched: Watched, arrivals: Sequence[Arrival], seconds: float) -> dict[str, Any]:
    """Throughput, waits and what D3 has saved, over the counted part of a run.

    Waits are those of requests that arrived and finished in it; `unfinished` says how many that leaves out. The first
    token runs every layer under any policy, so `mean_layers` leaves it out.
    """
    first, later, depths = [], [], []
    for arrival, output in watched.finished:
        metrics, answer = output.metrics, output.outputs[0]
        assert metrics.first_token_time is not None
        assert metrics.finished_time is not None
        first.append(metrics.first_token_time - watched.start - arrival.time)
        later.append((metrics.finished_time - metrics.first_token_time) / (arrival.tokens - 1))
        depths += answer.depths[1:]
    counted = sum(UNCOUNTED * seconds <= arrival.time for arrival in arrivals)
    held, saved = (sum(column) for column in zip(*watched.kv, strict=True)) if watched.kv else (0, 0)
    return {
        "tokens_per_s": watched.tokens / (seconds * (1 - UNCOUNTED)),
        "steps": watched.steps,
        "arrived": counted,
        "unfinished": counted - len(watched.finished),
        "first_token_s": spread(first),
        "a_token_s": spread(later),
        "mean_layers": statistics.fmean(depths) if depths else None,
        "kv_bytes_held": held / len(watched.kv) if watched.kv else None,
        "kv_bytes_saved": saved / len(watched.kv) if watched.kv else None,
        "kv_saved": saved / (held + saved) if held + saved else None,
    }


def spread(values: list[float]) -> dict[str, float] | None:
    """Median and 95th percentile; None of nothing."""
    return {"median": float(np.median(values)), "p95": float(np.percentile(values, 95))} if values else None
