"""Agents of OpenAI's and Anthropic's clients: three calls of a function, their results, and a text at the end."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from agents import ADD, FUNCTION, MAX_TOKENS, NUM_CALLS, QUESTION, added, agent_server
from demo_server import anthropic_of, openai_of


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with agent_server() as address:
        yield address


def assert_calls_and_answers(ask: Callable[[list[Any]], tuple[int, list[Any], str]]) -> None:
    """`ask(turns)` gives the number of calls of an answer, its turns with the results, and its text."""
    turns: list[Any] = [{"role": "user", "content": QUESTION}]
    num_calls = 0
    while (found := ask(turns))[0]:
        num_calls += found[0]
        turns += found[1]
    assert num_calls == NUM_CALLS
    assert found[2]


def whole_of(api: Any, asked: dict[str, Any], streamed: str | None) -> Any:
    """What an official client's `api` makes of the answer, streamed where it has a name for that."""
    if streamed is None:
        return api.create(**asked)
    with api.stream(**asked) as events:
        return getattr(events, f"get_final_{streamed}")()


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_calls_three_times_and_then_answers(url: str, stream: bool) -> None:
    def ask(turns: list[Any]) -> tuple[int, list[Any], str]:
        asked = {"model": "demo", "messages": turns, "tools": tools, "temperature": 0, "max_tokens": MAX_TOKENS}
        message = whole_of(client.chat.completions, asked, "completion" if stream else None).choices[0].message
        calls = message.tool_calls or []
        results = [(call.id, added(json.loads(call.function.arguments))) for call in calls]
        told = [{"role": "tool", "tool_call_id": name, "content": result} for name, result in results]
        return len(calls), [message.to_dict(), *told], message.content

    tools = [{"type": "function", "function": FUNCTION}]
    with openai_of(url) as client:
        assert_calls_and_answers(ask)


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_calls_three_times_and_then_answers(url: str, stream: bool) -> None:
    def ask(turns: list[Any]) -> tuple[int, list[Any], str]:
        asked = {"model": "demo", "input": turns, "tools": tools, "temperature": 0, "max_output_tokens": MAX_TOKENS}
        found = whole_of(client.responses, asked, "response" if stream else None)
        calls = [item for item in found.output if item.type == "function_call"]
        results = [(call.call_id, added(json.loads(call.arguments))) for call in calls]
        told = [{"type": "function_call_output", "call_id": name, "output": result} for name, result in results]
        return len(calls), [*(item.to_dict() for item in found.output), *told], found.output_text

    tools = [{"type": "function", **FUNCTION}]
    with openai_of(url) as client:
        assert_calls_and_answers(ask)


@pytest.mark.parametrize("stream", [False, True])
def test_a_message_calls_three_times_and_then_answers(url: str, stream: bool) -> None:
    def ask(turns: list[Any]) -> tuple[int, list[Any], str]:
        asked = {"model": "demo", "messages": turns, "tools": tools, "max_tokens": MAX_TOKENS}
        asked["extra_body"] = {"temperature": 0}
        found = whole_of(client.messages, asked, "message" if stream else None)
        uses = [block for block in found.content if block.type == "tool_use"]
        assert (found.stop_reason == "tool_use") is bool(uses)
        results = [{"type": "tool_result", "tool_use_id": use.id, "content": added(use.input)} for use in uses]
        more = [{"role": "assistant", "content": found.content}, {"role": "user", "content": results}]
        return len(uses), more, "" if uses else found.content[0].text

    tools = [{"name": "add", "description": "The sum of two numbers", "input_schema": ADD}]
    with anthropic_of(url) as client:
        assert_calls_and_answers(ask)
