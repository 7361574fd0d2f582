"""NVIDIA Triton Inference Server for real, over a repository that `d3engine integrations triton-repository` wrote."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from contract import ANSWERED, BEHIND, HANG_SECONDS, LEFT, Figures, Question, check_contract, metric
from page_programs import program_with
from typer.testing import CliRunner

if TYPE_CHECKING:
    from triton_server import Ports

    from d3engine import RequestOutput

HAS_TRITON = find_spec("pytriton") is not None and find_spec("tritonclient") is not None
with_triton = pytest.mark.skipif(not HAS_TRITON, reason="no nvidia-pytriton: `make test-integrations` brings it")


def write(repository: Path, *options: str) -> Any:
    from d3engine.cli import app

    return CliRunner().invoke(app, ["integrations", "triton-repository", str(repository), *options])


def test_repository_holds_its_options_and_spoils_no_other_model(tmp_path: Path) -> None:
    """A repository holds the options that were given and spoils no other model."""
    assert write(tmp_path, "--name", "one", "--depth", "d3 alpha=0.9 start=0.6").exit_code == 0
    assert write(tmp_path, "--name", "two", "--max-num-seqs", "4", "--threads", "1").exit_code == 0
    arguments = {name: json.loads((tmp_path / name / "1" / "model.json").read_text()) for name in ("one", "two")}
    assert arguments["one"]["depth"] == {"policy": "d3", "alpha": 0.9, "start": 0.6, "tail": 0, "on_skip": "none"}
    assert arguments["two"] == {"model": "demo", "max_num_seqs": 4, "num_threads": 1}
    assert 'name: "two"' in (tmp_path / "two" / "config.pbtxt").read_text()
    again = write(tmp_path, "--name", "one")
    assert again.exit_code == 2
    assert "name must be new in the repository" in again.output
    assert "name must be letters" in write(tmp_path, "--name", "../three").output
    assert "model must be" in write(tmp_path, "no/such/model").output


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ports]:
    from triton_server import triton_server

    repository = tmp_path_factory.mktemp("repository")
    options = {"--max-num-seqs": BEHIND["max_num_seqs"], "--kv-cache-memory-bytes": BEHIND["kv_cache_memory_bytes"]}
    words = [str(word) for pair in options.items() for word in pair]
    assert write(repository, "--device", "cpu", "--threads", "1", *words).exit_code == 0
    with triton_server(repository, tmp_path_factory.mktemp("triton")) as ports:
        yield ports


class OverTriton:
    """Answers come over HTTP; of those who leave, one leaves a stream of either protocol."""

    def __init__(self, ports: Ports) -> None:
        self._ports = ports
        limits = httpx.Limits(max_connections=None)
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{ports.http}", timeout=HANG_SECONDS, limits=limits)

    def answer(self, question: Question) -> str:
        return "".join(self.over_http(question))

    def over_http(self, question: Question) -> Iterator[str]:
        body = {"text_input": question.prompt, "stream": True, "sampling_parameters": json.dumps(question.fields())}
        with self.http.stream("POST", "/v2/models/d3/generate_stream", json=body) as answer:
            if answer.status_code != 200:
                raise RuntimeError(answer.read().decode())
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise RuntimeError(event["error"])
                    yield event["text_output"]

    def over_grpc(self, question: Question) -> Iterator[str]:
        import numpy as np
        from tritonclient.grpc import InferenceServerClient, InferInput

        found: SimpleQueue[Any] = SimpleQueue()
        inputs = []
        given = {"text_input": question.prompt.encode(), "sampling_parameters": json.dumps(question.fields()).encode()}
        for name, value in given.items():
            inputs.append(InferInput(name, [1], "BYTES"))
            inputs[-1].set_data_from_numpy(np.array([value], dtype=np.object_))
        inputs.append(InferInput("stream", [1], "BOOL"))
        inputs[-1].set_data_from_numpy(np.array([True]))
        with closing(InferenceServerClient(f"127.0.0.1:{self._ports.grpc}")) as client:
            client.start_stream(callback=lambda result, error: found.put(error or result))
            client.async_stream_infer("d3", inputs)
            try:
                reason = b""
                while not reason:
                    piece = found.get(timeout=HANG_SECONDS)
                    if isinstance(piece, Exception):
                        raise piece
                    reason = piece.as_numpy("finish_reason")[0]
                    yield piece.as_numpy("text_output")[0].decode()
            finally:
                client.stop_stream(cancel_requests=True)

    def leave(self, question: Question) -> None:
        read = self.over_http if question == LEFT[0] else self.over_grpc
        with closing(read(question)) as pieces:
            next(pieces)

    def figures(self) -> Figures:
        text = httpx.get(f"http://127.0.0.1:{self._ports.metrics}/metrics", timeout=HANG_SECONDS).text
        return Figures(metric(text, "kv_cache_usage_perc"), int(metric(text, "generation_tokens_total")))


@pytest.fixture(scope="module")
def stack(ports: Ports) -> Iterator[OverTriton]:
    stack = OverTriton(ports)
    yield stack
    stack.http.close()


@with_triton
def test_triton_holds_the_contract(stack: OverTriton, wanted: list[RequestOutput]) -> None:
    check_contract(stack, wanted)


@with_triton
def test_four_clients_read_equal_streams_while_a_fifth_cancels(stack: OverTriton, wanted: list[RequestOutput]) -> None:
    """Four clients read equal streams over either protocol while a fifth cancels."""
    asked, text = ANSWERED[1], wanted[1].outputs[0].text
    with ThreadPoolExecutor() as threads:
        fifth = threads.submit(stack.leave, LEFT[0])
        streams = [threads.submit(list, read(asked)) for read in (stack.over_http, stack.over_grpc) for _ in range(4)]
        found = [stream.result(HANG_SECONDS) for stream in streams]
        fifth.result(HANG_SECONDS)
    # In how many pieces depends on how busy the machine is, since what waits goes together; that an answer does not
    # wait for its end is seen by those who leave one of 900 tokens after its first piece.
    assert ["".join(pieces) for pieces in found] == [text] * 8


@with_triton
def test_the_program_of_the_docs_prints_the_answer(ports: Ports, capsys: pytest.CaptureFixture[str]) -> None:
    exec(program_with("Triton", {"127.0.0.1:8001": f"127.0.0.1:{ports.grpc}"}), {})
    assert " Adding 3 makes 5 + 3 = 8. #### 8" in capsys.readouterr().out


@with_triton
def test_whole_answer_has_its_prompt_first_unless_excluded(stack: OverTriton, wanted: list[RequestOutput]) -> None:
    """A whole answer has its prompt before it, unless that is excluded."""
    asked, answer = ANSWERED[1], wanted[1].outputs[0]
    body = {"text_input": asked.prompt, "sampling_parameters": json.dumps(asked.fields())}
    with_prompt = stack.http.post("/v2/models/d3/generate", json=body).json()
    assert with_prompt["text_output"] == asked.prompt + answer.text
    without = stack.http.post("/v2/models/d3/generate", json=body | {"exclude_input_in_output": True}).json()
    assert without["text_output"] == answer.text
    assert (without["token_ids"], without["depths"]) == (answer.token_ids, answer.depths)
    assert without["finish_reason"] == answer.finish_reason


@with_triton
@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"sampling_parameters": '{"frog": 3}'}, "frog must be absent"),
        ({"sampling_parameters": "{"}, "sampling_parameters must be JSON"),
        ({"sampling_parameters": '{"depth": {"policy": "speculative", "draft_model": "/etc"}}'}, "depth must be one"),
        ({"sampling_parameters": '{"temperature": -1}'}, "temperature must be"),
        ({"sampling_parameters": '{"structured_outputs": {"jason": 1}}'}, "structured_outputs.jason must be absent"),
        ({"stream": True, "exclude_input_in_output": False}, "exclude_input_in_output must be true"),
        ({"stream": True, "sampling_parameters": '{"n": 2, "temperature": 1}'}, "n must be 1 where stream"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(stack: OverTriton, fields: dict[str, Any], named: str) -> None:
    path = "generate_stream" if fields.get("stream") else "generate"
    answer = stack.http.post(f"/v2/models/d3/{path}", json={"text_input": "a", **fields})
    assert named in answer.text
