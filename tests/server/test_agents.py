"""Agents of OpenAI's and Anthropic's clients: three calls of a function, their results, and a text at the end."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from agents import ADD, FUNCTION, MAX_TOKENS, NUM_CALLS, QUESTION, added, agent_server
from demo_server import anthropic_of, openai_of

Said = tuple[int, list[Any], str]
"""The number of calls of an answer, its turns with the results, and its text."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with agent_server() as address:
        yield address


def whole_of(api: Any, asked: dict[str, Any], streamed: str | None) -> Any:
    """What an official client's `api` makes of the answer, streamed where it has a name for that."""
    if streamed is None:
        return api.create(**asked)
    with api.stream(**asked) as events:
        return getattr(events, f"get_final_{streamed}")()


def chat(client: Any, turns: list[Any], stream: bool) -> Said:
    asked: dict[str, Any] = {"model": "demo", "messages": turns, "temperature": 0, "max_tokens": MAX_TOKENS}
    asked["tools"] = [{"type": "function", "function": FUNCTION}]
    message = whole_of(client.chat.completions, asked, "completion" if stream else None).choices[0].message
    calls = message.tool_calls or []
    results = [(call.id, added(json.loads(call.function.arguments))) for call in calls]
    told = [{"role": "tool", "tool_call_id": name, "content": result} for name, result in results]
    return len(calls), [message.to_dict(), *told], message.content


def response(client: Any, turns: list[Any], stream: bool) -> Said:
    asked: dict[str, Any] = {"model": "demo", "input": turns, "temperature": 0, "max_output_tokens": MAX_TOKENS}
    asked["tools"] = [{"type": "function", **FUNCTION}]
    found = whole_of(client.responses, asked, "response" if stream else None)
    calls = [item for item in found.output if item.type == "function_call"]
    results = [(call.call_id, added(json.loads(call.arguments))) for call in calls]
    told = [{"type": "function_call_output", "call_id": name, "output": result} for name, result in results]
    return len(calls), [*(item.to_dict() for item in found.output), *told], found.output_text


def message(client: Any, turns: list[Any], stream: bool) -> Said:
    asked: dict[str, Any] = {"model": "demo", "messages": turns, "max_tokens": MAX_TOKENS}
    asked |= {"extra_body": {"temperature": 0}}
    asked["tools"] = [{"name": "add", "description": "The sum of two numbers", "input_schema": ADD}]
    found = whole_of(client.messages, asked, "message" if stream else None)
    uses = [block for block in found.content if block.type == "tool_use"]
    assert (found.stop_reason == "tool_use") is bool(uses)
    results = [{"type": "tool_result", "tool_use_id": use.id, "content": added(use.input)} for use in uses]
    more = [{"role": "assistant", "content": found.content}, {"role": "user", "content": results}]
    return len(uses), more, "" if uses else found.content[0].text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("client_of", "ask"), [(openai_of, chat), (openai_of, response), (anthropic_of, message)])
def test_agent_of_a_client_calls_three_times_and_then_answers(
    url: str, client_of: Callable[[str], Any], ask: Callable[[Any, list[Any], bool], Said], stream: bool
) -> None:
    """An agent of each official client calls a function three times, and then answers with a text."""
    turns: list[Any] = [{"role": "user", "content": QUESTION}]
    num_calls = 0
    with client_of(url) as client:
        while (found := ask(client, turns, stream))[0]:
            num_calls += found[0]
            turns += found[1]
    assert num_calls == NUM_CALLS
    assert found[2]
