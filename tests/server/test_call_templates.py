"""Calls by the chat templates of each family, over HTTP: found, forced, streamed, and back in the next turn."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from call_templates import TEMPLATES
from demo_server import serving_demo
from json_schemas import closed

from d3engine import AsyncEngine
from d3engine.server.requests.tools import ChatStyles

COUNT = closed({"many": {"enum": [5, 6]}, "new": {"type": "boolean"}}, required=["many"])
TOOLS: list[Any] = [{"type": "function", "function": {"name": "count", "description": "How many", "parameters": COUNT}}]
MESSAGES: list[Any] = [{"role": "user", "content": "Tom has 5 pens."}]


@pytest.fixture(scope="module")
def url(client: AsyncEngine) -> Iterator[str]:
    """A server that takes a request's template."""
    with serving_demo(client, trust_request_chat_template=True) as address:
        yield address


def asked(name: str, **changes: Any) -> dict[str, Any]:
    beside = {"chat_template": TEMPLATES[name], "thinking_token_budget": 3}
    if name not in ("deepseek_v3", "hermes", "granite"):
        del beside["thinking_token_budget"]
    common: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "tools": TOOLS, "max_tokens": 400}
    return common | {"extra_body": beside, "temperature": 0} | changes


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_style_of_a_template_is_found_by_rendering(client: AsyncEngine, name: str) -> None:
    style: Any = asyncio.run(ChatStyles(client).of(TEMPLATES[name]))
    assert style.calls.name == name
    assert style.shows_tools == (name not in ("deepseek_v3", "phi4_mini_json"))
    assert style.arguments_as_text == (name == "deepseek_v3")
    thinks = {"hermes": "qwen3", "granite": "granite", "deepseek_v3": "qwen3"}
    assert (style.reasoning.name if style.reasoning else None) == thinks.get(name)
    other: Any = asyncio.run(ChatStyles(client, "hermes", "granite").of(TEMPLATES[name]))
    assert (other.calls.name, other.reasoning.name) == ("hermes", "granite")
    none = asyncio.run(ChatStyles(client, "none", "none").of(TEMPLATES[name]))
    assert (none.calls, none.reasoning) == (None, None)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_call_is_whole_and_streamed_and_part_of_the_next_turn(openai: Any, name: str) -> None:
    forced = asked(name, tool_choice="required", parallel_tool_calls=False)
    whole = openai.chat.completions.create(**forced).choices[0]
    (call,) = whole.message.tool_calls or []
    assert json.loads(call.function.arguments)["many"] in (5, 6)
    assert whole.finish_reason == "tool_calls"
    assert not whole.message.content
    with openai.chat.completions.stream(**forced) as events:
        streamed: Any = events.get_final_completion().choices[0].message
    assert streamed.tool_calls[0].function.arguments == call.function.arguments
    if name == "phi4_mini_json":  # its template writes no calls
        return
    turns = [*MESSAGES, whole.message.to_dict(), {"role": "tool", "tool_call_id": call.id, "content": "5"}]
    last = openai.chat.completions.create(**asked(name, messages=turns, tool_choice="none", max_tokens=9))
    assert last.choices[0].message.tool_calls is None


@pytest.mark.parametrize("name", TEMPLATES)
def test_text_stays_text_where_the_model_may_call(openai: Any, name: str) -> None:
    free = openai.chat.completions.create(**asked(name, max_tokens=12)).choices[0]
    assert free.message.tool_calls is None
    assert free.message.content or free.message.reasoning_content
    chunks = openai.chat.completions.create(**asked(name, max_tokens=12), stream=True)
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(texts) == (free.message.content or "")
