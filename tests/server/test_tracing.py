"""Traces: one span per request, at a receiver that decodes what a collector would get."""

import json
import logging
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest
from demo_server import Around
from invoking import refused
from otlp_receiver import Receiver, receiving, values_of
from serving import serving

from d3engine import AsyncEngine
from d3engine.errors import InvalidValueError, MissingExtraError
from d3engine.server.app import create_app
from d3engine.server.middleware.settings import GuardSettings
from d3engine.server.settings import ServerSettings

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
SECRET = "Xylophone"
"""In prompts that must not be found in any span."""
BODY = {"prompt": f"{SECRET} has 5 pens.", "max_tokens": 12, "temperature": 0, "top_p": 0.5, "ignore_eos": True}
ERROR = 2
"""The status of a span that is an error, in OTLP."""
SERVER = 2
"""The kind of a span that answers, in OTLP."""


@contextmanager
def traced(client: Any, endpoint: str, **more: Any) -> Iterator[httpx.Client]:
    """A client of a server whose traces go there; all have been sent when the block has ended."""
    app = create_app(client, ServerSettings(model_names=("demo",), otlp_traces_endpoint=endpoint, **more))
    with serving(app) as url, httpx.Client(base_url=url, timeout=120) as http:
        yield http
    app.state.served.tracer.close()


def spans_of(client: AsyncEngine, ask: Callable[[httpx.Client], object], **more: Any) -> tuple[Receiver, list[Any]]:
    """What a receiver has got when `ask` is through, and its spans in the order in which their requests began."""
    with receiving() as receiver:
        with traced(client, receiver.url, **more) as http:
            ask(http)
        return receiver, sorted(receiver.spans, key=lambda span: span.start_time_unix_nano)


def test_a_span_says_whose_child_it_is_and_what_the_answer_was(client: AsyncEngine) -> None:
    answers: list[httpx.Response] = []

    def ask(http: httpx.Client) -> None:
        headers = {"traceparent": PARENT, "tracestate": "vendor=1", "X-Request-Id": "mine-1"}
        body = BODY | {"return_depths": True}
        answers.append(http.post("/v1/completions", json=body, headers=headers))
        answers.append(http.post("/v1/completions", json=BODY))

    receiver, (child, root) = spans_of(client, ask)
    answer = answers[0].json()
    depth = answer["d3ext"]
    assert child.trace_id.hex() == "4bf92f3577b34da6a3ce929d0e0e4736"
    assert child.parent_span_id.hex() == "00f067aa0ba902b7"
    assert child.trace_state == "vendor=1"
    assert (root.parent_span_id, root.trace_id == child.trace_id) == (b"", False)
    assert (child.name, child.kind, child.status.code) == ("text_completion demo", SERVER, 0)
    found = values_of(child)
    seconds = {name: found.pop(name) for name in [*found] if name.startswith("gen_ai.latency.")}
    assert found == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "d3engine",
        "gen_ai.request.model": "demo",
        "gen_ai.response.model": "demo",
        "gen_ai.response.id": answer["id"],
        "gen_ai.request.max_tokens": 12,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.top_p": 0.5,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": answer["usage"]["prompt_tokens"],
        "gen_ai.usage.output_tokens": 12,
        "d3engine.depth.policy": found["d3engine.depth.policy"],
        "d3engine.mean_layers": depth["mean_layers"],
        "d3engine.layers_run": depth["layers_run"],
        "d3engine.layers_saved": depth["layers_saved"],
        "d3engine.request_id": "mine-1",
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
    }
    assert found["d3engine.depth.policy"].startswith("D3")
    names = ("time_in_queue", "time_in_model_prefill", "time_in_model_decode", "time_to_first_token", "e2e")
    assert set(seconds) == {f"gen_ai.latency.{name}" for name in names}
    queue, prefill, decode, first, whole = (seconds[f"gen_ai.latency.{name}"] for name in names)
    assert queue + prefill == pytest.approx(first)
    assert first + decode <= whole + 1e-6
    assert whole <= (child.end_time_unix_nano - child.start_time_unix_nano) / 1e9
    assert {one["service.name"] for one in receiver.resources} == {"d3engine"}
    assert not [body for body in receiver.raw if SECRET.encode() in body]


def test_several_answers_and_a_stream_have_one_span_each(client: AsyncEngine) -> None:
    """A request of several answers and a stream have one span each."""
    several = {"prompt": ["Tom has", "Ann has"], "n": 2, "temperature": 1, "max_tokens": 3, "ignore_eos": True}
    chat = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 3, "ignore_eos": True, "stream": True}

    def ask(http: httpx.Client) -> None:
        assert http.post("/v1/completions", json=several).status_code == 200
        assert http.post("/v1/chat/completions", json=chat).text.endswith("data: [DONE]\n\n")
        assert http.post("/v1/messages", json={"messages": chat["messages"], "max_tokens": 2}).status_code == 200
        assert http.post("/v1/responses", json={"input": "Tom", "max_output_tokens": 2}).status_code == 200
        http.get("/health")
        http.post("/tokenize", json={"prompt": "Tom"})

    _, (of_several, of_stream, *others) = spans_of(client, ask)
    found = values_of(of_several)
    assert found["gen_ai.response.finish_reasons"] == ["length"] * 4
    assert (found["gen_ai.usage.output_tokens"], found["gen_ai.request.choice.count"]) == (12, 2)
    assert of_stream.name == "chat demo"
    assert values_of(of_stream)["gen_ai.usage.output_tokens"] == 3
    routes = [values_of(span)["http.route"] for span in others]
    assert routes == ["/v1/messages", "/v1/responses"]
    assert {span.status.code for span in (of_several, of_stream, *others)} == {0}


def test_a_stream_that_is_left_ends_its_span_with_what_had_come(client: AsyncEngine) -> None:
    def ask(http: httpx.Client) -> None:
        body = BODY | {"stream": True, "max_tokens": 900}
        with http.stream("POST", "/v1/completions", json=body) as answer:
            next(answer.iter_lines())
        while "in_flight 0.0" not in http.get("/metrics").text:
            pass

    _, (span,) = spans_of(client, ask)
    found = values_of(span)
    assert (span.status.code, found["error.type"]) == (ERROR, "client_closed_request")
    assert found["gen_ai.response.finish_reasons"] == ["abort"]
    assert 0 < found["gen_ai.usage.output_tokens"] < 900


def test_span_of_a_refused_request_has_no_word_of_its_prompt(client: AsyncEngine) -> None:
    """The span of a refused request has an error, and no word of its prompt."""
    chat = [{"role": SECRET, "content": SECRET}]

    def ask(http: httpx.Client) -> None:
        key = {"Authorization": "Bearer a-key-of-1234"}
        asked = [
            http.post("/v1/completions", json=BODY | {"model": SECRET}, headers=key),
            http.post("/v1/completions", json=BODY | {"max_tokens": 10**5}, headers=key),
            http.post("/v1/chat/completions", json={"messages": chat}, headers=key),
            http.post("/v1/completions", content=f'{{"prompt": "{SECRET}'.encode(), headers=key),
            http.post("/v1/completions", json=BODY),
        ]
        assert [one.status_code for one in asked] == [404, 400, 400, 415, 401]

    receiver, spans = spans_of(client, ask, guards=GuardSettings(api_keys=("a-key-of-1234",)))
    assert [(span.name, values_of(span)["error.type"]) for span in spans] == [
        ("text_completion", "model_not_found"),
        ("text_completion", "context_length_exceeded"),
        ("chat", "400"),
        ("text_completion", "unsupported_media_type"),
    ]
    assert {span.status.code for span in spans} == {ERROR}
    assert not [body for body in receiver.raw if SECRET.encode() in body]


def test_span_of_a_stream_that_fails_late_has_the_errors_code(client: AsyncEngine) -> None:
    """The span of a stream that fails after its first byte has the error's code."""

    def ask(http: httpx.Client) -> None:
        body = BODY | {"stream": True, "max_tokens": 400}
        events = [line for line in http.post("/v1/completions", json=body).iter_lines() if line.startswith("data: {")]
        assert json.loads(events[-1][6:])["error"]["code"] == "request_failed"

    with receiving() as receiver:
        with traced(_Failing(client), receiver.url) as http:
            ask(http)
        (span,) = receiver.spans
    found = values_of(span)
    assert (span.status.code, found["error.type"], found["http.response.status_code"]) == (ERROR, "request_failed", 200)


class _Failing(Around):
    """An engine that gives each request up after its first output."""

    async def generate(self, prepared: Any) -> Any:
        async for output in self._client.generate(prepared):
            yield output
            (answer,) = output.outputs
            yield replace(output, outputs=[replace(answer, finish_reason="abort", stop_reason=SECRET)], finished=True)
            return


def test_receiver_that_is_down_costs_no_request(
    client: AsyncEngine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A receiver that is down costs no request, and is reported once."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "0.5")  # less than the pause before it tries again
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "2")
    caplog.set_level(logging.DEBUG)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # and never listens: the port is nobody else's
        port = silent.getsockname()[1]
        with traced(client, f"http://127.0.0.1:{port}/v1/traces") as http:
            for _ in range(5):
                assert http.post("/v1/completions", json=BODY | {"max_tokens": 1}).status_code == 200
    said = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert said == [f"127.0.0.1:{port} takes no traces; they are lost until it does"]


def test_a_receiver_that_hangs_holds_no_server_back(
    client: AsyncEngine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from d3engine.server import tracing_export as spans

    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "600")
    monkeypatch.setattr(spans, "END_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as hanging:  # connections and what comes by them wait in the system
        where = f"127.0.0.1:{hanging.getsockname()[1]}"
        with traced(client, f"http://{where}/v1/traces") as http:
            assert http.post("/v1/completions", json=BODY | {"max_tokens": 1}).status_code == 200
        said = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
        assert said == [f"{where} did not take the last traces within 0.1 seconds; they are lost"]


def test_without_the_extra_it_is_named(client: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk", None)
    endpoint = "http://127.0.0.1:4318/v1/traces"
    stderr = refused(["serve", "demo", "--otlp-traces-endpoint", endpoint])
    assert stderr.startswith("error: --otlp-traces-endpoint needs the package 'opentelemetry-sdk': ")
    assert "[otel]" in stderr
    with pytest.raises(MissingExtraError, match=r"otlp_traces_endpoint needs .*\[otel\]"):
        create_app(client, ServerSettings(model_names=("demo",), otlp_traces_endpoint=endpoint))


NO_URLS = ["", "127.0.0.1:4318", "http://127.0.0.1:4318", "ftp://a/b", "http://a/b?c=d"]


@pytest.mark.parametrize("endpoint", [*NO_URLS, "http://me:s3cret@a/v1/traces"])
def test_an_endpoint_that_is_no_plain_url_is_refused(endpoint: str) -> None:
    """An endpoint is a whole URL without a password, which the refusal does not show."""
    with pytest.raises(InvalidValueError, match=r"must be a whole URL like .* without a name or a password") as caught:
        ServerSettings(model_names=("demo",), otlp_traces_endpoint=endpoint)
    assert "s3cret" not in str(caught.value)
