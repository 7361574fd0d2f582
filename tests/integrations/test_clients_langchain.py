"""LangChain against our server: completions, chats, streams, tools and structured output, as its users write them."""

from typing import Any

import pytest
from demo_server import said
from json_schemas import closed

pytest.importorskip("langchain_openai", reason="langchain-openai is not installed: make test-with-clients does it")

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

QUESTION = "Tom has 5 pens."
COUNT = closed(
    {"what": {"enum": ["pens", "cups"]}, "many": {"type": "integer", "minimum": 0, "maximum": 9}},
    title="count",
    description="How many there are",
)
SHORT: dict[str, Any] = {"model": "demo", "api_key": "none", "max_retries": 0}


@pytest.fixture(scope="module")
def chat(url: str) -> Any:
    return ChatOpenAI(base_url=url, temperature=0, max_completion_tokens=24, **SHORT)


def test_a_chat_is_answered_whole_and_in_pieces(url: str, chat: Any) -> None:
    wanted = said(url, [{"role": "user", "content": QUESTION}], temperature=0, max_tokens=24)
    whole = chat.invoke(QUESTION)
    assert whole.content == wanted
    assert whole.usage_metadata["output_tokens"] > 0
    pieces = [chunk.content for chunk in chat.stream([HumanMessage(QUESTION)])]
    assert len(pieces) > 1
    assert "".join(pieces) == wanted


def test_a_completion_is_answered_whole_and_in_pieces(url: str) -> None:
    model = OpenAI(base_url=url, temperature=0, max_tokens=24, **SHORT)
    whole = model.invoke(QUESTION)
    assert whole
    assert "".join(model.stream(QUESTION)) == whole
    assert model.batch([QUESTION, QUESTION]) == [whole, whole]


def test_a_tool_is_called_and_its_result_goes_back(url: str) -> None:
    model = ChatOpenAI(base_url=url, temperature=1, seed=3, max_completion_tokens=200, **SHORT)
    calling = model.bind_tools([COUNT], tool_choice="count")
    called = calling.invoke(QUESTION)
    (call,) = called.tool_calls
    assert call["name"] == "count"
    assert call["args"]["what"] in ("pens", "cups")
    streamed = None
    for chunk in calling.stream(QUESTION):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed is not None
    assert [(one["name"], one["args"]) for one in streamed.tool_calls] == [(call["name"], call["args"])]
    back = model.invoke([HumanMessage(QUESTION), called, ToolMessage("5", tool_call_id=call["id"])])
    assert isinstance(back.content, str)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_satisfies_its_schema(url: str, method: str) -> None:
    model = ChatOpenAI(base_url=url, temperature=1, seed=5, max_completion_tokens=200, **SHORT)
    found = model.with_structured_output(COUNT, method=method).invoke(QUESTION)
    assert found["what"] in ("pens", "cups")
    assert 0 <= found["many"] <= 9


def test_responses_are_what_chats_are(url: str, chat: Any) -> None:
    model = ChatOpenAI(base_url=url, temperature=0, max_completion_tokens=24, use_responses_api=True, **SHORT)
    assert model.invoke(QUESTION).text == chat.invoke(QUESTION).content
    assert "".join(chunk.text for chunk in model.stream(QUESTION)) == chat.invoke(QUESTION).content


def test_texts_are_embedded(url: str) -> None:
    embeddings = OpenAIEmbeddings(base_url=url, check_embedding_ctx_length=False, **SHORT)
    one, other = embeddings.embed_documents([QUESTION, "Ann has 3 cats."])
    assert embeddings.embed_query(QUESTION) == one != other
    assert sum(number * number for number in one) == pytest.approx(1, abs=1e-5)
