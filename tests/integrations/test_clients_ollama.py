"""Ollama's own client, and LangChain's over it, against our server."""

from typing import Any

import httpx
import pytest
from demo_server import said
from json_schemas import closed

pytest.importorskip("ollama", reason="ollama is not installed: make test-with-clients does it")
pytest.importorskip("langchain_ollama", reason="langchain-ollama is not installed: make test-with-clients does it")

import ollama
from langchain_ollama import ChatOllama, OllamaEmbeddings, OllamaLLM

QUESTION = "Tom has 5 pens."
ASKED: Any = [{"role": "user", "content": QUESTION}]
GREEDY = {"temperature": 0, "num_predict": 8}
SCHEMA = closed({"many": {"type": "integer", "minimum": 0, "maximum": 9}})


@pytest.fixture(scope="module")
def client(address: str) -> ollama.Client:
    return ollama.Client(host=address)


def test_a_chat_says_what_a_chat_completion_does(url: str, client: ollama.Client) -> None:
    wanted = said(url, ASKED, temperature=0, max_tokens=8)
    whole = client.chat("demo", ASKED, options=GREEDY)
    assert whole.message.content == wanted
    assert (whole.done, whole.model) == (True, "demo")
    assert whole.eval_count == 8
    assert whole.done_reason == "length"
    assert (whole.prompt_eval_count or 0) > 0
    assert (whole.total_duration or 0) >= (whole.eval_duration or 0) > 0
    chunks = list(client.chat("demo:latest", ASKED, stream=True, options=GREEDY))
    assert "".join(chunk.message.content or "" for chunk in chunks) == wanted
    assert [chunk.done for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert len(chunks) > 2
    assert chunks[-1].eval_count == 8
    assert chunks[0].eval_count is None


def test_options_are_the_fields_of_a_chat(url: str, client: ollama.Client) -> None:
    ours = {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.02, "seed": 7, "repetition_penalty": 1.2}
    theirs = {"repeat_penalty" if name == "repetition_penalty" else name: value for name, value in ours.items()}
    wanted = said(url, ASKED, max_tokens=20, stop=["\n"], **ours)
    options = {**theirs, "num_predict": 20, "stop": ["\n"], "num_ctx": 64, "num_gpu": 1, "num_thread": 2}
    assert client.chat("demo", ASKED, options=options, keep_alive="5m").message.content == wanted


def test_a_prompt_is_written_by_the_template_unless_it_is_raw(url: str, client: ollama.Client) -> None:
    chat = said(url, ASKED, temperature=0, max_tokens=8)
    assert client.generate("demo", QUESTION, options=GREEDY).response == chat
    body = {"model": "demo", "prompt": QUESTION, "temperature": 0, "max_tokens": 8}
    completion = httpx.post(f"{url}/completions", json=body, timeout=120).json()["choices"][0]["text"]
    chunks = list(client.generate("demo", QUESTION, raw=True, stream=True, options=GREEDY))
    assert "".join(chunk.response or "" for chunk in chunks) == completion != chat
    assert chunks[-1].eval_count == 8


def test_answers_have_the_form_that_is_asked_for(client: ollama.Client) -> None:
    import json

    found = client.chat("demo", ASKED, format=SCHEMA, options={"temperature": 0}).message.content
    assert set(json.loads(found or "")) == {"many"}
    text = client.generate("demo", QUESTION, format=SCHEMA, options={"temperature": 0}).response
    assert set(json.loads(text or "")) == {"many"}


def test_log_probabilities(client: ollama.Client) -> None:
    more: Any = {"logprobs": True, "top_logprobs": 2, "options": {"temperature": 0, "num_predict": 3}}
    for answer in (client.chat("demo", ASKED, **more), client.generate("demo", QUESTION, raw=True, **more)):
        assert answer.logprobs is not None
        assert len(answer.logprobs) == 3
        for one in answer.logprobs:
            assert one.top_logprobs is not None
            assert one.top_logprobs[0].token == one.token
            assert one.logprob <= 0


def test_tools_are_offered_and_results_are_read(client: ollama.Client) -> None:
    def count(what: str) -> int:
        """Count things."""
        return len(what)

    call: Any = {"role": "assistant", "tool_calls": [{"function": {"name": "count", "arguments": {"what": "pens"}}}]}
    result: Any = {"role": "tool", "tool_name": "count", "content": "5"}
    answer = client.chat("demo", [*ASKED, call, result], tools=[count], options=GREEDY)
    assert answer.message.role == "assistant"


def test_embeddings_are_those_of_the_other_route(url: str, client: ollama.Client) -> None:
    texts = [QUESTION, "Ann has 3 cats."]
    body = {"model": "demo", "input": texts}
    wanted = [one["embedding"] for one in httpx.post(f"{url}/embeddings", json=body).json()["data"]]
    found = client.embed("demo", texts)
    assert [list(one) for one in found.embeddings] == wanted
    assert (found.prompt_eval_count or 0) > 2
    cut = client.embed("demo", ["pen " * 2000], dimensions=8)
    assert len(cut.embeddings[0]) == 8
    with pytest.raises(ollama.ResponseError, match="max_model_len"):
        client.embed("demo", ["pen " * 2000], truncate=False)
    plain = httpx.post(f"{url}/embeddings", json={"input": QUESTION, "normalize": False}).json()
    assert list(client.embeddings("demo", QUESTION).embedding) == plain["data"][0]["embedding"]


def test_the_model_is_described(client: ollama.Client) -> None:
    (model,) = client.list().models
    assert model.model == "demo"
    assert model.details is not None
    assert model.details.family == "llama"
    shown = client.show("demo")
    assert shown.capabilities == ["completion", "tools"]
    assert shown.modelinfo is not None
    assert shown.modelinfo["llama.context_length"] > 0
    (running,) = client.ps().models
    assert running.context_length == shown.modelinfo["llama.context_length"]
    assert client.generate("demo").done_reason == client.chat("demo").done_reason == "load"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"options": {"num_ctx": 10**6}}, "options.num_ctx must be an integer from 1 to"),
        ({"options": {"num_predict": -3}}, "options.num_predict must be an integer"),
        ({"options": {"mirostat": 2}}, "mirostat must be absent or 0"),
        ({"options": {"repeat_last_n": 64, "repeat_penalty": 1.1}}, "options.repeat_last_n must be absent or -1"),
        ({"options": {"temperature": 9}}, "temperature must be"),
        ({"messages": [{"role": "user", "content": "x", "images": [b"x"]}]}, r"messages\[0\].images must be absent"),
        ({"messages": [{"role": "robot", "content": "x"}]}, r"messages\[0\].role must be 'system'"),
        ({"format": {"type": "no such"}}, "format must be"),
        ({"model": "other"}, "The model 'other' does not exist here"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(client: ollama.Client, more: Any, words: str) -> None:
    with pytest.raises(ollama.ResponseError, match=words):
        client.chat(**({"model": "demo", "messages": ASKED} | more))


def test_unknown_options_are_named(address: str) -> None:
    body = {"model": "demo", "messages": ASKED, "stream": False, "options": {"num_predict": 2, "novel": 1}}
    answer = httpx.post(f"{address}/api/chat", json=body, timeout=120)
    assert answer.headers["X-D3-Ignored-Fields"] == "options.novel"


def test_langchain_chats_and_embeds(address: str, url: str) -> None:
    chat = ChatOllama(base_url=address, model="demo", temperature=0, num_predict=8)
    wanted = said(url, ASKED, temperature=0, max_tokens=8)
    assert chat.invoke(QUESTION).content == wanted
    assert "".join(str(chunk.content) for chunk in chat.stream(QUESTION)) == wanted
    longer = ChatOllama(base_url=address, model="demo", temperature=0, num_predict=64)
    structured = longer.with_structured_output({"title": "count", **SCHEMA}, method="json_schema")
    found: Any = structured.invoke(QUESTION)
    assert set(found) == {"many"}
    llm = OllamaLLM(base_url=address, model="demo", temperature=0, num_predict=8)
    assert llm.invoke(QUESTION) == wanted
    vectors = OllamaEmbeddings(base_url=address, model="demo").embed_documents([QUESTION, "Ann"])
    assert [len(vector) for vector in vectors] == [len(vectors[0])] * 2
