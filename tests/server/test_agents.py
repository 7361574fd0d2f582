"""Agents of OpenAI's and Anthropic's clients: three calls of a function, their results, and a text at the end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from agents import ADD, FUNCTION, MAX_TOKENS, NUM_CALLS, QUESTION, added, agent_server
from anthropic import Anthropic
from openai import OpenAI


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with agent_server() as address:
        yield address


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_calls_three_times_and_then_answers(url: str, stream: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    tools: list[Any] = [{"type": "function", "function": FUNCTION}]
    num_calls = 0
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        while True:
            asked: Any = {
                "model": "demo",
                "messages": messages,
                "tools": tools,
                "temperature": 0,
                "max_tokens": MAX_TOKENS,
            }
            if stream:
                with client.chat.completions.stream(**asked) as events:
                    message: Any = events.get_final_completion().choices[0].message
            else:
                message = client.chat.completions.create(**asked).choices[0].message
            if not message.tool_calls:
                break
            num_calls += len(message.tool_calls)
            messages.append(message.to_dict())
            for call in message.tool_calls:
                result = added(json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    assert num_calls == NUM_CALLS
    assert message.content


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_calls_three_times_and_then_answers(url: str, stream: bool) -> None:
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    tools: Any = [{"type": "function", **FUNCTION}]
    num_calls = 0
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        while True:
            asked: Any = {
                "model": "demo",
                "input": items,
                "tools": tools,
                "temperature": 0,
                "max_output_tokens": MAX_TOKENS,
            }
            if stream:
                with client.responses.stream(**asked) as events:
                    found: Any = events.get_final_response()
            else:
                found = client.responses.create(**asked)
            calls = [item for item in found.output if item.type == "function_call"]
            if not calls:
                break
            num_calls += len(calls)
            items += [item.to_dict() for item in found.output]
            for call in calls:
                result = added(json.loads(call.arguments))
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
    assert num_calls == NUM_CALLS
    assert found.output_text


@pytest.mark.parametrize("stream", [False, True])
def test_a_message_calls_three_times_and_then_answers(url: str, stream: bool) -> None:
    turns: list[Any] = [{"role": "user", "content": QUESTION}]
    tools: Any = [{"name": "add", "description": "The sum of two numbers", "input_schema": ADD}]
    num_calls = 0
    with Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        while True:
            asked: Any = {
                "model": "demo",
                "messages": turns,
                "tools": tools,
                "max_tokens": MAX_TOKENS,
                "extra_body": {"temperature": 0},
            }
            if stream:
                with client.messages.stream(**asked) as events:
                    found: Any = events.get_final_message()
            else:
                found = client.messages.create(**asked)
            uses = [block for block in found.content if block.type == "tool_use"]
            assert (found.stop_reason == "tool_use") is bool(uses)
            if not uses:
                break
            num_calls += len(uses)
            results = [{"type": "tool_result", "tool_use_id": use.id, "content": added(use.input)} for use in uses]
            turns += [{"role": "assistant", "content": found.content}, {"role": "user", "content": results}]
    assert num_calls == NUM_CALLS
    assert found.content[0].text
