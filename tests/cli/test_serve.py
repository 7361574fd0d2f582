"""`d3engine serve`: what it refuses before anything is loaded, and one run from its first line to its last."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import httpx
import psutil
import pytest
from invoking import invoke, refused
from otlp_receiver import Receiver, receiving
from served_apps import read_answer, request

from d3engine.cli.engine_options import ENGINE
from d3engine.cli.server_options import LIMITS, WHAT, WHO, server_settings
from d3engine.depth import D3, FullDepth


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--port", "99999"], "error: --port must be an integer from 0 to 65535; got 99999"),
        (["--host", "0.0.0.0"], " --allow-no-key that everybody who reaches the port may use the model"),
        (["--api-key", "short"], "--api-key must be keys of at least 8"),
        (["--api-key-file", "/does/not/exist"], "--api-key-file must be a regular file"),
        (["--depth-alias", "demo"], "--depth-alias must be ID=POLICY"),
        (["--depth-alias", "deep=auto"], "--depth-alias must be ID=POLICY"),
        (["--depth-alias", "a=d3 alpha=2 start=0.6"], "alpha"),
        (["--allow-depth", "speculative"], "--allow-depth must be"),
        (["--max-queue", "-1"], "--max-queue must be"),
        (["--stream-interval", "0"], "--stream-interval must be an integer of at least 1; got 0"),
    ],
)
def test_serve_bad_options_are_refused_before_loading(words: list[str], said: str) -> None:
    """Options that cannot be served are refused in one sentence before a model is loaded."""
    stderr = refused(["serve", "demo", *words])
    assert said in stderr
    assert len(stderr.splitlines()) == 1


NUMBERS = [
    flag
    for table in (WHO, WHAT, LIMITS, ENGINE)
    for flag, kind, _ in table.values()
    if kind in (int, float) or flag == "--threads"
]


@pytest.mark.parametrize("flag", NUMBERS)
def test_an_error_names_the_flag_that_was_typed(flag: str) -> None:
    assert refused(["serve", "demo", flag, "-7"]).startswith(f"error: {flag} must be ")


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["--host", "0.0.0.0"], "--host"),
        (["--metrics-key", "short"], "--metrics-key"),
        (["--allowed-origins", "example.org"], "--allowed-origins"),
        (["--allowed-hosts", "a/b"], "--allowed-hosts"),
        (["--served-model-name", ""], "--served-model-name"),
        (["--depth-alias", "demo=full"], "--depth-alias"),
        (["--otlp-traces-endpoint", "nowhere"], "--otlp-traces-endpoint"),
        (["--metrics-prefix", "7"], "--metrics-prefix"),
        (["--device", "tpu"], "--device"),
        (["--dtype", "int3"], "--dtype"),
        (["--weight-dtype", "int3"], "--weight-dtype"),
        (["--kv-cache-dtype", "int3"], "--kv-cache-dtype"),
        (["--depth", "d3 alpha=7 start=0.5"], "--depth 'd3 alpha=7 start=0.5': alpha"),
        (
            ["--depth", "skipdecode decay-steps=-7 min-layers=3"],
            "--depth 'skipdecode decay-steps=-7 min-layers=3': max_tokens",
        ),
        (["--depth", "skipdecode decay-steps=7 min-layers=99"], "min-layers of --depth"),
        (["--depth", "early-exit threshold=0.9 exit-min-layer=99"], "exit-min-layer of --depth"),
    ],
)
def test_an_error_of_a_text_names_its_flag_too(words: list[str], flag: str) -> None:
    assert refused(["serve", "demo", *words]).splitlines()[-1].startswith(f"error: {flag} must be ")


def test_a_taken_port_is_said_so_before_a_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        result = invoke(["serve", "demo", "--port", str(other.getsockname()[1])])
    assert result.exit_code == 1
    assert "cannot listen at http://127.0.0.1:" in result.stderr


@pytest.mark.parametrize("package", ["uvicorn", "prometheus_client", "msgspec"])
def test_without_its_packages_the_extra_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    stderr = refused(["serve", "demo"])
    assert stderr.startswith(f"error: d3engine serve needs the package {package.replace('_', '-')!r}: ")
    assert "[serve]" in stderr


def test_keys_come_from_options_a_file_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keys").write_text("of-a-file-1\n\nof-a-file-2\n")
    monkeypatch.setenv("D3ENGINE_API_KEY", "of-the-environment, and-another-one")
    who: dict[str, Any] = {"api_keys": ["of-an-option"], "api_key_file": tmp_path / "keys"}
    keys = server_settings("demo", who, {}, {}).guards.api_keys
    assert keys == ("of-an-option", "of-a-file-1", "of-a-file-2", "of-the-environment", "and-another-one")


def test_serve_model_names_follow_the_model_or_the_option(tmp_path: Path) -> None:
    """A model is served under the name it was given by, or under the names asked for."""

    def names(model: str, **what: Any) -> tuple[str, ...]:
        return server_settings(model, {}, what, {}).model_names

    assert names("demo") == ("demo",)
    assert names("owner/name") == ("owner/name",)
    assert names(str(tmp_path)) == (tmp_path.name,)
    assert names("demo", model_names=["a", "b/c"]) == ("a", "b/c")
    given = ["full-one=full", "quick=d3 alpha=0.9 start=0.6"]
    aliases = server_settings("demo", {}, {"depth_aliases": given}, {}).depth_aliases
    assert aliases == {"full-one": FullDepth(), "quick": D3(alpha=0.9, start=0.6)}


SERVE = """
import atexit, gc, sys
from d3engine.cli import main

atexit.register(lambda: print("objects frozen:", gc.get_freeze_count(), file=sys.stderr))
main()
"""


DECAY = ("--depth", "d3 alpha=0.9 start=0.6")


class Running:
    """The command in a process of its own; the lines of its stderr as they come, with one of its heap behind them."""

    def __init__(self, *words: str) -> None:
        command = [sys.executable, "-c", SERVE, "serve", "demo", "--port", "0", "--device", "cpu", *words]
        environment = os.environ | {"D3ENGINE_API_KEY": "a-key-of-1234", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        self.lines: SimpleQueue[str | None] = SimpleQueue()
        self.seen: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.put(line.rstrip())
        self.lines.put(None)

    def line(self, part: str) -> str:
        """The next line that holds this; those before it are in `seen`."""
        while (line := self.lines.get(timeout=300)) is not None:
            if part in line:
                return line
            self.seen.append(line)
        raise AssertionError(f"{part!r} was not said: {self.seen}")


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """Of traces."""
    with receiving() as found:
        yield found


def test_serve_prints_what_it_serves_and_drains_on_sigterm(receiver: Receiver) -> None:
    """A server prints what it serves, and ends on SIGTERM when its answers are complete."""
    traces = ("--otlp-traces-endpoint", receiver.url)
    running = Running("-v", "--depth-alias", "demo-full=full", "--kv-cache-memory-bytes", str(2**22), *traces)
    url = running.line("address").split()[-1]
    said = "\n".join(running.seen)
    assert "model    demo, 16 layers, as demo, demo-full" in said
    assert "open to  this machine, with a key" in said
    assert "room     a KV cache of 512 tokens at full depth; at most 64 sequences, each of at most 1,024 tokens" in said
    assert running.line("page").split() == ["page", url.removesuffix("v1")]
    key = {"Authorization": "Bearer a-key-of-1234"}
    with httpx.Client(base_url=url, headers=key, timeout=300) as client, socket.socket() as slow:
        assert client.get("/models", headers={"Authorization": "Bearer wrong"}).status_code == 401
        slow.connect(("127.0.0.1", client.base_url.port))
        whole = request("/v1/completions", b'{"prompt": "Once", "max_tokens": 3}', **key)
        slow.sendall(whole[:-1])
        while "in_flight 1.0" not in client.get(f"{url.removesuffix('/v1')}/metrics").text:
            pass
        running.process.send_signal(signal.SIGTERM)
        assert "a second signal" in running.line("SIGTERM: answers in progress have 30 seconds to end")
        assert client.get("/models").status_code == 503
        slow.sendall(whole[-1:])
        status, body = read_answer(slow)
    assert (status, body["usage"]["completion_tokens"]) == (200, 3)
    assert running.line("POST /v1/completions 200")
    assert running.line("ended; every answer was complete")
    assert int(running.line("objects frozen").split()[-1]) > 100_000, "collections look through the whole server"
    assert running.process.wait(300) == 0
    assert [span.name for span in receiver.spans] == ["text_completion demo"]  # sent before the process ended


def test_serve_engine_process_is_served_and_its_death_reported() -> None:
    """An engine in a separate process is served, and its death is reported."""
    running = Running("--engine-process", *DECAY, "--stream-interval", "4", "--kv-cache-memory-bytes", str(2**22))
    url = running.line("address").split()[-1]
    said = "\n".join(running.seen)
    assert ", in a separate process" in said
    assert said.count("D3, alpha 0.9, start 0.6 was never certified") == 1
    children = psutil.Process(running.process.pid).children()
    (engine,) = [child for child in children if "process_main" in " ".join(child.cmdline())]
    with httpx.Client(base_url=url, headers={"Authorization": "Bearer a-key-of-1234"}, timeout=300) as client:
        engine.terminate()  # as systemd does to all processes of a service: the server alone ends it
        body = {"prompt": "Once", "max_tokens": 30, "ignore_eos": True, "stream": True, "return_token_ids": True}
        events = [json.loads(line[6:]) for line in client.post("/completions", json=body).iter_lines() if "{" in line]
        tokens = [len(event["choices"][0]["token_ids"]) for event in events]
        assert sum(tokens) == 30
        assert len(tokens) <= 1 + -(-29 // 4)  # fewer, where the reader was behind
        assert all(count >= 4 for count in tokens[1:-1])
        engine.kill()
        assert client.post("/completions", json={"prompt": "Once"}).json()["error"]["code"] == "engine_dead"
        health = client.get(url.replace("/v1", "/health"))
        assert health.status_code == 503
        assert "dead" in health.text
    running.process.send_signal(signal.SIGTERM)
    assert running.line("ended; every answer was complete")
    assert running.process.wait(300) == 0


def test_a_second_signal_ends_it_at_once() -> None:
    """With an app that needs no model: the answer in progress would never end."""
    script = """
import asyncio, sys
from starlette.applications import Starlette
from d3engine.server.middleware.settings import GuardSettings
from d3engine.server.middleware.limits import AdmissionControl
from d3engine.server.running import GuardedServer, bind

settings, traffic = GuardSettings(port=0), AdmissionControl(1)
server = GuardedServer(Starlette(), settings, traffic, lambda text: print(text, file=sys.stderr, flush=True))
server.when_started(lambda: print("up", file=sys.stderr, flush=True))
with bind(settings) as bound, traffic.place():
    asyncio.run(server.serve([bound]))
"""
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert process.stderr.readline() == "up\n"
    process.send_signal(signal.SIGINT)
    assert "a second signal ends them at once" in process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    assert process.stderr.read() == "ended at once, at a second signal\n"
    assert process.wait(300) == 128 + signal.SIGTERM
