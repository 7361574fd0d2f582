"""The benchmark of serving asks as clients do, figures follow from what it saw, and its peer reads the same text."""

import contextlib
import itertools
import math
import os
import random
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from demo_server import serving_demo
from tqdm import tqdm

from benchmarks.gguf_writing import add_tokenizer
from benchmarks.report import interval_of_median
from benchmarks.serving import __main__ as program
from benchmarks.serving.asking import DEPTHS, Answered, Client, bursts, figures, percentile, poisson, prompt
from benchmarks.serving.bare import ALONE, ASYNC, LOCKSTEP, WAYS, Load, Steps, Tasks, by_arrivals
from benchmarks.serving.processes import Server
from benchmarks.serving.recorded import Arrivals, record
from benchmarks.serving.rounds import APART, OURS, PEER, Measured, Settings, num_rounds, rows_of
from benchmarks.serving.tables import markdown
from benchmarks.serving.vllm_client import VllmClient
from d3engine import AsyncEngine, Engine, FullDepth, RequestOutputKind, SamplingParams
from d3engine.depth import D3, policy_from_dict
from d3engine.depth.policy import policy_from_directory
from d3engine.engine.model_directory import model_directory
from d3engine.model.gguf_file import open_gguf


def test_streams_and_arrivals_bring_every_token_in_time(url: str) -> None:
    client = Client(url, "demo", tokens=5)
    for depth in ("full", "d3"):
        answered = client.streams(3, 0.0, depth)
        assert [one.tokens for one in answered] == [5] * 3
        assert all(one.sent < one.first <= one.last for one in answered)
    arrived = client.arrivals([0.0, 0.001, 0.0], "full")
    assert [one.tokens for one in arrived] == [5] * 3
    assert arrived[0].sent < arrived[1].sent


def test_d3_requests_have_the_bundled_models_setting() -> None:
    """Requests under D3 have the setting that the bundled model comes with."""
    assert policy_from_dict(DEPTHS["d3"]) == policy_from_directory(model_directory("demo"))
    assert isinstance(policy_from_dict(DEPTHS["d3"]), D3)


def test_server_is_asked_for_its_model_by_the_listed_name(client: AsyncEngine) -> None:
    """A server is asked for its model by the name that it lists."""
    with serving_demo(client, model_names=("of-a-directory",)) as url:
        measured = Measured.of(OURS, Server(url, os.getpid()), tokens=5)
        assert measured.streams(2, 0.0, "full")["tokens"] == 10


def test_refusal_by_the_server_ends_the_benchmark(url: str) -> None:
    """A refusal by the server ends the benchmark with the server's words."""
    with pytest.raises(SystemExit, match=r"the server answered 400.*max_tokens"):
        Client(url, "demo", tokens=10**6).streams(1, 0.0, "full")


def test_figures_follow_from_the_times() -> None:
    answered = [Answered(0.0, [0.5, 0.6, 1.5], 11), Answered(1.0, [1.1, 2.0], 10)]
    found = figures(answered)
    assert found["tokens_per_second"] == pytest.approx(21 / 2)
    assert found["first_token_p50"] == pytest.approx(0.1)
    assert found["first_token_p99"] == pytest.approx(0.5)
    assert [found["whole_p50"], found["whole_p99"]] == pytest.approx([1.0, 1.5])
    assert [found["between_tokens_p50"], found["between_tokens_p99"]] == pytest.approx([0.9, 0.9])
    assert [found["per_token_p50"], found["per_token_p99"]] == pytest.approx([0.1, 0.1])
    assert [percentile([3, 1, 2, 4], percent) for percent in (1, 25, 50, 51, 99, 100)] == [1, 1, 2, 3, 4, 4]


def test_bursts_bring_as_many_requests_in_a_time_as_single_ones() -> None:
    assert 4000 / sum(poisson(5.0, 4000)) == pytest.approx(5.0, rel=0.05)
    gaps = bursts(5.0, 16000)
    assert len(gaps) / sum(gaps) == pytest.approx(5.0, rel=0.1)
    assert [gap > 0 for gap in gaps[:33]] == [True, *[False] * 15] * 2 + [True]


@pytest.mark.parametrize("way", WAYS)
def test_engine_alone_answers_every_prompt_in_each_way(way: str) -> None:
    """The engine without a server answers as many prompts in each way."""
    kind = RequestOutputKind.CUMULATIVE if way == LOCKSTEP else RequestOutputKind.DELTA
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, depth=FullDepth(), output_kind=kind)
    numbers = itertools.count()
    sizes = {"device": "cpu", "max_num_seqs": 4, "kv_cache_memory_bytes": 2**24}
    load = Load(3, 0.0, params, lambda: prompt(next(numbers)), [2, 0, 1, *[0] * 6])
    with contextlib.closing(Tasks("demo", **sizes) if way == ASYNC else Steps(way, "demo", **sizes)) as runs:
        runs.run(load)
    assert (load.tokens, next(numbers)) == (15, 3)
    if way == ALONE:
        assert load.num_steps >= 7  # the third prompt came two steps after the others


def test_record_counts_the_arrivals_before_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The requests that reach the server's engine are recorded step by step."""
    monkeypatch.setattr(Engine, "add", Engine.add)  # as they were, when the test has ended
    monkeypatch.setattr(Engine, "step", Engine.step)
    arrivals = Arrivals()
    record(arrivals)
    with Engine("demo", device="cpu", kv_cache_memory_bytes=2**24) as engine:
        for many in (2, 0, 1):
            for _ in range(many):
                engine.add(engine.prepare([11, 12], SamplingParams(max_tokens=8, ignore_eos=True)))
            engine.step()
        taken = arrivals.take()
        assert taken[:3] == [2, 0, 1]
        before = engine.stats().num_steps
        engine.step(at_once=True)
        assert arrivals.take() == [0] * (engine.stats().num_steps - before)
    assert arrivals.take() == []


def test_by_arrivals_takes_single_steps_before_an_arrival() -> None:
    """The engine alone takes steps one by one where a request is to arrive soon."""

    class Stepped:
        """Takes as many steps at once as it may, and says what came to it before each."""

        def __init__(self) -> None:
            self.scheduler = SimpleNamespace(counters=SimpleNamespace(steps=0))
            self.came: dict[int, int] = {}

        def add_request(self, *_: object) -> None:
            self.came[self.scheduler.counters.steps] = self.came.get(self.scheduler.counters.steps, 0) + 1

        def has_unfinished_requests(self) -> bool:
            return False

        def step(self, *, at_once: bool) -> list[Any]:
            self.scheduler.counters.steps += 5 if at_once else 1
            return []

    engine = Stepped()
    by_arrivals(engine, Load(1, 0.0, None, str, [3, *[0] * 500, 1, 0, 2, *[0] * 100]))
    assert engine.came == {0: 3, 501: 1, 503: 2}


def test_interval_of_median_misses_it_in_one_of_twenty() -> None:
    """The interval of a median misses it in one of twenty cases at most."""
    assert interval_of_median([3.0, 1.0]) == (1.0, 3.0)
    drawn = random.Random(0)
    for count, bounds in {6: (0, 5), 9: (1, 7), 20: (5, 14)}.items():
        assert interval_of_median(range(count, 0, -1)) == tuple(place + 1 for place in bounds)
        found = [interval_of_median([drawn.expovariate(1) for _ in range(count)]) for _ in range(4000)]
        assert 0.94 < statistics.mean(low <= math.log(2) <= high for low, high in found) <= 0.985


def test_rows_are_compared_with_engine_peer_and_full_depth() -> None:
    """A row is compared with the engine alone, with llama.cpp and with full depth."""

    def rounds(*rates: float) -> list[dict[str, float]]:
        return [{"tokens_per_second": rate, "cpu_per_token": 1 / rate} for rate in rates]

    found = {
        (OURS, "full"): rounds(90, 80),
        (ALONE, "full"): rounds(100, 100),
        (LOCKSTEP, "full"): rounds(120, 120),
        (OURS, "d3"): rounds(180, 160),
        (PEER, "full"): rounds(45, 40),
    }
    full, alone, _, d3, peer = rows_of(found)
    assert [full["of_lockstep"], alone["of_lockstep"]] == pytest.approx([85 / 120, 100 / 120])
    assert [full[name] for name in ("of_engine", "of_engine_cpu", "over_peer")] == pytest.approx([0.85, 0.85, 2.0])
    assert [d3["over_full"], d3["over_peer_cpu"]] == pytest.approx([2.0, 4.0])
    assert full["of_engine_interval"] == pytest.approx((0.8, 0.9))
    assert "of_engine" not in alone
    assert not {"over_peer", "of_engine"} & set(peer)
    report = {"models": [{"model": "demo", "streams": [{"streams": 8, **full}], "arrivals": []}]}
    row_of_page = (
        "| 8 | d3engine | full | 85 | 11806 | - | - / - | - / - | - / - |"
        " 0.85, 0.80 to 0.90 (0.85) | 0.71, 0.67 to 0.75 (0.71) | 2.00, 2.00 to 2.00 (2.00)"
    )
    assert row_of_page in markdown(report)
    assert num_rounds(Settings(arrivals=("poisson",))) == 3 * 2 * 11 + 2 * 4
    assert num_rounds(Settings(streams=(8,), engine_process=True)) == 2 * 13
    *_, apart = rows_of(found | {(APART, "d3"): rounds(135, 120)})
    assert [apart["over_thread"], apart["over_peer"]] == pytest.approx([0.75, 3.0])
    waves = (f"{OURS}, waves of 16", "d3")
    (*_, row) = rows_of({(OURS, "d3"): rounds(180, 160), waves: rounds(90, 80)})
    assert [row["over_immediate"], row["over_immediate_cpu"]] == pytest.approx([0.5, 0.5])


def test_vllm_client_is_read_in_our_units_with_its_failures(tmp_path: Path) -> None:
    """A second client is read in this benchmark's units, with the requests that got no answer."""
    command = tmp_path / "vllm"
    command.write_text(
        f"""#!{sys.executable}
import json, pathlib, sys
given = dict(zip(sys.argv[3::2], sys.argv[4::2]))
found = dict(completed=min(8, int(given["--num-prompts"])), output_throughput=100.0, total_output_tokens=128)
found |= dict(median_ttft_ms=20.0, p99_ttft_ms=30.0, median_itl_ms=1.5, p99_itl_ms=4.0)
(pathlib.Path(given["--result-dir"]) / given["--result-filename"]).write_text(json.dumps(found))
"""
    )
    command.chmod(0o755)
    client = VllmClient(str(command), tmp_path)
    found = client.streams("http://127.0.0.1:1", "demo", 2, 8, 16)
    assert found["tokens_per_second"] == 100
    assert [found["first_token_p99"], found["between_tokens_p50"]] == pytest.approx([0.03, 0.0015])
    assert found["unanswered"] == 0
    assert client.streams("http://127.0.0.1:1", "demo", 2, 9, 16)["unanswered"] == 1


def test_unanswered_requests_are_allowed_to_the_peer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that the peer left unanswered are reported, and ours end the benchmark."""

    class Named(Server):
        def model_name(self) -> str:
            return self.url

        def cpu_seconds(self) -> float:
            return next(clock)

    def started(name: str, lost: float) -> Callable[..., contextlib.AbstractContextManager[Server]]:
        found[name] = {"tokens": 64.0, "tokens_per_second": 100.0, "unanswered": lost}
        return lambda *_: contextlib.nullcontext(Named(name, os.getpid()))

    def by_vllm() -> list[dict[str, Any]]:
        return program._by_vllm(Settings(), "demo", Path("weights.gguf"), "vllm", tqdm(disable=True))

    found: dict[str, dict[str, float]] = {}
    clock = itertools.accumulate(itertools.repeat(1.0))
    monkeypatch.setattr(VllmClient, "streams", lambda self, url, *_: found[url])
    monkeypatch.setattr(program, "llama_server", started("peer", 3.0))
    monkeypatch.setattr(program, "d3engine_server", started("ours", 0.0))
    rows = by_vllm()
    assert rows[0]["over_peer"] == rows[0]["over_peer_cpu"] == 1
    assert program._unanswered(rows) == ["3 requests of vllm bench serve without an answer of llama.cpp"]
    monkeypatch.setattr(program, "d3engine_server", started("ours", 1.0))
    with pytest.raises(SystemExit, match="no answer to 1 of 256"):
        by_vllm()


def test_the_peer_gets_the_tokenizer_that_the_model_has(tmp_path: Path) -> None:
    import gguf
    from sentencepiece import SentencePieceProcessor

    def written(name: str, directory: Path) -> dict[str, Any]:
        file = tmp_path / name / "of.gguf"
        file.parent.mkdir()
        writer = gguf.GGUFWriter(file, "llama")
        add_tokenizer(writer, directory, 770)
        for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
            write()
        writer.close()
        return {key: value for key, value in open_gguf(file).metadata.items() if key.startswith("tokenizer.")}

    demo = model_directory("demo")
    pieces = SentencePieceProcessor(model_file=str(demo / "tokenizer.model"))
    found = written("of-pieces", demo)
    assert found["tokenizer.ggml.tokens"][:768] == [pieces.id_to_piece(i) for i in range(768)]
    assert found["tokenizer.ggml.token_type"][:4] == [2, 3, 3, 4]
    assert found["tokenizer.ggml.token_type"][768:] == [5, 5]
    assert written("copied", tmp_path / "of-pieces") == found
