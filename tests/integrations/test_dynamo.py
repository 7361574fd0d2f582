"""NVIDIA Dynamo for real: its own frontend before a worker of ours, both found by files."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from contract import ANSWERED, HANG_SECONDS, metric

from d3engine import RequestOutput

pytest.importorskip("dynamo", reason="Dynamo is not installed: `make test-integrations` brings it")

WAYS = ["--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq"]
START_SECONDS = 300.0
NUM_AT_ONCE = 8
LONG = 900


@contextmanager
def running(log: Path, environment: dict[str, str], *command: str) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        process = subprocess.Popen([sys.executable, "-m", *command], env=environment, stdout=out, stderr=out)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def free_port(least: int) -> int:
    """Below 32768, since Dynamo keeps one of its ports in sixteen bits with a sign."""
    for port in range(least, 2**15):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no port is free")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Dynamo's frontend, before a worker that it has found."""
    scratch = tmp_path_factory.mktemp("dynamo")
    port, system_port = free_port(20_000), free_port(26_000)
    environment = os.environ | {
        "DYN_FILE_KV": str(scratch / "kv"),
        "DYN_TCP_RPC_HOST": "127.0.0.1",
        "DYN_SELF_HOST_METADATA": "0",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    frontend = ["dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port), *WAYS]
    options = ["--threads", "1", "--device", "cpu", "--kv-cache-memory-bytes", str(2**25)]
    worker = ["d3engine", "integrations", "dynamo", "demo", "--depth-alias", "demo-full=full", *options, *WAYS]
    with ExitStack() as stack:
        processes = [
            stack.enter_context(running(scratch / name, environment | own, *command))
            for name, command, own in (
                ("frontend", frontend, {}),
                ("worker", worker, {"DYN_SYSTEM_PORT": str(system_port), "DYN_SYSTEM_HOST": "127.0.0.1"}),
            )
        ]
        client = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=HANG_SECONDS))
        _wait_for_models(client, processes, scratch)
        client.headers["x-metrics"] = f"http://127.0.0.1:{system_port}/metrics"
        yield client


def _wait_for_models(client: httpx.Client, processes: list[subprocess.Popen[bytes]], scratch: Path) -> None:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until and all(process.poll() is None for process in processes):
        with suppress(httpx.HTTPError):
            if len(client.get("/v1/models").json().get("data", [])) == 2:
                return
        time.sleep(0.2)
    logs = [(scratch / name).read_text(errors="replace")[-4000:] for name in ("frontend", "worker")]
    raise AssertionError("\n".join(logs))


def text_of(client: httpx.Client, model: str, **body: Any) -> str:
    answer = client.post("/v1/completions", json={"model": model, **body})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def test_eight_requests_at_once_are_answered_as_by_an_engine(client: httpx.Client, wanted: list[RequestOutput]) -> None:
    """Eight requests at once are answered as the engine answers them."""
    greedy = [nth for nth, question in enumerate(ANSWERED) if question.depth is None and question.temperature == 0]
    asked = [greedy[nth % len(greedy)] for nth in range(NUM_AT_ONCE)]
    bodies = [{"prompt": wanted[nth].prompt_token_ids, **ANSWERED[nth].fields()} for nth in asked]
    with ThreadPoolExecutor(NUM_AT_ONCE) as threads:
        found = list(threads.map(lambda body: text_of(client, "demo", **body), bodies))
    assert [text.strip() for text in found] == [wanted[nth].outputs[0].text.strip() for nth in asked]


def test_an_alias_is_the_model_at_its_depth(client: httpx.Client, wanted: list[RequestOutput]) -> None:
    nth = next(nth for nth, asked in enumerate(ANSWERED) if asked.depth == {"policy": "full"} and not asked.temperature)
    body = {"prompt": wanted[nth].prompt_token_ids, "max_tokens": ANSWERED[nth].max_tokens, "temperature": 0}
    assert text_of(client, "demo-full", **body).strip() == wanted[nth].outputs[0].text.strip()


def test_who_leaves_a_stream_ends_its_request_in_the_engine(client: httpx.Client) -> None:
    def figure(name: str) -> float:
        return metric(httpx.get(client.headers["x-metrics"], timeout=HANG_SECONDS).text, name)

    before = figure("generation_tokens_total")
    body = {"model": "demo", "prompt": "Tom has", "max_tokens": LONG, "stream": True, "ignore_eos": True}
    with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, answer.read()
        next(line for line in answer.iter_lines() if line.startswith("data: "))
    until = time.monotonic() + HANG_SECONDS
    while figure("num_requests_running") and time.monotonic() < until:
        time.sleep(0.05)
    assert figure("kv_cache_usage_perc") == 0
    assert 0 < figure("generation_tokens_total") - before < LONG
    assert figure("step_seconds_count") > 0
