"""Ray Serve for real: a local Ray with two replicas of the bundled model, one of which is killed, and one let go."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed: `make test-integrations` brings it")

from contract import BEHIND, HANG_SECONDS, OverOpenAI, check_contract  # noqa: E402
from page_programs import program_with  # noqa: E402
from ray import serve  # noqa: E402
from stack_programs import free_port  # noqa: E402

if TYPE_CHECKING:
    from d3engine import RequestOutput

LONG = 2000
"""Tokens of an answer that is sure to be under way while something happens to its replica."""
NUM_STREAMS = 6
WAIT = {"upscale_delay_s": 0.2, "downscale_delay_s": 600.0, "metrics_interval_s": 0.2, "look_back_period_s": 0.4}


@pytest.fixture(scope="module")
def long_demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model with room for long answers."""
    import d3engine

    directory = tmp_path_factory.mktemp("models") / "demo"
    shutil.copytree(Path(d3engine.__file__).parent / "demo_model", directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2 * LONG}))
    return directory


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Where a local Ray, which is there for this file alone, serves what it is given."""
    port = free_port()
    patch = pytest.MonkeyPatch()
    patch.setenv("RAY_worker_niceness", "0")  # by itself Ray lets its workers wait for all else on the machine
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=2**27)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()
        patch.undo()


Run = Callable[..., OverOpenAI]


@pytest.fixture(scope="module")
def run(url: str, long_demo: Path) -> Run:
    """`run(num_replicas=2)`: the application with these arguments in place of any other; its clients."""
    from d3engine.integrations.ray_serve import app

    def start(**arguments: Any) -> OverOpenAI:
        defaults = {"max_ongoing_requests": 8, "drain_timeout": HANG_SECONDS, **BEHIND}
        serve.run(app(long_demo, **(defaults | arguments)))
        return OverOpenAI(url)

    return start


def names_of_replicas() -> list[str]:
    actors = ray.util.list_named_actors(all_namespaces=True)
    return [actor["name"] for actor in actors if "#Replica#" in actor["name"]]


def body_of(number: int, **more: Any) -> dict[str, Any]:
    return {"prompt": f"Question: Tom has {number} pens.", "max_tokens": LONG, "ignore_eos": True, **more}


class Reader(threading.Thread):
    """Reads one stream to its end."""

    def __init__(self, client: Any, number: int) -> None:
        super().__init__()
        self.client, self.number = client, number
        self.has_begun = threading.Event()
        self.text, self.is_done = "", False
        self.error: Any = None
        self.start()

    def run(self) -> None:
        try:
            self._read()
        except httpx.HTTPError as error:
            self.error = {"code": repr(error)}
        self.has_begun.set()

    def _read(self) -> None:
        with self.client.stream("POST", "/v1/completions", json=body_of(self.number, stream=True)) as answer:
            for line in answer.iter_lines():
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    self.is_done = True
                elif data != line:
                    self._see(json.loads(data))

    def _see(self, event: Any) -> None:
        if "error" in event:
            self.error = event["error"]
        else:
            self.text += event["choices"][0]["text"]
            self.has_begun.set()


@pytest.fixture(scope="module")
def long_texts(long_demo: Path) -> list[str]:
    """What an engine of the test's own answers to each of the streams."""
    from d3engine import Engine, SamplingParams

    params = SamplingParams(max_tokens=LONG, ignore_eos=True, temperature=0)
    with Engine(long_demo, device="cpu", num_threads=1, kv_cache_memory_bytes=2**26) as engine:
        prompts = [body_of(number)["prompt"] for number in range(NUM_STREAMS + 2)]
        return [output.outputs[0].text for output in engine.generate(prompts, params, use_tqdm=False)]


def test_two_replicas_hold_the_contract(run: Run, wanted: list[RequestOutput]) -> None:
    stack = run(num_replicas=2)
    assert len(names_of_replicas()) == 2
    check_contract(stack, wanted)
    text = stack._http.get("/metrics").text
    assert {line.split('replica="')[1][:8] for line in text.splitlines() if "replica=" in line} == {
        name[-8:] for name in names_of_replicas()
    }


def test_the_program_of_the_docs_prints_the_answer(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(program_with("Ray", {"http://127.0.0.1:8000": url}), {})
    assert " Adding 3 makes 5 + 3 = 8. Adding 2 makes 8 + 2 = 10. #### 10" in capsys.readouterr().out


def test_killed_replica_loses_only_its_streams_which_say_so(run: Run, long_texts: list[str]) -> None:
    """A killed replica loses nothing but its streams, which say so."""
    client = run(num_replicas=2, kv_cache_memory_bytes=2**26)._http
    readers = [Reader(client, number) for number in range(NUM_STREAMS)]
    with ThreadPoolExecutor() as threads:
        wholes = [
            threads.submit(client.post, "/v1/completions", json=body_of(number))
            for number in range(NUM_STREAMS, NUM_STREAMS + 2)
        ]
        for reader in readers:
            assert reader.has_begun.wait(HANG_SECONDS)
        ray.kill(ray.get_actor(names_of_replicas()[0], namespace="serve"))
        for reader in readers:
            reader.join(HANG_SECONDS)
        answers = [whole.result(HANG_SECONDS) for whole in wholes]
    assert [answer.json()["choices"][0]["text"] for answer in answers] == long_texts[NUM_STREAMS:]
    lost = [reader for reader in readers if reader.error is not None]
    assert 0 < len(lost) < NUM_STREAMS
    for reader in readers:
        assert reader.is_done
        own = long_texts[reader.number]
        if reader.error is None:
            assert reader.text == own
        else:
            assert own.startswith(reader.text)
            assert reader.error["code"] == "replica_died"
            assert "has died" in reader.error["message"]


def test_replica_no_longer_wanted_ends_what_it_has_begun(run: Run, long_texts: list[str]) -> None:
    """A replica that is no longer wanted finishes the requests it has begun."""
    client = run(num_replicas=2, kv_cache_memory_bytes=2**26)._http
    assert len(names_of_replicas()) == 2  # the one that was killed has been replaced
    readers = [Reader(client, number) for number in range(NUM_STREAMS)]
    for reader in readers:
        assert reader.has_begun.wait(HANG_SECONDS)
    run(num_replicas=1, kv_cache_memory_bytes=2**26)
    for reader in readers:
        reader.join(HANG_SECONDS)
    assert [(reader.error, reader.text) for reader in readers] == [(None, text) for text in long_texts[:NUM_STREAMS]]


def per_replica(client: Any, name: str) -> dict[str, float]:
    """One of the engines' metrics, by replica."""
    found: dict[str, float] = {}
    for line in client.get("/metrics").text.splitlines():
        if line.startswith(f"d3engine:{name}{{"):
            replica = line.split('replica="')[1].split('"')[0]
            found[replica] = found.get(replica, 0) + float(line.rsplit(" ", 1)[1])
    return found


def gained(client: Any, name: str, prompts: list[str]) -> list[float]:
    """By how much it grows in each replica, least first, as these prompts are answered one after the other."""
    before = per_replica(client, name)
    for prompt in prompts:
        assert client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2}).status_code == 200
    return sorted(after - before[replica] for replica, after in per_replica(client, name).items())


def test_depth_cohort_sends_a_windows_requests_to_one_replica(run: Run) -> None:
    """By depth cohort, all requests of one window go to one replica."""
    client = run(num_replicas=2, routing="by depth cohort", cohort_seconds=3600.0)._http
    assert gained(client, "generation_tokens_total", [f"Tom has {nth} pens." for nth in range(8)]) == [0, 16]


def test_prefix_routing_finds_like_prompts_in_the_cache(run: Run) -> None:
    """By prefix, every prompt that begins like another finds it in the cache."""
    client = run(num_replicas=2, routing="by prefix", kv_cache_memory_bytes=2**26)._http
    books = [f"Book {nth} tells of " + "many things. " * 40 for nth in range(8)]
    prompt_tokens = gained(client, "prompt_tokens_total", books)
    assert prompt_tokens[0] > 0  # both have some
    cached = gained(client, "prompt_tokens_cached_total", [book + "And of others." for book in books])
    assert sum(cached) > 0.9 * sum(prompt_tokens)


def test_a_routing_that_there_is_not_is_refused_by_name() -> None:
    from d3engine.errors import InvalidValueError
    from d3engine.integrations.ray_serve import app

    with pytest.raises(InvalidValueError, match=r"routing must be None, .*by prefix.*; got 'by luck'"):
        app("demo", routing="by luck")


def test_requests_that_wait_bring_a_further_replica(run: Run) -> None:
    # Said, since Ray otherwise goes on with as many replicas as the test before had.
    autoscaling = {**WAIT, "initial_replicas": 1}
    client = run(num_replicas=(1, 2), max_ongoing_requests=1, autoscaling=autoscaling)._http
    before = set(names_of_replicas())
    with ThreadPoolExecutor() as threads:
        while len(set(names_of_replicas()) | before) < len(before) + 1:  # a run that never ends is ended by pytest
            answers = [threads.submit(client.post, "/v1/completions", json=body_of(nth)) for nth in range(4)]
            assert [answer.result(HANG_SECONDS).status_code for answer in answers] == [200] * 4


def test_more_than_may_wait_is_refused_in_openais_words(run: Run) -> None:
    client = run(num_replicas=1, max_ongoing_requests=1, max_queue=1)._http
    readers = [Reader(client, 0)]
    assert readers[0].has_begun.wait(HANG_SECONDS)
    with ThreadPoolExecutor() as threads:
        answers = [threads.submit(client.post, "/v1/completions", json={"prompt": "a"}) for _ in range(6)]
        found = sorted(answer.result(HANG_SECONDS).status_code for answer in answers)
    readers[0].join(HANG_SECONDS)
    assert set(found) == {200, 429}
