"""POST /v1/responses by OpenAI's own client: what a chat answers, in the form of a response that nobody keeps."""

from typing import Any

import httpx
import pytest
from bad_values import bad_values
from demo_server import Dying, serving_demo
from untimed import untimed

from d3engine import AsyncEngine

QUESTION = "Tom has 5 pens. Tom finds 3. Tom buys 2. How many pens does Tom have now?"
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
ASKED: dict[str, Any] = {"model": "demo", "input": QUESTION}
PATH = "/v1/responses"
WRONG_FORMS: list[dict[str, Any]] = [
    {"type": "json_object", "name": "a"},
    {"type": "json_schema", "name": "a"},
    {"type": "json_schema", "name": "a", "schema": {"type": "no"}},
]


@pytest.mark.parametrize("sampled", [{}, {"temperature": 1.0, "top_p": 0.95, "seed": 3, "top_k": 40}], ids=str)
def test_a_response_whole_and_streamed_is_what_the_chat_says(openai: Any, sampled: dict[str, Any]) -> None:
    said = openai.chat.completions.create(model="demo", messages=MESSAGES, extra_body=sampled)
    whole = openai.responses.create(**ASKED, metadata={"a": "b"}, store=False, extra_body=sampled)
    assert whole.output_text == said.choices[0].message.content
    assert (whole.object, whole.status, whole.error, whole.incomplete_details) == ("response", "completed", None, None)
    assert (whole.metadata, whole.model, whole.id[:5]) == ({"a": "b"}, "demo", "resp_")
    assert (whole.output[0].type, whole.output[0].status) == ("message", "completed")
    with openai.responses.stream(**ASKED, extra_body=sampled) as stream:
        events = list(stream)
        streamed = stream.get_final_response()
    assert streamed.output_text == whole.output_text
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert deltas  # how many tokens each has depends on how soon they are read
    assert "".join(deltas) == whole.output_text
    wanted = (said.usage.prompt_tokens, said.usage.completion_tokens, said.usage.total_tokens)
    for usage in (whole.usage, streamed.usage):
        assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == wanted


def test_response_events_are_in_order_and_numbered(openai: Any) -> None:
    """The events of a response come in their order, and are numbered."""
    events = list(openai.responses.create(**ASKED, max_output_tokens=3, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    first, *_, text, part, item, last = events
    assert first.type == "response.created"
    assert last.type == "response.incomplete"
    assert (first.response.status, first.response.usage, first.response.output) == ("in_progress", None, [])
    assert (last.response.status, last.response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert last.response.usage.output_tokens == 3
    assert text.text == part.part.text == last.response.output_text
    assert item.item == last.response.output[0]
    assert first.response.id == last.response.id


def test_messages_and_instructions_are_read_as_a_chats(openai: Any) -> None:
    items: list[Any] = [
        {"role": "developer", "content": "Be right."},
        {"role": "user", "content": [{"type": "input_text", "text": "Ann has 4 cups."}]},
        {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant"}
        | {"content": [{"type": "output_text", "text": "She has.", "annotations": []}]},
        {"type": "message", "role": "user", "content": QUESTION},
    ]
    chat: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "system", "content": "Be right."},
        {"role": "user", "content": "Ann has 4 cups."},
        {"role": "assistant", "content": "She has."},
        *MESSAGES,
    ]
    found = openai.responses.create(model="demo", input=items, instructions="Be brief.")
    said = openai.chat.completions.create(model="demo", messages=chat)
    assert found.output_text == said.choices[0].message.content
    assert found.instructions == "Be brief."


def test_depth_is_told_in_a_response_as_in_a_chat(openai: Any) -> None:
    extra = {"return_depths": True, "depth": {"policy": "d3", "alpha": 0.6, "start": 0.5}}
    said = openai.chat.completions.create(model="demo", messages=MESSAGES, extra_body=extra)
    whole = openai.responses.create(**ASKED, extra_body=extra).model_dump()
    events = [event.model_dump() for event in openai.responses.create(**ASKED, extra_body=extra, stream=True)]
    summary, tokens = said.model_extra["d3ext"], said.choices[0].model_extra["d3ext"]
    assert untimed(whole["d3ext"]) == untimed(events[-1]["response"]["d3ext"]) == untimed(summary)
    assert whole["output"][0]["content"][0]["d3ext"] == tokens
    told = [event["d3ext"] for event in events if event["type"] == "response.output_text.delta"]
    assert [depth for one in told for depth in one["depths"]] == tokens["depths"]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        *bad_values(input=[None, [], "Tom " * 2000], max_output_tokens=[0, 1020], temperature=[2.1], top_logprobs=[2]),
        *bad_values(store=[True], previous_response_id=["resp_1"], conversation=["conv_1"], background=[True]),
        *bad_values(tools=[[{"type": "web_search"}]], tool_choice=["required", {"type": "function", "name": "f"}]),
        *bad_values(include=[["message.output_text.logprobs"]], reasoning=[{"effort": "high"}], truncation=["auto"]),
        *bad_values(text=[{"format": form} for form in WRONG_FORMS] + [{"verbosity": "low"}]),
        *bad_values(prompt=[{"id": "p"}], depth=["deep"]),
        ({"input": ["Tom"]}, "input[0]"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0].type"),
        ({"input": [{"type": "function_call_output", "output": "a"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0]"),
        ({"input": [{"type": "reasoning", "content": 5}]}, "input[0]"),
        ({"input": [{"type": "reasoning", "summary": ["a"]}]}, "input[0]"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_response_that_cannot_be_honoured_names_the_field(refusal: Any, changes: dict[str, Any], param: str) -> None:
    status, error = refusal(PATH, ASKED | {"stream": True} | changes)
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)


def test_fields_that_a_response_does_not_know_are_named(http: httpx.Client) -> None:
    part = {"type": "input_text", "text": "Tom", "later": 1}
    answer = http.post(PATH, json={"input": [{"role": "user", "content": [part]}], "later_one": 2})
    assert answer.headers["x-d3-ignored-fields"] == "later_one, input.content.later"


def test_response_that_fails_after_its_first_byte_is_failed(client: AsyncEngine, openai: Any) -> None:
    """A response that fails after its first byte ends as failed."""

    with serving_demo(Dying(client)) as address:
        events = list(openai.with_options(base_url=f"{address}/v1").responses.create(**ASKED, stream=True))
    last = events[-1]
    assert last.type == "response.failed"
    assert last.sequence_number == len(events) - 1
    assert (last.response.status, last.response.error.code) == ("failed", "server_error")
    assert "secret" not in str(last)
