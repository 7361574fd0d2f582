"""What a trace has of one request: numbers and words of the server's own, never a prompt, an answer or a message."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TypeAlias

from d3engine.errors import MissingExtraError
from d3engine.request.engine_request import EngineRequest
from d3engine.request.outputs import FinishReason, RequestMetrics, RequestOutput

Attributes: TypeAlias = dict[str, str | int | float | list[str]]

PROVIDER = "d3engine"


class RequestTrace:
    """Of a request for an answer; `operation` is OpenTelemetry's word for it: "chat" or "text_completion"."""

    def __init__(self, operation: str, route: str) -> None:
        self.began_ns = time.time_ns()
        self._began = time.monotonic_ns()
        self._operation = operation
        self._route = route
        self._model: str | None = None
        self._asked: Attributes = {}
        self._num_layers = 0
        self._reasons: list[list[str]] = []
        self._num_tokens = 0
        self._layers_run = 0
        self._unfinished = 0
        self._times: RequestMetrics | None = None

    @property
    def name(self) -> str:
        """Of the span; a model is in it only if this server has it, so that there are few names."""
        return self._operation if self._model is None else f"{self._operation} {self._model}"

    @property
    def ended_ns(self) -> int:
        """Now, in nanoseconds since the epoch: as long after its beginning as the monotonic clock says."""
        return self.began_ns + time.monotonic_ns() - self._began

    @property
    def is_unfinished(self) -> bool:
        """Whether the engine began on it and has not told its end to anybody."""
        return self._unfinished > 0

    def asked(self, answer_id: str, model: str, depth: str, num_layers: int, prepared: Sequence[EngineRequest]) -> None:
        """It was found good, and goes to the engine; `depth` names its policy."""
        params = prepared[0].params  # all prompts of a request have the same
        self._model, self._num_layers = model, num_layers
        self._asked = {
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
            "gen_ai.response.id": answer_id,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.usage.input_tokens": sum(len(one.prompt_token_ids) for one in prepared),
            "d3engine.depth.policy": depth,
        }
        if params.max_tokens is not None:
            self._asked["gen_ai.request.max_tokens"] = params.max_tokens
        if params.n > 1:
            self._asked["gen_ai.request.choice.count"] = params.n
        self._reasons = [[FinishReason.ABORT.value] * params.n for _ in prepared]
        self._unfinished = len(prepared)

    def see(self, number: int, output: RequestOutput) -> None:
        for answer in output.outputs:
            self._num_tokens += len(answer.token_ids)
            self._layers_run += sum(answer.depths)
            if answer.finish_reason is not None:
                self._reasons[number][answer.index] = str(answer.finish_reason)
        self._times = output.metrics
        self._unfinished -= output.finished

    def attributes(self) -> Attributes:
        """All that is known of it. Times are in seconds, and of the prompt that was last heard of."""
        found: Attributes = {
            "gen_ai.operation.name": self._operation,
            "gen_ai.provider.name": PROVIDER,
            "http.request.method": "POST",
            "http.route": self._route,
            **self._asked,
        }
        if self._reasons:
            found["gen_ai.response.finish_reasons"] = [reason for reasons in self._reasons for reason in reasons]
            found["gen_ai.usage.output_tokens"] = self._num_tokens
            found["d3engine.layers_run"] = self._layers_run
            found["d3engine.layers_saved"] = self._num_layers * self._num_tokens - self._layers_run
        if self._num_tokens:
            found["d3engine.mean_layers"] = self._layers_run / self._num_tokens
        if (times := self._times) is not None:
            ended, first = times.finished_time, times.first_token_time
            latencies = {  # vLLM's names
                "time_in_queue": times.queue_seconds,
                "time_in_model_prefill": times.prefill_seconds,
                "time_in_model_decode": times.decode_seconds,
                "time_to_first_token": None if first is None else first - times.arrival_time,
                "e2e": None if ended is None else ended - times.arrival_time,
            }
            found |= {f"gen_ai.latency.{name}": given for name, given in latencies.items() if given is not None}
        return found


PACKAGES = {
    "opentelemetry.sdk": "opentelemetry-sdk",
    "opentelemetry.exporter.otlp.proto.http": "opentelemetry-exporter-otlp-proto-http",
}
"""Of the extra: what is imported -> what is installed."""


def require_tracing_packages(what: str) -> None:
    """Raise `MissingExtraError` where they are not installed."""
    for module, package in PACKAGES.items():
        try:
            __import__(module)
        except ImportError:
            raise MissingExtraError(package, "otel", what) from None
