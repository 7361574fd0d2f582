"""Agents of LangChain and Pydantic AI: three calls of a function, their results, and a text at the end."""

from collections.abc import Iterator
from typing import Any

import pytest
from agents import ADD, MAX_TOKENS, NUM_CALLS, QUESTION, added, agent_server

pytest.importorskip("langchain_openai", reason="langchain-openai is not installed: make test-with-clients does it")
pytest.importorskip("pydantic_ai", reason="pydantic-ai is not installed: make test-with-clients does it")

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic_ai import Agent, Tool
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with agent_server() as address:
        yield f"{address}/v1"


@pytest.mark.parametrize("use_responses_api", [False, True])
def test_langchain_calls_three_times_and_then_answers(url: str, use_responses_api: bool) -> None:
    model = ChatOpenAI(
        base_url=url,
        model="demo",
        api_key="none",  # type: ignore[arg-type]  # it makes a secret of it
        max_retries=0,
        temperature=0,
        max_completion_tokens=MAX_TOKENS,
        use_responses_api=use_responses_api,
    ).bind_tools([{"title": "add", "description": "The sum of two numbers", **ADD}])
    messages: list[Any] = [HumanMessage(QUESTION)]
    num_calls = 0
    while (answer := model.invoke(messages)).tool_calls:
        num_calls += len(answer.tool_calls)
        results = [ToolMessage(added(call["args"]), tool_call_id=call["id"]) for call in answer.tool_calls]
        messages += [answer, *results]
    assert num_calls == NUM_CALLS
    assert answer.text


@pytest.mark.parametrize("stream", [False, True])
def test_pydantic_ai_calls_three_times_and_then_answers(url: str, stream: bool) -> None:
    given: list[dict[str, Any]] = []

    def add(**arguments: Any) -> str:
        given.append(arguments)
        return added(arguments)

    tool = Tool.from_schema(add, "add", "The sum of two numbers", ADD)
    provider = OpenAIProvider(base_url=url, api_key="none")
    agent = Agent(
        OpenAIChatModel("demo", provider=provider),
        tools=[tool],
        model_settings={"max_tokens": MAX_TOKENS, "temperature": 0},
    )
    if stream:
        found = "".join(agent.run_stream_sync(QUESTION).stream_text(delta=True))
    else:
        found = agent.run_sync(QUESTION).output
    assert len(given) == NUM_CALLS
    assert found
