"""POST /v1/messages by Anthropic's own client: what a chat answers, in Anthropic's form."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from bad_values import bad_values
from demo_server import Dying, serving_demo
from guarded_apps import JSON, GuardedApp
from starlette.requests import Request
from starlette.responses import Response
from untimed import untimed

from d3engine import AsyncEngine
from d3engine.server.middleware.settings import GuardSettings
from d3engine.server.responses.streams import EventStream
from d3engine.server.routes.messages import MESSAGE_FORM, PING

QUESTION = "Tom has 5 pens. Tom finds 3. Tom buys 2. How many pens does Tom have now?"
ANSWER = "Adding 3 makes 5 + 3 = 8. Adding 2 makes 8 + 2 = 10. #### 10"
TURNS: list[Any] = [{"role": "user", "content": QUESTION}]
ASKED: dict[str, Any] = {"model": "demo", "messages": TURNS, "max_tokens": 60}
PATH = "/v1/messages"


@pytest.mark.parametrize("sampled", [{}, {"temperature": 1.0, "top_p": 0.95, "top_k": 40, "seed": 3}], ids=str)
def test_message_whole_and_streamed_is_what_the_chat_says(anthropic: Any, openai: Any, sampled: dict[str, Any]) -> None:
    said = openai.chat.completions.create(model="demo", messages=TURNS, max_tokens=60, extra_body=sampled)
    whole = anthropic.messages.create(**ASKED, extra_body=sampled)
    (block,) = whole.content
    assert block.type == "text"
    assert block.text == said.choices[0].message.content
    assert (whole.type, whole.role, whole.model, whole.id[:4]) == ("message", "assistant", "demo", "msg_")
    assert (whole.stop_reason, whole.stop_sequence) == ("end_turn", None)
    with anthropic.messages.stream(**ASKED, extra_body=sampled) as stream:
        pieces = list(stream.text_stream)
        streamed = stream.get_final_message()
    assert pieces  # how many there are depends on how soon they are read
    assert "".join(pieces) == block.text
    assert streamed.content[0].model_dump(exclude={"parsed_output"}) == block.model_dump()
    assert (streamed.stop_reason, streamed.role, streamed.model) == ("end_turn", "assistant", "demo")
    for usage in (whole.usage, streamed.usage):
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == said.usage.prompt_tokens
        assert usage.output_tokens == said.usage.completion_tokens


def test_message_stream_events_are_named_and_in_order(http: httpx.Client) -> None:
    """The events of a stream come in their order, each under its name."""
    answer = http.post(PATH, json=ASKED | {"stream": True, "max_tokens": 3})
    assert answer.headers["content-type"].startswith("text/event-stream")
    *found, nothing = answer.text.split("\n\n")
    pairs = [one.split("\n") for one in found]
    names = [name.removeprefix("event: ") for name, _ in pairs]
    assert [json.loads(data.removeprefix("data: "))["type"] for _, data in pairs] == names
    assert names[:3] == ["message_start", "content_block_start", "ping"]
    assert set(names[3:-3]) == {"content_block_delta"}
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert nothing == ""


@pytest.mark.parametrize(
    ("turns", "system", "as_chat"),
    [
        ([{"role": "user", "content": [{"type": "text", "text": QUESTION}]}], "Be brief.", None),
        (TURNS, [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}], None),
        (
            [{"role": "user", "content": "Tom has 5 pens."}, {"role": "user", "content": "How many has he now?"}],
            None,
            [{"role": "user", "content": "Tom has 5 pens.\nHow many has he now?"}],
        ),
        ([*TURNS, {"role": "assistant", "content": "Adding 3 makes 5 + 3 = 8."}], None, None),
    ],
    ids=["blocks", "system", "one role twice", "an answer that has begun"],
)
def test_conversation_is_read_as_by_the_chat(
    anthropic: Any, openai: Any, turns: Any, system: Any, as_chat: Any
) -> None:
    extra = {"continue_final_message": turns[-1]["role"] == "assistant"}
    chat: list[Any] = [{"role": "system", "content": system}] if system else []
    chat += as_chat or turns
    said = openai.chat.completions.create(model="demo", messages=chat, max_tokens=60, extra_body=extra)
    asked: dict[str, Any] = {"messages": turns} | ({"system": system} if system else {})
    found = anthropic.messages.create(**ASKED | asked)
    assert found.content[0].text == said.choices[0].message.content
    count = anthropic.messages.count_tokens(model="demo", **asked)
    assert count.input_tokens == said.usage.prompt_tokens


@pytest.mark.parametrize(
    ("changes", "reason", "sequence"),
    [
        ({"max_tokens": 3}, "max_tokens", None),
        ({"stop_sequences": ["zzz", "5 + 3 = 8"]}, "stop_sequence", "5 + 3 = 8"),
        ({"messages": [{"role": "user", "content": "Tom " * 1008}]}, "model_context_window_exceeded", None),
    ],
    ids=["length", "stop", "context"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_why_a_message_ends_is_told_by_anthropics_word(
    anthropic: Any, stream: bool, changes: dict[str, Any], reason: str, sequence: str | None
) -> None:
    if stream:
        with anthropic.messages.stream(**ASKED | changes) as events:
            found: Any = events.get_final_message()
    else:
        found = anthropic.messages.create(**ASKED | changes)
    assert (found.stop_reason, found.stop_sequence) == (reason, sequence)
    if sequence is not None:
        assert found.content[0].text == "Adding 3 makes "


def test_depth_is_told_in_a_message_as_in_a_chat(anthropic: Any, openai: Any) -> None:
    extra = {"return_depths": True, "depth": {"policy": "d3", "alpha": 0.6, "start": 0.5}}
    said = openai.chat.completions.create(model="demo", messages=TURNS, extra_body=extra)
    whole = anthropic.messages.create(**ASKED, extra_body=extra)
    assert untimed(whole.model_extra["d3ext"]) == untimed(said.model_extra["d3ext"])
    assert whole.content[0].model_extra["d3ext"] == said.choices[0].model_extra["d3ext"]
    events = list(anthropic.messages.create(**ASKED, extra_body=extra, stream=True))
    told = [one.model_extra["d3ext"] for one in events if one.type == "content_block_delta" and one.model_extra]
    last = next(one for one in events if one.type == "message_delta")
    assert untimed(last.model_extra["d3ext"]) == untimed(said.model_extra["d3ext"])
    assert [depth for one in told for depth in one["depths"]] == said.choices[0].model_extra["d3ext"]["depths"]
    header = anthropic.messages.create(
        **ASKED, extra_body={"return_depths": True}, extra_headers={"X-D3-Depth": "full"}
    )
    assert header.model_extra["d3ext"]["mean_layers"] == 16


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        *bad_values(messages=[[], "Tom"], system=[5], max_tokens=[None, 0, 2**70], temperature=[2.1], top_p=[0]),
        *bad_values(top_k=[-2], stop_sequences=[[""], ["a"] * 17, "a"], mcp_servers=[[{}]], container=["c"]),
        *bad_values(tool_choice=[{"type": "auto"}, {"type": "tool"}], speed=["fast"], depth=["deep"]),
        *bad_values(thinking=[{"type": "enabled", "budget_tokens": 1024}]),
        ({"messages": ["Tom"]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [*TURNS, {"role": "user", "content": [{"type": "image"}]}]}, "messages[1].content[0]"),
        ({"system": [{"type": "text"}]}, "system[0]"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "no"}}}}, "output_config"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0]"),
        ({"output_config": {"effort": "low"}}, "output_config.effort"),
    ],
    ids=str,
)
def test_message_refusal_names_a_field_as_anthropic(http: httpx.Client, changes: dict[str, Any], name: str) -> None:
    """A message that cannot be honoured names the field in Anthropic's form."""
    answer = http.post(PATH, json=ASKED | {"stream": True} | changes)
    error = answer.json()
    assert (answer.status_code, set(error), error["type"]) == (400, {"type", "error"}, "error")
    assert set(error["error"]) == {"type", "message"}
    assert error["error"]["type"] == "invalid_request_error"
    assert error["error"]["message"].startswith(f"{name} must be ")


def test_anthropics_client_raises_its_own_errors(anthropic: Any, client: AsyncEngine) -> None:
    from anthropic import AuthenticationError, BadRequestError, NotFoundError

    with pytest.raises(NotFoundError) as missing:
        anthropic.messages.create(**ASKED | {"model": "claude"})
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    with pytest.raises(BadRequestError, match="max_model_len=1024"):
        anthropic.messages.create(**ASKED | {"messages": [{"role": "user", "content": "Tom " * 2000}]})
    with pytest.raises(NotFoundError, match="There is nothing at '/v1/messages/batches'"):
        anthropic.messages.batches.create(requests=[])
    with serving_demo(client, guards=GuardSettings(api_keys=("right-key",))) as address:
        with pytest.raises(AuthenticationError) as closed:
            anthropic.with_options(base_url=address, api_key="wrong-key").messages.create(**ASKED)
        anthropic.with_options(base_url=address, api_key="right-key").messages.create(**ASKED | {"max_tokens": 1})
    assert closed.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]


def test_fields_that_a_message_does_not_know_are_named(http: httpx.Client) -> None:
    part = {"type": "text", "text": QUESTION, "cache_control": {"type": "ephemeral"}, "citations": None}
    turns = [{"role": "user", "content": [part | {"later": 1}], "name": "Tom"}]
    answer = http.post(PATH, json=ASKED | {"max_tokens": 1, "messages": turns, "later_one": 2})
    assert answer.headers["x-d3-ignored-fields"] == "later_one, messages.name, messages.content.later"


# -- after the first byte --------------------------------------------------------------------------------------------


def test_message_of_a_dying_engine_raises_the_clients_error(anthropic: Any, client: AsyncEngine) -> None:
    """An engine that dies in a message raises the client's error."""
    from anthropic import APIStatusError

    with serving_demo(Dying(client)) as address:
        stream = anthropic.with_options(base_url=address).messages.create(**ASKED, stream=True)
        with pytest.raises(APIStatusError) as caught:
            list(stream)
    assert caught.value.body["error"]["type"] == "overloaded_error"  # type: ignore[index]
    assert "secret" not in str(caught.value)


def test_message_timeout_ends_with_anthropics_event() -> None:
    """A message that takes too long ends with Anthropic's event."""

    async def stream(request: Request) -> Response:
        async def events() -> Any:
            yield PING
            await asyncio.Event().wait()

        return EventStream(events(), ping_interval=0, form=MESSAGE_FORM)

    app = GuardedApp(GuardSettings(request_timeout=0.05), stream=stream)
    ping, error, rest = app.call("POST", "/stream", JSON, [b"{}"]).body.split(b"\n\n")
    assert (ping + b"\n\n", rest) == (PING, b"")
    name, data = error.split(b"\n")
    assert name == b"event: error"
    assert json.loads(data.removeprefix(b"data: "))["error"]["type"] == "timeout_error"
