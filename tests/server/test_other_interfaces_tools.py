"""Forms and calls of functions in responses and messages, by the official clients: what a chat would answer."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from demo_server import WithTools, serving_demo
from json_schemas import closed

from d3engine import AsyncEngine

COUNT = closed({"many": {"enum": [5, '"6"']}})
QUESTION = "Tom has 5 pens."
SEEDED: dict[str, Any] = {"temperature": 1.0, "seed": 2}


@pytest.fixture(scope="module")
def url(client: AsyncEngine) -> Iterator[str]:
    """A server whose model's template knows of tools."""
    with serving_demo(WithTools(client)) as address:
        yield address


def assert_is_count(arguments: Any) -> None:
    assert arguments["many"] in COUNT["properties"]["many"]["enum"]


# -- responses ---------------------------------------------------------------------------------------------------------

FUNCTION: dict[str, Any] = {"type": "function", "name": "count", "parameters": COUNT, "strict": True}
ASKED: dict[str, Any] = {"model": "demo", "input": QUESTION, "tools": [FUNCTION], "extra_body": {"seed": 2}}


def test_response_with_a_call_is_the_chats_whole_and_streamed(openai: Any) -> None:
    """A response that calls has the chat's call, whole and streamed."""
    choice = {"type": "function", "name": "count"}
    asked = {**ASKED, "tool_choice": choice, "temperature": 1.0, "parallel_tool_calls": False}
    whole = openai.responses.create(**asked)
    events = list(openai.responses.create(**asked, stream=True))
    said = openai.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": QUESTION}],
        tools=[{"type": "function", "function": {"name": "count", "description": "", "parameters": COUNT}}],
        tool_choice={"type": "function", "function": {"name": "count"}},
        parallel_tool_calls=False,
        **SEEDED,
    )
    (call,) = said.choices[0].message.tool_calls or []
    (item,) = whole.output
    assert item.type == "function_call"
    assert (item.name, item.arguments, item.status) == ("count", call.function.arguments, "completed")
    assert_is_count(json.loads(item.arguments))
    assert (whole.status, whole.output_text) == ("completed", "")
    assert (whole.tools[0].type, whole.parallel_tool_calls) == ("function", False)
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:3] == ["created", "in_progress", "output_item.added"]
    assert set(kinds[3:-3]) == {"function_call_arguments.delta"}
    assert kinds[-3:] == ["function_call_arguments.done", "output_item.done", "completed"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert pieces  # how many pieces there are depends on how soon they are read
    assert "".join(pieces) == item.arguments
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output[0].arguments == item.arguments
    assert len({event.item_id for event in events if hasattr(event, "item_id")}) == 1


def test_calls_and_results_are_part_of_a_responses_input(openai: Any) -> None:
    call = {"type": "function_call", "call_id": "call_1", "name": "count", "arguments": '{"many": 5}'}
    items: list[Any] = [
        {"role": "user", "content": QUESTION},
        call,
        call | {"call_id": "call_2"},
        {"type": "function_call_output", "call_id": "call_1", "output": "5"},
        {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "6"}]},
    ]
    found = openai.responses.create(model="demo", input=items, max_output_tokens=8)
    told = {"type": "function", "function": {"name": "count", "arguments": '{"many": 5}'}}
    messages: list[Any] = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "call_1", **told}, {"id": "call_2", **told}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "5"},
        {"role": "tool", "tool_call_id": "call_2", "content": "6"},
    ]
    said = openai.chat.completions.create(model="demo", messages=messages, max_tokens=8)
    assert found.output_text == said.choices[0].message.content
    assert found.usage.input_tokens == said.usage.prompt_tokens


def test_a_response_keeps_to_the_form_of_its_text(openai: Any) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "count", "schema": COUNT, "strict": True}}
    asked: dict[str, Any] = {"model": "demo", "input": QUESTION, "text": form, "temperature": 1.0}
    found = openai.responses.create(**asked, extra_body={"seed": 1})
    assert_is_count(json.loads(found.output_text))
    assert found.text.format.type == "json_schema"
    form = {"format": {"type": "json_object"}}
    any_object = openai.responses.create(model="demo", input=QUESTION, text=form, max_output_tokens=3)
    assert any_object.output_text.startswith("{")


# -- messages ----------------------------------------------------------------------------------------------------------

TURNS: list[Any] = [{"role": "user", "content": QUESTION}]
TOOL: dict[str, Any] = {"name": "count", "description": "How many", "input_schema": COUNT}
MESSAGE: dict[str, Any] = {"model": "demo", "messages": TURNS, "max_tokens": 200, "tools": [TOOL]}


def test_message_with_a_call_has_tool_use_whole_and_streamed(anthropic: Any) -> None:
    """A message that calls has blocks of tool use, whole and streamed."""
    asked = {**MESSAGE, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    asked["extra_body"] = SEEDED | {"return_depths": True}
    whole = anthropic.messages.create(**asked)
    (block,) = whole.content
    assert (block.type, whole.stop_reason) == ("tool_use", "tool_use")
    assert block.name == "count"
    assert_is_count(block.input)
    with anthropic.messages.stream(**asked) as stream:
        events = list(stream)
        streamed = stream.get_final_message()
    assert streamed.content[0].input == block.input
    assert (streamed.content[0].type, streamed.stop_reason, len(streamed.content)) == ("tool_use", "tool_use", 1)
    raw = [event for event in events if event.type == "content_block_delta"]
    assert raw  # how many pieces there are depends on how soon they are read
    assert {event.delta.type for event in raw} == {"input_json_delta"}
    told = [depth for event in raw for depth in ((event.model_extra or {}).get("d3ext") or {"depths": []})["depths"]]
    assert told == block.model_extra["d3ext"]["depths"]
    assert len(told) == whole.usage.output_tokens


def test_uses_and_results_of_tools_are_part_of_a_conversation(anthropic: Any, openai: Any) -> None:
    uses = {"type": "tool_use", "id": "toolu_1", "name": "count", "input": {"many": 5}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "5"}]}
    turns = [
        *TURNS,
        {"role": "assistant", "content": [{"type": "text", "text": "I count."}, uses]},
        {"role": "user", "content": [result, {"type": "text", "text": "And now?"}]},
    ]
    call = {"id": "toolu_1", "type": "function", "function": {"name": "count", "arguments": '{"many": 5}'}}
    chat: list[Any] = [
        *TURNS,
        {"role": "assistant", "content": [{"type": "text", "text": "I count."}], "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "toolu_1", "content": [{"type": "text", "text": "5"}]},
        {"role": "user", "content": [{"type": "text", "text": "And now?"}]},
    ]
    found = anthropic.messages.create(model="demo", messages=turns, max_tokens=8)
    said = openai.chat.completions.create(model="demo", messages=chat, max_tokens=8)
    assert found.content[0].text == said.choices[0].message.content
    assert anthropic.messages.count_tokens(model="demo", messages=turns).input_tokens == said.usage.prompt_tokens
    none: Any = {"tools": [TOOL], "tool_choice": {"type": "none"}}
    plain = anthropic.messages.create(model="demo", messages=TURNS, max_tokens=8)
    assert anthropic.messages.create(model="demo", messages=TURNS, max_tokens=8, **none).content == plain.content


def test_a_call_that_is_cut_is_no_block_of_a_whole_message(anthropic: Any) -> None:
    found = anthropic.messages.create(**MESSAGE | {"max_tokens": 3, "tool_choice": {"type": "tool", "name": "count"}})
    assert (found.content, found.stop_reason) == ([], "max_tokens")


def test_a_message_keeps_to_the_form_of_its_output(anthropic: Any) -> None:
    config: Any = {"format": {"type": "json_schema", "schema": COUNT}}
    asked: dict[str, Any] = {"model": "demo", "messages": TURNS, "max_tokens": 99}
    found = anthropic.messages.create(**asked, output_config=config, extra_body=SEEDED)
    assert_is_count(json.loads(found.content[0].text))
