"""The metrics as Prometheus reads them: vLLM's names where it has one, behind a prefix of the owner's choice.

The one idea: every name is in one of the tables here, beside what it says and where it comes from.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from d3engine.async_engine.client import EngineClient
from d3engine.errors import EngineClosedError, EngineDeadError
from d3engine.request.timings import Histogram, HistogramCounter
from d3engine.server.guards.traffic import AdmissionControl
from d3engine.server.metrics.meters import FINISH_REASONS, POLICIES, REJECTIONS, ROUTES, STATUSES, Meters
from d3engine.stats import EngineStats

STATS_SECONDS = 2.0
"""How long a scrape waits for the engine; after that it tells what it knew before."""

GAUGES: Sequence[tuple[str, str, Callable[[EngineStats], float | None]]] = (
    ("num_requests_running", "Sequences in the batch.", lambda s: s.num_running),
    ("num_requests_waiting", "Sequences that wait for a place in the batch.", lambda s: s.num_waiting),
    (
        "kv_cache_usage_perc",
        "Share of the KV cache in use, 1 is all.",
        lambda s: s.kv_blocks_in_use / s.kv_blocks_total,
    ),
    ("kv_bytes_saved", "Bytes that full depth would hold on top.", lambda s: s.kv_bytes_saved),
    ("engine_last_step_timestamp_seconds", "End of the last step, Unix time.", lambda s: _unix_time(s.last_step_time)),
)
COUNTERS: Sequence[tuple[str, str, Callable[[EngineStats], float]]] = (
    ("num_preemptions", "Sequences that lost their place to others.", lambda s: s.num_preemptions),
    ("prompt_tokens", "Tokens of prompts.", lambda s: s.prompt_tokens),
    ("prompt_tokens_cached", "Tokens of prompts found in the prefix cache.", lambda s: s.cached_prompt_tokens),
    ("prefix_cache_queries", "Tokens looked for in the prefix cache.", lambda s: s.prompt_tokens),
    ("prefix_cache_hits", "Tokens found in the prefix cache.", lambda s: s.cached_prompt_tokens),
    ("generation_tokens", "Tokens generated.", lambda s: s.generated_tokens),
    (
        "kv_bytes_saved_at_end",
        "The same as kv_bytes_saved, of each sequence at its end.",
        lambda s: s.kv_bytes_saved_at_end,
    ),
    ("engine_steps", "Steps of the engine.", lambda s: s.num_steps),
)
ENGINE_HISTOGRAMS: Sequence[tuple[str, str, Callable[[EngineStats], Histogram]]] = (
    ("step_seconds", "Seconds of a step.", lambda s: s.step_seconds),
    ("iteration_tokens_total", "Rows of a step: tokens of prompts and of answers.", lambda s: s.step_rows),
    ("request_queue_time_seconds", "Seconds from arrival to the batch.", lambda s: s.queue_seconds),
    ("request_prefill_time_seconds", "Seconds from the batch to the first token.", lambda s: s.prefill_seconds),
    ("request_decode_time_seconds", "Seconds from the first token to the last.", lambda s: s.decode_seconds),
)
REQUEST_HISTOGRAMS: Sequence[tuple[str, str, Callable[[Meters], HistogramCounter]]] = (
    (
        "time_to_first_token_seconds",
        "Seconds from arrival to the first token.",
        lambda m: m.first_token_seconds,
    ),
    (
        "inter_token_latency_seconds",
        "Seconds between tokens as they come.",
        lambda m: m.inter_token_seconds,
    ),
    (
        "request_time_per_output_token_seconds",
        "Their mean after the first.",
        lambda m: m.time_per_token,
    ),
    ("e2e_request_latency_seconds", "Seconds from arrival to the end.", lambda m: m.e2e_seconds),
    ("request_prompt_tokens", "Tokens of a prompt.", lambda m: m.prompt_tokens),
    ("request_generation_tokens", "Tokens generated for a request.", lambda m: m.generation_tokens),
)


def _unix_time(monotonic: float | None) -> float | None:
    return None if monotonic is None else time.time() - (time.monotonic() - monotonic)


class Exposition:
    """Writes the metrics of one app; keeps what the engine said last, for when it is slow to answer."""

    def __init__(self, prefix: str) -> None:
        self._prefix = f"{prefix}:"
        self._stats: EngineStats | None = None

    async def text(self, client: EngineClient, traffic: AdmissionControl, meters: Meters) -> bytes:
        """All of them, in Prometheus' text format; never waits long for the engine, which may hang."""
        with suppress(TimeoutError, EngineDeadError, EngineClosedError):
            self._stats = await asyncio.wait_for(client.stats(), STATS_SECONDS)
        return _text(self._families(client, traffic, meters))

    def text_of_engine(self, stats: EngineStats) -> bytes:
        """Those of the engine alone, for a stack that counts requests itself."""
        return _text(self._engine_families(stats))

    def _families(self, client: EngineClient, traffic: AdmissionControl, meters: Meters) -> Iterable[Metric]:
        yield self._gauge("engine_up", "1 while the engine lives.", client.heartbeat().error is None)
        yield self._gauge("num_requests_in_flight", "Places taken, running or waiting.", traffic.taken)
        yield self._counts(
            "request_success", "Sequences that ended.", "finished_reason", FINISH_REASONS, meters.finished
        )
        what = "Requests refused before they were run."
        yield self._counts("admission_rejections", what, "reason", REJECTIONS, meters.rejections)
        yield self._answered(meters)
        what = "Layers run for the tokens of requests."
        yield self._counts("layers_run", what, "policy", POLICIES, meters.layers_run)
        what = "Layers that full depth would have run for them."
        yield self._counts("layers_full", what, "policy", POLICIES, meters.layers_full)
        for name, what, tally in REQUEST_HISTOGRAMS:
            yield self._histogram(name, what, tally(meters).histogram())
        if self._stats is not None:
            yield from self._engine_families(self._stats)

    def _engine_families(self, stats: EngineStats) -> Iterable[Metric]:
        for name, what, gauge in GAUGES:
            if (value := gauge(stats)) is not None:
                yield self._gauge(name, what, value)
        for name, what, counter in COUNTERS:
            yield CounterMetricFamily(self._prefix + name, what, value=counter(stats))
        for name, what, histogram in ENGINE_HISTOGRAMS:
            yield self._histogram(name, what, histogram(stats))
        yield self._token_layers(stats)

    def _token_layers(self, stats: EngineStats) -> Metric:
        """A bucket for each number of layers; a draft's share that is more than all of them counts as all."""
        bounds = tuple(float(layers) for layers in range(len(stats.token_layers)))
        known = Histogram(bounds, (*stats.token_layers, 0), float(stats.layers_run))
        return self._histogram("token_layers", "Layers run for a token.", known)

    def _answered(self, meters: Meters) -> Metric:
        name, what = self._prefix + "http_requests", "Requests over HTTP that have ended."
        family = CounterMetricFamily(name, what, labels=("route", "status"))
        for route in ROUTES:
            for status in STATUSES:
                family.add_metric((route, status), meters.answered[route, status])
        return family

    def _counts(self, name: str, what: str, label: str, values: Sequence[str], counts: Mapping[str, int]) -> Metric:
        family = CounterMetricFamily(self._prefix + name, what, labels=(label,))
        for value in values:
            family.add_metric((value,), counts.get(value, 0))
        return family

    def _gauge(self, name: str, what: str, value: float) -> Metric:
        return GaugeMetricFamily(self._prefix + name, what, value=value)

    def _histogram(self, name: str, what: str, found: Histogram) -> Metric:
        buckets, total = [], 0
        for bound, count in zip((*found.bounds, float("inf")), found.counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else str(bound), float(total)))
        return HistogramMetricFamily(self._prefix + name, what, buckets=buckets, sum_value=found.sum)


def _text(families: Iterable[Metric]) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collected(list(families)))
    return generate_latest(registry)


class _Collected(Collector):
    """Families that are there already."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
