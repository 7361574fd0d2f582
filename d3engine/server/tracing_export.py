"""Spans on their way to a collector by OpenTelemetry's packages; one that is away costs spans, never a request."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import Scope

from d3engine.server.tracing import PROVIDER, Attributes, RequestTrace
from d3engine.utils.version import __version__

_log = logging.getLogger(__name__)

REPETITIVE = ("opentelemetry.exporter.otlp.proto.http.trace_exporter", "opentelemetry.sdk._shared_internal")
"""Loggers of theirs that complain of every batch that cannot be sent, and of every full queue."""

END_SECONDS = 2.0
"""How long the end waits for a collector; one export alone may hang for ten seconds, and the SDK waits for thirty."""

_is_ours: ContextVar[bool] = ContextVar("_is_ours", default=False)


class SpanWriter:
    """Makes spans and sends them to `endpoint`, the whole URL to which OTLP is posted.

    What else OpenTelemetry's own variables say (OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER, OTEL_EXPORTER_OTLP_HEADERS,
    OTEL_EXPORTER_OTLP_TRACES_TIMEOUT, OTEL_BSP_MAX_QUEUE_SIZE, ...) holds.
    """

    def __init__(self, endpoint: str) -> None:
        for name in REPETITIVE:
            logging.getLogger(name).addFilter(_of_others)
        exporter = _ToCollector(OTLPSpanExporter(endpoint=endpoint), endpoint)
        provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = provider.get_tracer("d3engine.server", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._end = weakref.finalize(self, _Ending(provider, exporter).end)  # with the process, if not before

    def write(self, trace: RequestTrace, scope: Scope, answered: Attributes, error: str | None) -> None:
        """A request has ended: how it was `answered`, and one word for what kept it from its end, if anything did."""
        ended_ns, attributes = trace.ended_ns, trace.attributes() | answered
        parent = self._propagator.extract(_carrier(scope), context=Context())
        span = self._tracer.start_span(
            trace.name, context=parent, kind=SpanKind.SERVER, attributes=attributes, start_time=trace.began_ns
        )
        if error is not None:
            span.set_attribute("error.type", error)
            span.set_status(Status(StatusCode.ERROR, error))
        with _in_our_name():
            span.end(ended_ns)

    def close(self) -> None:
        """Send what is queued, as far as the collector takes it within two seconds; further calls do nothing."""
        self._end()


def _carrier(scope: Scope) -> dict[str, str]:
    """The headers that say whose child a span is; of two parents neither is taken."""
    given = [(name, value.decode("latin-1")) for name, value in scope["headers"]]
    parents, states = ([value for name, value in given if name == key] for key in (b"traceparent", b"tracestate"))
    return {"traceparent": parents[0], "tracestate": ",".join(states)} if len(parents) == 1 else {}


class _ToCollector(SpanExporter):
    """The exporter, which says once that its collector is away, and once that it is back."""

    def __init__(self, inner: SpanExporter, endpoint: str) -> None:
        self._inner = inner
        self._where = urlsplit(endpoint).netloc
        self._is_failing = False
        self._is_closing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send a batch. While it closes, the first that fails is the last that is tried."""
        if self._is_closing and self._is_failing:
            return SpanExportResult.FAILURE
        with _in_our_name():
            result = self._inner.export(spans)
        self._tell(result is not SpanExportResult.SUCCESS)
        return result

    def _tell(self, is_failing: bool) -> None:
        if is_failing and not self._is_failing:
            _log.warning("%s takes no traces; they are lost until it does", self._where)
        elif self._is_failing and not is_failing:
            _log.warning("%s takes traces again", self._where)
        self._is_failing = is_failing

    def tell_of_loss(self) -> None:
        _log.warning("%s did not take the last traces within %g seconds; they are lost", self._where, END_SECONDS)

    def begin_to_close(self) -> None:
        """Wait no more for a collector that is away."""
        self._is_closing = True
        if self._is_failing:
            self.shutdown()

    def shutdown(self) -> None:
        """End, and whatever waits to try again ends with it."""
        with _in_our_name():
            self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """There is nothing to flush: the queue is the processor's."""
        return True


class _Ending:
    """The end of a provider, on a thread that is there from the beginning: none can be started while Python exits."""

    def __init__(self, provider: TracerProvider, exporter: _ToCollector) -> None:
        self._provider = provider
        self._exporter = exporter
        self._asked = threading.Event()
        self._thread = threading.Thread(target=self._run, name="d3engine-traces-end", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Wait for it, but not long. A forked process has no such thread, and nothing to send either."""
        self._asked.set()
        self._thread.join(END_SECONDS)
        if self._thread.is_alive():
            self._exporter.tell_of_loss()

    def _run(self) -> None:
        self._asked.wait()
        self._exporter.begin_to_close()
        self._provider.shutdown()


def _resource() -> Resource:
    """What sends the spans; a name from the environment comes before our own."""
    found = Resource.create({SERVICE_VERSION: __version__})
    if str(found.attributes[SERVICE_NAME]).startswith("unknown_service"):
        return found.merge(Resource({SERVICE_NAME: PROVIDER}))
    return found


def _of_others(record: logging.LogRecord) -> bool:
    """Let through what OpenTelemetry says to others in this process, who may use it for their own ends."""
    return not _is_ours.get()


@contextmanager
def _in_our_name() -> Iterator[None]:
    token = _is_ours.set(True)
    try:
        yield
    finally:
        _is_ours.reset(token)
