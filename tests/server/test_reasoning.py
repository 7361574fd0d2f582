"""Reasoning in chats, responses and messages, by the official clients: apart from the answer, and of bounded length."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from demo_server import WithTools, anthropic_of, openai_of, serving_demo
from json_schemas import closed
from openai import BadRequestError

from d3engine import AsyncEngine
from d3engine.server.requests.formats import reasoning_format_named
from d3engine.server.requests.tools import ChatStyle, ChatStyles

QUESTION = "Tom has 5 pens."
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}{{ message.role }}: "
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}\n{% endfor %}{% if add_generation_prompt %}Answer:"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% else %}<think>\n"
    "{% endif %}{% endif %}"
)
"""A Qwen's of 2025: the reasoning has begun, unless it is switched off."""
COUNT = closed({"many": {"enum": [5, 6]}})
BUDGET = 6


class Thinks(WithTools):
    template = TEMPLATE

    async def chat_template(self) -> str:
        return TEMPLATE


@pytest.fixture(scope="module")
def url(client: AsyncEngine) -> Iterator[str]:
    with serving_demo(Thinks(client)) as address:
        yield address


CHAT: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 60}


def test_reasoning_is_apart_from_the_answer_within_its_budget(openai: Any) -> None:
    """Reasoning is apart from the answer, and ends at its budget."""
    asked = CHAT | {"extra_body": {"thinking_token_budget": BUDGET, "return_token_ids": True}}
    choice = openai.chat.completions.create(**asked).choices[0]
    reasoning = choice.message.reasoning_content
    assert reasoning
    assert choice.message.content
    assert "think>" not in reasoning + choice.message.content
    chunks = list(openai.chat.completions.create(**asked, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    pieces = [found for delta in deltas if (found := getattr(delta, "reasoning_content", None))]
    texts = [delta.content for delta in deltas if delta.content]
    assert ("".join(pieces), "".join(texts)) == (reasoning, choice.message.content)
    # Within the budget the reasoning is what the model writes of itself.
    free = openai.chat.completions.create(**CHAT | {"max_tokens": BUDGET}).choices[0]
    assert free.message.reasoning_content.startswith(reasoning)
    assert free.message.content is None


@pytest.mark.parametrize("field", [{"enable_thinking": False}, {"reasoning_effort": "none"}])
def test_a_reasoning_can_be_switched_off(openai: Any, field: dict[str, Any]) -> None:
    message = openai.chat.completions.create(**CHAT, extra_body=field).choices[0].message
    assert message.content
    assert not hasattr(message, "reasoning_content")
    same = {"chat_template_kwargs": {"enable_thinking": False}}
    assert openai.chat.completions.create(**CHAT, extra_body=same).choices[0].message.content == message.content


def test_a_call_and_a_form_come_behind_the_reasoning(openai: Any) -> None:
    tools: list[Any] = [{"type": "function", "function": {"name": "count", "parameters": COUNT}}]
    budget: Any = {"extra_body": {"thinking_token_budget": BUDGET}}
    asked = CHAT | budget | {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200}
    message = openai.chat.completions.create(**asked).choices[0].message
    assert message.reasoning_content
    (call,) = message.tool_calls or []
    assert json.loads(call.function.arguments)["many"] in (5, 6)
    form: Any = {"type": "json_schema", "json_schema": {"name": "count", "schema": COUNT}}
    message = openai.chat.completions.create(**CHAT | budget, response_format=form).choices[0].message
    assert message.reasoning_content
    assert json.loads(message.content or "")["many"] in (5, 6)


def test_a_response_has_an_item_of_reasoning_whole_and_streamed(openai: Any) -> None:
    asked: dict[str, Any] = {"model": "demo", "input": QUESTION, "max_output_tokens": 40}
    asked["extra_body"] = {"thinking_token_budget": BUDGET}
    whole: Any = openai.responses.create(**asked)
    said = openai.chat.completions.create(**CHAT | {"max_tokens": 40}, **{"extra_body": asked["extra_body"]})
    reasoning, message = whole.output
    assert (reasoning.type, message.type) == ("reasoning", "message")
    assert reasoning.content[0].text == said.choices[0].message.reasoning_content
    assert whole.output_text == said.choices[0].message.content
    used = whole.usage.output_tokens_details.reasoning_tokens
    assert BUDGET < used < whole.usage.output_tokens
    events = list(openai.responses.create(**asked, stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert "".join(e.delta for e in events if e.type == "response.reasoning_text.delta") == reasoning.content[0].text
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text
    last: Any = events[-1]
    assert [item.type for item in last.response.output] == ["reasoning", "message"]
    assert last.response.usage.output_tokens_details.reasoning_tokens == used
    asked["extra_body"] = {**asked["extra_body"], "return_depths": True}
    deep: Any = openai.responses.create(**asked)
    events = list(openai.responses.create(**asked, stream=True))
    added = [event.item.type for event in events if event.type == "response.output_item.added"]
    assert added == ["reasoning", "message"]
    told = [one for e in events for one in ((e.model_extra or {}).get("d3ext") or {"depths": []})["depths"]]
    assert told == deep.output[0].content[0].d3ext["depths"]
    assert len(told) == deep.usage.output_tokens
    off = openai.responses.create(model="demo", input=QUESTION, max_output_tokens=9, reasoning={"effort": "none"})
    assert [item.type for item in off.output] == ["message"]


def test_a_message_has_a_block_of_thinking_whole_and_streamed(anthropic: Any, openai: Any) -> None:
    asked: dict[str, Any] = {"model": "demo", "messages": CHAT["messages"], "max_tokens": 40}
    asked["thinking"] = {"type": "enabled", "budget_tokens": BUDGET}
    whole: Any = anthropic.messages.create(**asked)
    extra = {"thinking_token_budget": BUDGET}
    said = openai.chat.completions.create(**CHAT | {"max_tokens": 40}, extra_body=extra).choices[0]
    reasoning, text = whole.content
    assert (reasoning.type, reasoning.thinking) == ("thinking", said.message.reasoning_content)
    assert (text.type, text.text) == ("text", said.message.content)
    with anthropic.messages.stream(**asked) as stream:
        streamed: Any = stream.get_final_message()
    assert [block.type for block in streamed.content] == ["thinking", "text"]
    assert (streamed.content[0].thinking, streamed.content[1].text) == (reasoning.thinking, text.text)
    off = anthropic.messages.create(**asked | {"thinking": {"type": "disabled"}})
    assert [block.type for block in off.content] == ["text"]


def test_earlier_reasoning_reaches_the_template_of_each_api(openai: Any, anthropic: Any) -> None:
    """Earlier reasoning reaches the chat template in each interface."""
    call = {"id": "a", "type": "function", "function": {"name": "count", "arguments": '{"many": 5}'}}
    earlier = {"role": "assistant", "content": "", "reasoning_content": "Pens.", "tool_calls": [call]}
    chat: list[Any] = [*CHAT["messages"], earlier, {"role": "tool", "tool_call_id": "a", "content": "5"}]
    said = openai.chat.completions.create(**CHAT | {"messages": chat, "max_tokens": 2})
    wanted = said.usage.prompt_tokens
    items: list[Any] = [
        {"role": "user", "content": QUESTION},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Pens."}]},
        {"type": "function_call", "call_id": "a", "name": "count", "arguments": '{"many": 5}'},
        {"type": "function_call_output", "call_id": "a", "output": "5"},
    ]
    found = openai.responses.create(model="demo", input=items, max_output_tokens=2)
    assert found.usage.input_tokens == wanted
    blocks = [
        {"type": "thinking", "thinking": "Pens.", "signature": ""},
        {"type": "tool_use", "id": "a", "name": "count", "input": {"many": 5}},
    ]
    turns: list[Any] = [
        *CHAT["messages"],
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "5"}]},
    ]
    assert anthropic.messages.count_tokens(model="demo", messages=turns).input_tokens == wanted


def test_a_model_that_does_not_think_refuses_to_by_name(client: AsyncEngine) -> None:
    from anthropic import BadRequestError as Refused

    with serving_demo(WithTools(client)) as url:
        with openai_of(url) as openai:
            for field, value in (("enable_thinking", True), ("reasoning_effort", "low"), ("thinking_token_budget", 9)):
                with pytest.raises(BadRequestError, match="does not think") as caught:
                    openai.chat.completions.create(**CHAT, extra_body={field: value})
                assert caught.value.param == field
            with pytest.raises(BadRequestError, match="does not think") as caught:
                openai.responses.create(model="demo", input=QUESTION, reasoning={"effort": "high"})
            assert caught.value.param == "reasoning"
            quiet = {"reasoning_effort": "none", "enable_thinking": False}
            assert openai.chat.completions.create(**CHAT, extra_body=quiet).choices[0].message.content
        with anthropic_of(url) as anthropic:
            asked: dict[str, Any] = {"model": "demo", "messages": CHAT["messages"], "max_tokens": 4}
            with pytest.raises(Refused, match="thinking"):
                anthropic.messages.create(**asked, thinking={"type": "enabled", "budget_tokens": 9})
            assert anthropic.messages.create(**asked, thinking={"type": "adaptive"}).content


class Marked(WithTools):
    """An engine that notes how it is asked."""

    def __init__(self, client: Any) -> None:
        super().__init__(client)
        self.asked: list[Any] = []

    async def prepare(self, prompt: Any, params: Any, **more: Any) -> Any:
        self.asked.append(params)
        return await self._client.prepare(prompt, params, **more)


def test_special_marks_of_reasoning_are_read_without_budget(
    client: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    style = ChatStyle(reasoning=reasoning_format_named("mistral"), special_ids={"[THINK]": 3, "[/THINK]": 4})

    async def found(self: ChatStyles, template: str | None) -> ChatStyle:
        return style

    monkeypatch.setattr(ChatStyles, "of", found)
    marked = Marked(client)
    with serving_demo(marked) as url, openai_of(url) as openai:
        openai.chat.completions.create(**CHAT | {"max_tokens": 2})
        openai.chat.completions.create(**CHAT, extra_body={"structured_outputs": {"choice": ["5", "6"]}})
        with pytest.raises(BadRequestError, match="thinking_token_budget must be absent, since special tokens"):
            openai.chat.completions.create(**CHAT, extra_body={"thinking_token_budget": 5})
    assert [params.skip_special_tokens for params in marked.asked] == [False, False]
    assert marked.asked[1].structured_outputs.reasoning is None
