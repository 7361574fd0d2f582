"""An engine on a thread and one in a process of its own keep the same promises; one of each serves all tests here."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import assert_same
from deltas import joined
from loops import on_a_loop

from d3engine import (
    D3,
    AsyncEngine,
    Engine,
    EngineClosedError,
    EngineDeadError,
    FullDepth,
    IntervalAdmission,
    InvalidValueError,
    LayerTable,
    ModelFormatError,
    RequestOutputKind,
    SamplingParams,
    TailSkip,
)
from d3engine.async_engine import engine_process, wire
from d3engine.engine.device import default_threads
from d3engine.errors import FailedError, MissingExtraError
from d3engine.utils.children import python_command

ARGUMENTS: dict[str, Any] = {
    "device": "cpu",
    "num_threads": 1,
    "kv_cache_memory_bytes": 2**24,
    "admission": IntervalAdmission(2),
}
QUESTION = "Question: Tom has 5 apples and buys 3 more. How many apples does Tom have?\nAnswer:"
DELTA = RequestOutputKind.DELTA
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, output_kind=DELTA)
REQUESTS: list[tuple[Any, SamplingParams]] = [
    (QUESTION, SamplingParams(temperature=0, max_tokens=24)),
    (QUESTION, SamplingParams(temperature=0, max_tokens=24, depth=FullDepth(), logprobs=2, prompt_logprobs=1)),
    (QUESTION, SamplingParams(n=3, max_tokens=12, seed=5, top_k=20, depth=D3(0.9, 0.5))),
    ([5, 6, 7], SamplingParams(max_tokens=12, seed=1, logit_bias={"9": 2.0}, ignore_eos=True)),
    (QUESTION, SamplingParams(temperature=0, max_tokens=24, stop=["apples"], include_stop_str_in_output=True)),
    (QUESTION, SamplingParams(max_tokens=9, seed=2, bad_words=["apples"], stop_token_ids=[3], depth=TailSkip(9, 16))),
]


@pytest.fixture(scope="module")
def bare() -> Iterator[Engine]:
    with Engine("demo", **ARGUMENTS) as engine:
        yield engine


@pytest.fixture(scope="module", params=["thread", "process"])
def client(request: pytest.FixtureRequest) -> Iterator[AsyncEngine]:
    engine = AsyncEngine("demo", transport=request.param, **ARGUMENTS)
    yield engine
    asyncio.run(engine.close())
    if request.param == "process":
        assert engine._transport.process.poll() is not None


async def read(stream: Any) -> list[Any]:
    return [output async for output in stream]


def test_it_says_of_itself_what_the_engine_would(client: AsyncEngine, bare: Engine) -> None:
    assert client.settings == bare.settings
    assert client.default_sampling_params == bare.default_sampling_params
    assert client.get_tokenizer().encode(QUESTION) == bare.get_tokenizer().encode(QUESTION)
    stats = asyncio.run(client.stats())
    assert stats.kv_blocks_total == bare.stats().kv_blocks_total


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_many_at_once_are_answered_as_each_alone(client: AsyncEngine, bare: Engine, kind: RequestOutputKind) -> None:
    async def main() -> list[list[Any]]:
        asked = [client.generate(prompt, replace(params, output_kind=kind)) for prompt, params in REQUESTS]
        return await asyncio.gather(*map(read, asked))

    for (prompt, params), outputs in zip(REQUESTS, asyncio.run(main()), strict=True):
        got = joined(outputs) if kind is DELTA else outputs[-1]
        want = bare.generate(prompt, params, use_tqdm=False)[0]
        assert_same(got, want)
        assert [part.text for part in got.outputs] == [part.text for part in want.outputs]
        assert (got.prompt, got.prompt_token_ids, got.finished) == (want.prompt, want.prompt_token_ids, True)


@on_a_loop
async def test_requests_left_or_aborted_hold_nothing(client: AsyncEngine) -> None:
    for _ in range(2):  # the id is free at once
        async for _ in client.generate(QUESTION, LONG, request_id="left"):
            break
    stream = client.generate(QUESTION, LONG, request_id="aborted")
    first = await anext(stream)  # on a busy machine all 200 tokens at once
    await client.abort("aborted")
    last = [first, *await read(stream)][-1]
    assert last.outputs[0].finish_reason in ("abort", "length")
    stats = await client.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_blocks_in_use) == (0, 0, 0)
    assert not client.heartbeat().is_working


@pytest.mark.parametrize(
    ("prompt", "params"),
    [
        ([10**6], None),
        ("", SamplingParams(allowed_token_ids=[10**6])),
        (QUESTION, SamplingParams(depth=LayerTable([[0, 1]], on_skip="copy"))),
    ],
)
def test_what_can_never_run_is_refused_in_the_same_words(
    client: AsyncEngine, bare: Engine, prompt: Any, params: SamplingParams | None
) -> None:
    def refusal(ask: Callable[[], Any]) -> str:
        try:
            ask()
        except InvalidValueError as error:
            return str(error)
        return "nothing was refused"

    assert refusal(lambda: asyncio.run(client.prepare(prompt, params))) == refusal(lambda: bare.prepare(prompt, params))


@on_a_loop
async def test_an_id_that_is_taken_is_refused_to_the_second(client: AsyncEngine) -> None:
    first = client.generate(QUESTION, replace(LONG, max_tokens=None), request_id="same")
    await anext(first)
    with pytest.raises(InvalidValueError, match="request_id must be an id of no unfinished request"):
        await anext(client.generate(QUESTION, LONG, request_id="same"))
    await first.aclose()


def test_only_requests_of_its_own_are_taken(client: AsyncEngine, bare: Engine) -> None:
    with pytest.raises(InvalidValueError, match="prepared by this engine"):
        asyncio.run(read(client.generate(bare.prepare(QUESTION))))


def test_a_thread_reads_the_same_answer(client: AsyncEngine, bare: Engine) -> None:
    prompt, params = REQUESTS[0]
    want = bare.generate(prompt, params, use_tqdm=False)[0].outputs
    assert list(client.sync().generate(prompt, params))[-1].outputs == want


# -- a process alone ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("client", ["process"], indirect=True)
@on_a_loop
async def test_hung_process_is_found_by_heartbeat_a_dead_one_by_all(client: AsyncEngine) -> None:
    """The heartbeat finds a process that hangs; every caller learns of one that dies."""
    # The last test of the shared process.
    process = client._transport.process  # type: ignore[attr-defined]
    streams = [client.generate(QUESTION, replace(LONG, max_tokens=None)) for _ in range(3)]
    for stream in streams:
        await anext(stream)
    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    still = client.heartbeat()
    assert (still.is_working, still.error) == (True, None)
    assert client.heartbeat() == still
    os.kill(process.pid, signal.SIGKILL)
    told = await asyncio.gather(*map(read, streams), return_exceptions=True)
    told += await asyncio.gather(client.stats(), client.prepare(QUESTION), return_exceptions=True)
    assert [str(error) for error in told] == ["the engine's process has ended by signal 9"] * 5
    assert {type(error) for error in told} == {EngineDeadError}
    assert client.heartbeat().error is not None


def test_process_computes_with_as_many_threads_as_its_parent() -> None:
    """A process computes with as many threads as its parent would."""
    # Otherwise `d3engine serve --threads 1 --engine-process` takes every core, the network's among them.
    torch.set_num_threads(2)  # where the environment, which a process has too, says one
    client = AsyncEngine("demo", transport="process", device="cpu", kv_cache_memory_bytes=2**24)
    asyncio.run(client.close())
    assert client.settings.num_threads == default_threads()


def test_a_process_ends_when_its_parent_is_killed(tmp_path: Any) -> None:
    """The end is seen by a pipe that the process holds, so not even a zombie would pass for it; no file is left."""
    folder = tmp_path / "sockets"
    folder.mkdir()
    requests, replies, pulse = (f"ipc://{folder / name}" for name in ("requests", "replies", "pulse"))
    start = wire.Start("demo", {"device": "cpu"}, requests, replies, pulse.removeprefix("ipc://"), threads=1)
    parent_code = """if True:
        import subprocess, sys
        boot = "from d3engine.async_engine.process_main import main; main()"
        fd = int(sys.argv[1])
        child = subprocess.Popen([sys.executable, "-c", boot], stdin=subprocess.PIPE, pass_fds=[fd])
        child.stdin.write(sys.argv[2].encode() + b"\\n")
        child.stdin.flush()
        print("started", flush=True)
        child.wait()
    """
    life, held = os.pipe()
    command = [sys.executable, "-c", parent_code, str(held), wire.encode(start).hex()]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=[held])
    os.close(held)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"started\n"
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert os.read(life, 1) == b""  # waits for the process's end
    os.close(life)
    assert not folder.exists()


SAYS = """if True:
    import sys, msgspec, zmq
    start = msgspec.msgpack.decode(bytes.fromhex(sys.stdin.readline()))
    socket = zmq.Context().socket(zmq.PUSH)
    socket.connect(start[4])
    socket.send(bytes.fromhex("{}"))
    sys.stdin.read()
"""


def test_what_making_the_engine_raises_there_is_raised_here(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys; sys.exit(3)"
    monkeypatch.setattr(engine_process, "main_command", lambda module: python_command("-c", code))
    with pytest.raises(EngineDeadError, match="has ended with status 3 before it was ready"):
        engine_process.EngineProcess("demo", {})
    error = InvalidValueError("block_size", 0, "at least 1")
    code = SAYS.format(wire.encode([wire.End(wire.failure_of(error))]).hex())
    with pytest.raises(InvalidValueError, match="block_size must be at least 1; got 0"):
        engine_process.EngineProcess("demo", {})


@pytest.mark.parametrize(
    ("arguments", "named"),
    [({"weights": object()}, "weights"), ({"admission": object()}, "admission"), ({"depth": object()}, "depth")],
)
def test_arguments_that_cannot_go_to_a_process_are_refused(arguments: dict[str, Any], named: str) -> None:
    """Arguments that cannot go to a process are refused by name."""
    with pytest.raises(InvalidValueError, match=f"^{named} must be"):
        AsyncEngine("demo", transport="process", **arguments)
    with pytest.raises(InvalidValueError, match="transport must be"):
        AsyncEngine("demo", transport="pigeon")


def test_paths_go_to_a_process_as_texts(tmp_path: Path) -> None:
    """Whatever may be a path for an engine on a thread may be one for an engine in a process."""
    given = {name: tmp_path / name for name in ("tokenizer", "draft_model", "prefix_cache_file")}
    plain = engine_process.plain_arguments(given)
    assert plain == {name: str(path) for name, path in given.items()} | {"admission": None}


def test_sampling_parameters_are_the_same_on_the_other_side() -> None:
    everything = SamplingParams(
        n=2,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        repetition_penalty=1.1,
        seed=2**62,
        stop=["a", "b"],
        stop_token_ids=[1],
        ignore_eos=True,
        max_tokens=None,
        min_tokens=2,
        logprobs=1,
        prompt_logprobs=2,
        logit_bias={3: 0.5},
        allowed_token_ids=[3, 4],
        bad_words=["c"],
        skip_special_tokens=False,
        include_stop_str_in_output=True,
        output_kind=DELTA,
        depth=D3(0.8, 0.5, on_skip="copy"),
        cache_salt="s",
    )
    for params in (everything, SamplingParams(), *(params for _, params in REQUESTS)):
        sent = wire.decode_message(wire.encode(wire.Add(1, None, None, [], wire.plain_params(params), 0)))
        assert wire.params_of(sent.params) == params


@pytest.mark.parametrize(
    "error",
    [
        InvalidValueError("prompt", "x", "longer"),
        ModelFormatError("no such file"),
        MissingExtraError("gguf", "gguf"),
        EngineClosedError("closed"),
    ],
)
def test_errors_keep_their_class_words_and_cause(error: Exception) -> None:
    error.__cause__ = ZeroDivisionError("why")
    again = wire.error_of(wire.failure_of(error))
    assert (type(again), str(again)) == (type(error), str(error))
    assert str(again.__cause__) == "ZeroDivisionError('why')"
    assert getattr(again, "field", None) == getattr(error, "field", None)


def test_a_foreign_error_is_a_failure_in_its_own_words() -> None:
    again = wire.error_of(wire.failure_of(KeyError("nothing")))
    assert (type(again), str(again)) == (FailedError, "KeyError: 'nothing'")
