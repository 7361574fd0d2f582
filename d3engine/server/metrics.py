"""What a server counts of its requests, as Prometheus reads it with what the engine counts of its steps."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import product
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from d3engine.depth import DepthPolicy, FullDepth
from d3engine.engine.stats import EngineStats
from d3engine.errors import EngineClosedError, EngineDeadError
from d3engine.request.engine_request import EngineRequest
from d3engine.request.outputs import REQUEST_SECONDS, FinishReason, Histogram, HistogramCounter, RequestOutput
from d3engine.server.middleware.limits import AdmissionControl
from d3engine.server.middleware.request_log import RequestLog

if TYPE_CHECKING:
    from d3engine.async_engine.async_engine import AsyncEngine

PolicyLabel: TypeAlias = Literal["default", "full", "other"]
POLICIES: Final[tuple[PolicyLabel, ...]] = ("default", "full", "other")
FINISH_REASONS: Final = tuple(reason.value for reason in FinishReason)
REJECTIONS: Final = (
    "body_timeout",
    "body_too_long",
    "draining",
    "host_not_allowed",
    "invalid_api_key",
    "json_out_of_bounds",
    "queue_full",
    "request_timeout",
    "unsupported_media_type",
)
"""Codes of the errors by which guards refuse, as values of the label `reason`."""
STATUSES: Final = ("2xx", "4xx", "5xx", "left")
ROUTES: Final = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/models",
    "/tokenize",
    "/detokenize",
    "other",
)
"""Values of the label `route`; a path that is none of them is "other", however many are tried."""
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
TOKEN_SECONDS = (1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 10.0)


class Meters:
    """All that one app counts by itself. `own` is the engine's own policy, under the label "default"."""

    def __init__(self, own: DepthPolicy, num_layers: int) -> None:
        self.own = own
        self.num_layers = num_layers
        self.finished: Counter[str] = Counter()
        self.rejections: Counter[str] = Counter()
        self.answered: Counter[tuple[str, str]] = Counter()
        self.layers_run: dict[str, int] = dict.fromkeys(POLICIES, 0)
        self.layers_full: dict[str, int] = dict.fromkeys(POLICIES, 0)
        self.prompt_tokens = HistogramCounter(TOKENS)
        self.generation_tokens = HistogramCounter(TOKENS)
        self.first_token_seconds = HistogramCounter(REQUEST_SECONDS)
        self.inter_token_seconds = HistogramCounter(TOKEN_SECONDS)
        self.time_per_token = HistogramCounter(TOKEN_SECONDS)
        self.e2e_seconds = HistogramCounter(REQUEST_SECONDS)

    @contextmanager
    def request(self, prepared: EngineRequest) -> Iterator[RequestMeter]:
        """The meter of a request, for as long as a client reads it."""
        meter = RequestMeter(self, prepared)
        try:
            yield meter
        finally:
            meter.leave()

    def count_exchange(self, exchange: RequestLog) -> None:
        path = "/v1/models" if exchange.path.startswith("/v1/models/") else exchange.path
        route = path if path in ROUTES else "other"
        kind = "left" if exchange.status == 499 else f"{exchange.status // 100}xx"
        self.answered[route, kind if kind in STATUSES else "2xx"] += 1
        if exchange.code in REJECTIONS:
            self.rejections[exchange.code] += 1


class RequestMeter:
    """Counts one request of the engine, whose outputs it is shown as they come: deltas, or one at the end."""

    def __init__(self, meters: Meters, prepared: EngineRequest) -> None:
        self._meters = meters
        depth = prepared.params.depth
        is_own = depth is None or depth == meters.own
        self._policy: PolicyLabel = "default" if is_own else "full" if isinstance(depth, FullDepth) else "other"
        self._num_sequences = prepared.params.n
        self._num_tokens = 0
        self._num_ended = 0
        self._last: float | None = None

    def see(self, output: RequestOutput) -> None:
        now = time.monotonic()
        meters, num_new, num_run, num_full = self._meters, 0, 0, 0
        for answer in output.outputs:
            num_new += len(answer.token_ids)
            num_run += sum(answer.depths)
            num_full += len(answer.depths) * meters.num_layers
            if answer.finish_reason is not None:
                meters.finished[answer.finish_reason] += 1
                self._num_ended += 1
        if num_new:
            self._num_tokens += num_new
            meters.layers_run[self._policy] += num_run
            meters.layers_full[self._policy] += num_full
            if self._last is not None:
                meters.inter_token_seconds.add((now - self._last) / num_new, num_new)
            self._last = now
        if output.finished:
            self._end(output)

    def leave(self) -> None:
        """The client has left: what has not ended was aborted."""
        self._meters.finished[FinishReason.ABORT.value] += self._num_sequences - self._num_ended
        self._num_ended = self._num_sequences

    def _end(self, output: RequestOutput) -> None:
        meters, times = self._meters, output.metrics
        meters.prompt_tokens.add(len(output.prompt_token_ids))
        meters.generation_tokens.add(self._num_tokens)
        if times.finished_time is not None:
            meters.e2e_seconds.add(times.finished_time - times.arrival_time)
        if times.first_token_time is not None:
            meters.first_token_seconds.add(times.first_token_time - times.arrival_time)
        later = self._num_tokens - self._num_sequences
        if times.decode_seconds is not None and later > 0:
            meters.time_per_token.add(times.decode_seconds / later)


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
    ("spec_decode_num_drafts", "Drafts verified.", lambda s: s.verifications),
    ("spec_decode_num_draft_tokens", "Tokens drafted.", lambda s: s.drafted_tokens),
    ("spec_decode_num_accepted_tokens", "Drafted tokens accepted.", lambda s: s.accepted_tokens),
)
ENGINE_HISTOGRAMS: Sequence[tuple[str, str, Callable[[EngineStats], Histogram]]] = (
    ("step_seconds", "Seconds of a step.", lambda s: s.step_seconds),
    ("iteration_tokens_total", "Rows of a step: tokens of prompts and of answers.", lambda s: s.step_rows),
    ("request_queue_time_seconds", "Seconds from arrival to the batch.", lambda s: s.queue_seconds),
    ("request_prefill_time_seconds", "Seconds from the batch to the first token.", lambda s: s.prefill_seconds),
    ("request_decode_time_seconds", "Seconds from the first token to the last.", lambda s: s.decode_seconds),
)
REQUEST_HISTOGRAMS: Sequence[tuple[str, str, Callable[[Meters], HistogramCounter]]] = (
    ("time_to_first_token_seconds", "Seconds from arrival to the first token.", lambda m: m.first_token_seconds),
    ("inter_token_latency_seconds", "Seconds between tokens as they come.", lambda m: m.inter_token_seconds),
    ("request_time_per_output_token_seconds", "Their mean after the first.", lambda m: m.time_per_token),
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

    async def text(self, client: AsyncEngine, traffic: AdmissionControl, meters: Meters) -> bytes:
        """All of them, in Prometheus' text format; never waits long for the engine, which may hang."""
        with suppress(TimeoutError, EngineDeadError, EngineClosedError):
            self._stats = await asyncio.wait_for(client.stats(), STATS_SECONDS)
        return generate_latest(_Collected(self._families(client, traffic, meters)))

    def text_of_engine(self, stats: EngineStats) -> bytes:
        """Those of the engine alone, for a stack that counts requests itself."""
        return generate_latest(_Collected(self._engine_families(stats)))

    def _families(self, client: AsyncEngine, traffic: AdmissionControl, meters: Meters) -> Iterable[Metric]:
        yield self._gauge("engine_up", "1 while the engine lives.", client.heartbeat().error is None)
        yield self._sleep_state(client.heartbeat().is_sleeping)
        yield self._gauge("num_requests_in_flight", "Places taken, running or waiting.", traffic.taken)
        what = "Sequences that ended."
        yield self._counts("request_success", what, ("finished_reason",), FINISH_REASONS, meters.finished)
        what = "Requests refused before they were run."
        yield self._counts("admission_rejections", what, ("reason",), REJECTIONS, meters.rejections)
        what = "Requests over HTTP that have ended."
        yield self._counts("http_requests", what, ("route", "status"), product(ROUTES, STATUSES), meters.answered)
        what = "Layers run for the tokens of requests."
        yield self._counts("layers_run", what, ("policy",), POLICIES, meters.layers_run)
        what = "Layers that full depth would have run for them."
        yield self._counts("layers_full", what, ("policy",), POLICIES, meters.layers_full)
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
        # A bucket for each number of layers; a draft's share that is more than all of them counts as all.
        bounds = tuple(float(layers) for layers in range(len(stats.token_layers)))
        known = Histogram(bounds, (*stats.token_layers, 0), float(stats.layers_run))
        yield self._histogram("token_layers", "Layers run for a token.", known)
        what = "Accepted draft tokens by their place in the draft."
        places = {str(place): count for place, count in enumerate(stats.accepted_at)}
        yield self._counts("spec_decode_num_accepted_tokens_per_pos", what, ("position",), places, places)

    def _sleep_state(self, is_sleeping: bool) -> Metric:
        """vLLM's: of its three states the second, weights in the host's memory, is none of this engine's."""
        name = f"{self._prefix}engine_sleep_state"
        family = GaugeMetricFamily(name, "1 for the state that is.", labels=["sleep_state"])
        for state, is_so in (("awake", not is_sleeping), ("weights_offloaded", False), ("discard_all", is_sleeping)):
            family.add_metric((state,), is_so)
        return family

    def _counts(
        self, name: str, what: str, labels: Sequence[str], values: Iterable[Any], counts: Mapping[Any, int]
    ) -> Metric:
        """A count for each value of a label, or for each tuple of values of several."""
        family = CounterMetricFamily(self._prefix + name, what, labels=labels)
        for value in values:
            family.add_metric(value if isinstance(value, tuple) else (value,), counts.get(value, 0))
        return family

    def _gauge(self, name: str, what: str, value: float) -> Metric:
        return GaugeMetricFamily(self._prefix + name, what, value=value)

    def _histogram(self, name: str, what: str, found: Histogram) -> Metric:
        buckets, total = [], 0
        for bound, count in zip((*found.bounds, float("inf")), found.counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else str(bound), float(total)))
        return HistogramMetricFamily(self._prefix + name, what, buckets=buckets, sum_value=found.sum)


class _Collected(Collector):
    """Families that are there already."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(?P<labels>.*)\})? (?P<value>.*)")
LABEL = "replica"


def merged(texts: Mapping[str, str]) -> str:
    """Prometheus' texts of several servers, by their ids, as one; every name is described once."""
    families: dict[str, tuple[dict[str, None], list[str]]] = {}
    for replica, text in texts.items():
        found: tuple[dict[str, None], list[str]] = ({}, [])
        for line in filter(None, text.splitlines()):
            if line.startswith("# HELP "):
                found = families.setdefault(line.split(" ")[2], ({}, []))
            if line.startswith("#"):
                found[0].setdefault(line)
            else:
                sample = SAMPLE.fullmatch(line)
                assert sample is not None, line
                labels = ",".join(filter(None, (f'{LABEL}="{replica}"', sample["labels"])))
                found[1].append(f"{sample['name']}{{{labels}}} {sample['value']}")
    return "".join(f"{line}\n" for heads, samples in families.values() for line in (*heads, *samples))
