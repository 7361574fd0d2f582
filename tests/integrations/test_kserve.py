"""KServe for real: its own server with our model, by the open inference protocol and by OpenAI's routes."""

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

pytest.importorskip("kserve", reason="KServe is not installed: `make test-integrations` brings it")

import grpc
import httpx
from contract import ANSWERED, BAD, HANG_SECONDS, LEFT, OverOpenAI, Question, check_contract
from kserve.protocol.grpc import grpc_predict_v2_pb2 as messages
from kserve.protocol.grpc.grpc_predict_v2_pb2_grpc import GRPCInferenceServiceStub
from page_programs import program_with
from stack_programs import ARGUMENTS, free_port, serving_program

from d3engine import RequestOutput

INFER = "/v2/models/demo/infer"


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, int]]:
    """Of HTTP and of gRPC."""
    http, rpc = free_port(), free_port()
    program = program_with("KServe", {'D3Model("demo", "demo")': f'D3Model("demo", "demo", {ARGUMENTS})'})
    command = ("program.py", "--http_port", str(http), "--grpc_port", str(rpc))
    ready = f"http://127.0.0.1:{http}/v2/models/demo/ready"
    with serving_program(tmp_path_factory.mktemp("kserve"), program, ready, command):
        yield http, rpc


@pytest.fixture
def http(ports: tuple[int, int]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://127.0.0.1:{ports[0]}", timeout=HANG_SECONDS) as client:
        yield client


def asked(*texts: str, **parameters: Any) -> dict[str, Any]:
    tensor = {"name": "text_input", "shape": [len(texts)], "datatype": "BYTES", "data": list(texts)}
    return {"inputs": [tensor], "parameters": parameters}


def outputs_of(answer: httpx.Response) -> dict[str, list[str]]:
    assert answer.status_code == 200, answer.text
    return {output["name"]: output["data"] for output in answer.json()["outputs"]}


class OverKServe(OverOpenAI):
    """Answers by v2; leaves a stream of OpenAI's, since v2 has none."""

    def answer(self, question: Question) -> str:
        fields = {name: json.dumps(v) if name == "depth" else v for name, v in question.fields().items()}
        answer = self._http.post(INFER.removeprefix("/openai"), json=asked(question.prompt, **fields))
        if answer.status_code != 200:
            raise RuntimeError(answer.text)
        return outputs_of(answer)["text_output"][0]


def test_kserve_holds_the_contract(ports: tuple[int, int], wanted: list[RequestOutput]) -> None:
    url = f"http://127.0.0.1:{ports[0]}"
    stack = OverKServe(url, completions="/openai/v1/completions", metrics="/openai/metrics")
    check_contract(stack, wanted)


def test_request_may_hold_several_texts_or_ids_and_depths(http: httpx.Client, wanted: list[RequestOutput]) -> None:
    """A request may hold several texts or token ids, and ask for depths."""
    two = [(ANSWERED[nth], wanted[nth]) for nth in (1, 5)]
    depth = json.dumps(two[0][0].depth)
    assert two[1][0].depth == two[0][0].depth
    parameters = {"max_tokens": 16, "temperature": 0, "depth": depth, "return_depths": True, "return_token_ids": True}
    found = outputs_of(http.post(INFER, json=asked(*(question.prompt for question, _ in two), **parameters)))
    for nth, (_, output) in enumerate(two):
        own = output.outputs[0]
        assert own.text.startswith(found["text_output"][nth])
        assert json.loads(found["token_ids"][nth]) == own.token_ids[:16]
        assert json.loads(found["depths"][nth]) == own.depths[:16]
    ids = two[0][1].prompt_token_ids
    tensor = {"name": "input_ids", "shape": [len(ids)], "datatype": "INT64", "data": ids}
    again = outputs_of(http.post(INFER, json={"inputs": [tensor], "parameters": {**parameters, "stop": '["=", "x"]'}}))
    assert again["text_output"][0] == found["text_output"][0].partition("=")[0]
    assert again["finish_reason"] == ["stop"]


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (asked("x", temperature=-1), "temperature"),
        (asked("x", temprature=1), "temprature"),
        (asked("x", stream=True), "stream"),
        (asked("x", depth="speculative"), "depth"),
        ({"inputs": [{"name": "image", "shape": [1], "datatype": "INT64", "data": [1]}]}, "image"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(http: httpx.Client, body: dict[str, Any], named: str) -> None:
    answer = http.post(INFER, json=body)
    assert answer.status_code == 400
    assert named in answer.json()["error"]


def question_of(question: Question) -> messages.ModelInferRequest:
    request = messages.ModelInferRequest(model_name="demo")
    tensor = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(question.prompt.encode())
    for name, value in question.fields().items():
        if isinstance(value, bool):
            request.parameters[name].bool_param = value
        elif isinstance(value, int):
            request.parameters[name].int64_param = value
        else:
            request.parameters[name].string_param = json.dumps(value)
    return request


def test_grpc_answers_alike_and_cancelled_calls_end(ports: tuple[int, int], wanted: list[RequestOutput]) -> None:
    """gRPC answers the same, and a call that is cancelled ends in the engine."""
    stack = OverOpenAI(f"http://127.0.0.1:{ports[0]}", metrics="/openai/metrics")
    with closing(grpc.insecure_channel(f"127.0.0.1:{ports[1]}")) as channel:
        service = GRPCInferenceServiceStub(channel)
        for question, output in zip(ANSWERED[:6], wanted, strict=False):
            found = service.ModelInfer(question_of(question), timeout=HANG_SECONDS)
            assert found.outputs[0].contents.bytes_contents[0].decode() == output.outputs[0].text
        with pytest.raises(grpc.RpcError, match="alpha"):
            service.ModelInfer(question_of(BAD), timeout=HANG_SECONDS)
        before = stack.figures()
        call = service.ModelInfer.future(question_of(LEFT[0]), timeout=HANG_SECONDS)
        while not stack.figures().blocks_in_use:
            assert not call.done()
        call.cancel()
        while stack.figures().blocks_in_use:
            pass
        assert stack.figures().generated_tokens - before.generated_tokens < LEFT[0].max_tokens
