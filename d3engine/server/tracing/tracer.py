"""The tracer of an app: what has been told of a request becomes a span when the request has ended."""

from __future__ import annotations

from starlette.types import Scope

from d3engine.errors import MissingExtraError
from d3engine.server.tracing.request_trace import Attributes, RequestTrace

PACKAGES = {
    "opentelemetry.sdk": "opentelemetry-sdk",
    "opentelemetry.exporter.otlp.proto.http": "opentelemetry-exporter-otlp-proto-http",
}
"""Of the extra: what is imported -> what is installed."""


class Tracer:
    """Sends the spans of one app to `endpoint`. Raises `MissingExtraError` without the extra `otel`."""

    def __init__(self, endpoint: str) -> None:
        require_tracing_packages("otlp_traces_endpoint")
        from d3engine.server.tracing.spans import SpanWriter

        self._writer = SpanWriter(endpoint)

    def write(self, trace: RequestTrace, scope: Scope, answered: Attributes, error: str | None) -> None:
        """A request has ended: how it was `answered`, and one word for what kept it from its end, if anything did."""
        attributes = trace.attributes() | answered
        self._writer.write(trace.name, _carrier(scope), attributes, error, trace.began_ns, trace.ended_ns)

    def close(self) -> None:
        """Send what is not sent yet, as far as the collector takes it."""
        self._writer.close()


def require_tracing_packages(what: str) -> None:
    """Raise `MissingExtraError` where they are not installed."""
    for module, package in PACKAGES.items():
        try:
            __import__(module)
        except ImportError:
            raise MissingExtraError(package, "otel", what) from None


def trace_of(scope: Scope) -> RequestTrace | None:
    """The trace of a request, where there is one."""
    found: RequestTrace | None = scope.get("state", {}).get("trace")
    return found


def _carrier(scope: Scope) -> dict[str, str]:
    """The headers that say whose child the span is; of two parents neither is taken."""
    parents = _values(scope, b"traceparent")
    states = _values(scope, b"tracestate")
    return {"traceparent": parents[0], "tracestate": ",".join(states)} if len(parents) == 1 else {}


def _values(scope: Scope, key: bytes) -> list[str]:
    return [value.decode("latin-1") for name, value in scope["headers"] if name == key]
