"""A collector of OpenTelemetry's traces, as far as a test needs one: it takes OTLP over HTTP, and keeps the spans."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue


class Receiver:
    """Where it is, and what has come."""

    def __init__(self) -> None:
        self.url = ""
        self.resources: list[dict[str, Any]] = []
        self.spans: list[Any] = []
        self.raw: list[bytes] = []
        """The bodies as they came."""

    def take(self, body: bytes) -> None:
        self.raw.append(body)
        for batch in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resources.append(values_of(batch.resource))
            self.spans += [span for scope in batch.scope_spans for span in scope.spans]


def values_of(owner: Any) -> dict[str, Any]:
    """The attributes of a span or a resource, as Python has them."""
    return {one.key: _plain(one.value) for one in owner.attributes}


def _plain(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    assert kind is not None
    found = getattr(value, kind)
    return [_plain(one) for one in found.values] if kind == "array_value" else found


@contextmanager
def receiving() -> Iterator[Receiver]:
    """A receiver on a free port, until the block ends."""
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            receiver.take(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        receiver.url = f"http://127.0.0.1:{server.server_address[1]}/v1/traces"
        try:
            yield receiver
        finally:
            server.shutdown()
            thread.join()
