"""Meters: what a server counts of its requests, beside what the engine counts of its steps.

The one idea: nothing is kept of a request but counts in buckets, and every label has a fixed set of values, so that no
client can make them grow.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Literal, TypeAlias

from d3engine.depth import DepthPolicy, FullDepth
from d3engine.request.outputs import FinishReason, RequestOutput
from d3engine.request.prepared import EngineRequest
from d3engine.request.timings import REQUEST_SECONDS, HistogramCounter
from d3engine.server.guards.exchange import RequestLog

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
        self._own = own
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
        """The meter of a request, for as long as somebody reads it."""
        meter = RequestMeter(self, prepared)
        try:
            yield meter
        finally:
            meter.leave()

    def label_of(self, depth: DepthPolicy | None) -> PolicyLabel:
        """The value of the label `policy` for what a request asked for."""
        if depth is None or depth == self._own:
            return "default"
        return "full" if isinstance(depth, FullDepth) else "other"

    def count_exchange(self, exchange: RequestLog) -> None:
        """Count a request over HTTP that has ended."""
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
        self._policy = meters.label_of(prepared.params.depth)
        self._num_sequences = prepared.params.n
        self._num_tokens = 0
        self._num_ended = 0
        self._last: float | None = None

    def see(self, output: RequestOutput) -> None:
        """The next output."""
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
        """Nobody looks at it any more: what has not ended was aborted."""
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
