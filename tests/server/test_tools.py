"""Functions that a chat calls, by OpenAI's own client: the calls parse, whole and as streams of pieces."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from bad_values import bad_values
from demo_server import HERMES as TEMPLATE_OF_HERMES
from demo_server import call_at_once, serving_demo
from json_schemas import closed
from openai import BadRequestError
from tool_calls import accepts, read

from d3engine import AsyncEngine, StructuredOutputsParams
from d3engine.server.requests.formats import UNKNOWN_FORMAT, tool_format_named
from d3engine.server.requests.tools import Calling, ChatStyle, tool_use_of
from d3engine.server.schemas.requests import ChatRequest

MESSAGES: list[Any] = [{"role": "user", "content": "Tom has 5 pens."}]
TEMPLATE = (
    "Question: {% for message in messages %}{{ message.content }}{% for call in message.tool_calls or [] %}"
    "{% for name, value in call.function.arguments.items() %}{{ name }}={{ value }}{% endfor %}{% endfor %}"
    "{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}\nAnswer:"
)
"""The bundled model's own refuses tools."""
CHAT: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "extra_body": {"chat_template": TEMPLATE}}
MANY = {"type": "integer", "minimum": 0, "maximum": 9}
THINGS = {"thing": {"enum": ['a "pen"', "{book}", "\\"]}}
COUNT = closed({"what": {"$ref": "#/$defs/thing"}, "many": MANY}, **{"$defs": THINGS})
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "count", "description": "How many", "parameters": COUNT}},
    {"type": "function", "function": {"name": "stop-it"}},
]
NEVER = {"type": "function", "function": {"name": "a", "parameters": {"type": "object", "not": {}}}}
NAMED = {"type": "function", "function": {"name": "count"}}


@pytest.fixture(scope="module")
def url(client: AsyncEngine) -> Iterator[str]:
    """A server that takes a request's template."""
    with serving_demo(client, trust_request_chat_template=True) as address:
        yield address


def assert_is_call(name: str, arguments: str) -> None:
    found = json.loads(arguments)
    if name == "stop-it":
        assert found == {}
        return
    assert name == "count"
    assert found["what"] in THINGS["thing"]["enum"]
    assert 0 <= found["many"] <= 9


def joined(chunks: list[Any], index: int = 0) -> tuple[list[tuple[str, str, str]], str, list[str]]:
    """The calls of a stream (id, name, arguments), its text, and its finish reasons."""
    calls: dict[int, list[str]] = {}
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices and chunk.choices[0].index == index]
    for choice in choices:
        for call in choice.delta.tool_calls or []:
            if call.index not in calls:
                assert call.type == "function"
                calls[call.index] = [call.id or "", call.function.name or "", ""]
            else:
                assert (call.id, call.type, call.function.name) == (None, None, None)
            calls[call.index][2] += call.function.arguments or ""
    text = "".join(choice.delta.content or "" for choice in choices)
    reasons = [choice.finish_reason for choice in choices if choice.finish_reason]
    assert list(calls) == list(range(len(calls)))
    return [(a, b, c) for a, b, c in calls.values()], text, reasons


def test_named_function_is_called_and_arguments_come_in_deltas(openai: Any) -> None:
    """A named function is called, and its arguments come in deltas."""
    asked: dict[str, Any] = {**CHAT, "tools": TOOLS, "tool_choice": NAMED, "temperature": 1.0, "seed": 2, "n": 2}
    whole = openai.chat.completions.create(**asked)
    chunks = list(openai.chat.completions.create(**asked, stream=True))
    for choice in whole.choices:
        (call,) = choice.message.tool_calls or []
        assert (choice.message.content, choice.finish_reason) == (None, "stop")
        assert_is_call(call.function.name, call.function.arguments)
        ((id, name, arguments),), text, reasons = joined(chunks, choice.index)
        assert (name, arguments, text, reasons) == ("count", call.function.arguments, "", ["stop"])
        assert id.startswith("call_")
    pieces = [chunk for chunk in chunks if chunk.choices[0].delta.tool_calls]
    assert pieces  # how many there are depends on how soon they are read


@pytest.mark.parametrize("seed", range(2))
def test_a_required_call_comes_however_random_the_model_is(openai: Any, client: AsyncEngine, seed: int) -> None:
    assert client.tokenizer is not None
    ending = {str(client.tokenizer.encode("]")[-1]): 4.0}  # or a list of calls would go on
    asked: dict[str, Any] = {**CHAT, "tools": TOOLS, "tool_choice": "required", "temperature": 1.5, "seed": seed}
    asked |= {"max_tokens": 500, "logit_bias": ending}
    for parallel in (True, False):
        whole = openai.chat.completions.create(**asked, parallel_tool_calls=parallel).choices[0]
        calls = whole.message.tool_calls or []
        assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
        assert len(calls) == 1 if not parallel else len(calls) >= 1
        for call in calls:
            assert_is_call(call.function.name, call.function.arguments)
        assert len({call.id for call in calls}) == len(calls)
        chunks = list(openai.chat.completions.create(**asked, parallel_tool_calls=parallel, stream=True))
        found, text, reasons = joined(chunks)
        assert (text, reasons) == ("", ["tool_calls"])
        assert [(name, args) for _, name, args in found] == [(c.function.name, c.function.arguments) for c in calls]


def test_a_call_that_is_cut_says_so(openai: Any) -> None:
    answer = openai.chat.completions.create(**CHAT, tools=TOOLS, tool_choice=NAMED, max_tokens=3).choices[0]
    assert answer.finish_reason == "length"
    (call,) = answer.message.tool_calls or []
    assert call.function.arguments.startswith("{")


def test_without_calls_tools_change_nothing(openai: Any) -> None:
    plain = openai.chat.completions.create(**CHAT, max_tokens=9).choices[0].message
    with_tools = openai.chat.completions.create(**CHAT, max_tokens=9, tools=TOOLS, tool_choice="none")
    assert with_tools.choices[0].message == plain


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        *bad_values(tools=[[{"type": "custom", "custom": {"name": "a"}}], [{"type": "function"}]]),
        *bad_values(tools=[[{"type": "function", "function": {"name": "a b"}}], [*TOOLS, TOOLS[0]]]),
        *bad_values(tool_choice=["required"], functions=[[{"name": "a"}]]),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": TOOLS, "tool_choice": "required", "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"tools": [NEVER], "tool_choice": "required"}, "tools"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}]}, "messages"),
    ],
    ids=lambda value: str(value)[:70],
)
def test_what_cannot_be_called_is_refused_by_name(openai: Any, changes: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        openai.chat.completions.create(**CHAT | {"extra_body": {"chat_template": TEMPLATE} | changes})
    assert (caught.value.type, caught.value.param) == ("invalid_request_error", param)


def test_a_template_that_knows_of_no_tools_refuses_them(refusal: Any) -> None:
    asked = {"model": "demo", "messages": MESSAGES, "tools": TOOLS, "tool_choice": "required"}
    status, error = refusal("/v1/chat/completions", asked)
    assert (status, error["param"]) == (400, "messages")
    assert "knows nothing of tools" in error["message"]


# -- calls that a model makes by itself -------------------------------------------------------------------------------

STOP_IT = '<tool_call>\n{"name": "stop-it", "arguments": {}}\n</tool_call>'
LLAMA_3: list[tuple[str, str, list[tuple[str, str]]]] = [
    ('{"type": "function", "name": "count", "arguments": {}}', "", [("count", "{}")]),
    (
        ' {"name":"count","parameters":{"a":"}\\"{","b":[{}]}}; {"name": "stop-it", "parameters": {}}',
        "",
        [("count", '{"a":"}\\"{","b":[{}]}'), ("stop-it", "{}")],
    ),
    ('{"name": "another", "parameters": {}}', '{"name": "another", "parameters": {}}', []),
    ('{"answer": 5}', '{"answer": 5}', []),
    ("{" + "x" * 400, "{" + "x" * 400, []),
]
IN_HERMES: list[tuple[str, str, list[tuple[str, str]]]] = [
    ('{"name": "count", "arguments": {"a": "}"}}', "", [("count", '{"a": "}"}')]),
    ('```json\n{\n "name": "count",\n "arguments": {"a": 1}\n}\n```', "", [("count", '{"a": 1}')]),
    ('{"name": "another", "arguments": {}}', '{"name": "another", "arguments": {}}', []),
    ("```python\nx\n```", "```python\nx\n```", []),
    ("a <tool b", "a <tool b", []),
    ("1 <", "1 <", []),
    # Cut by a limit: nothing of the form is text.
    ("I count. <tool_ca", "I count.", []),
    ('I count.\n<tool_call>\n{"name": "cou', "I count.", []),
]
UNREAD = StructuredOutputsParams(json_object=True)
"""The form of calls whose reader does not look at it."""


@pytest.mark.parametrize("size", [1, 2, 7, 10_000])
@pytest.mark.parametrize(
    ("style", "text", "said", "calls"),
    [*(("llama3_json", *one) for one in LLAMA_3), *(("hermes", *one) for one in IN_HERMES)],
)
def test_calls_are_read_from_a_text_however_it_is_cut(
    style: str, text: str, said: str, calls: list[tuple[str, str]], size: int
) -> None:
    calling = Calling("auto", ("count", "stop-it"), tool_format_named(style), UNREAD)
    assert read(calling, text, size)[:2] == (said, calls)


def test_arguments_are_passed_on_while_they_come() -> None:
    calling = Calling("required", ("count", "stop-it"), UNKNOWN_FORMAT, UNREAD)
    assert read(calling, '[{"name": "count", "parameters": {"many": 12345}}]', 1)[2] > 10


# -- calls held by grammar -------------------------------------------------------------------------------------------

HERMES_CHAT: dict[str, Any] = CHAT | {"extra_body": {"chat_template": TEMPLATE_OF_HERMES}}


def form_of(choice: Any = None, tools: Any = TOOLS, style: str | None = "hermes", **more: Any) -> Any:
    asked = ChatRequest(messages=MESSAGES, tools=tools, tool_choice=choice, **more)
    calling = tool_use_of(asked, ChatStyle(True, tool_format_named(style) if style else None)).calling
    assert calling is not None
    return calling.form


GOOD = '{"name": "count", "arguments": {"what": "{book}", "many": 5}}'
MARKED = f"<tool_call>\n{GOOD}\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("", True),
        ('{"name": "another"}', True),
        (f"I count.{MARKED}".replace(', "many": 5', ""), False),
        (GOOD.replace("5", "55"), False),
    ],
)
def test_text_is_free_until_a_call_which_is_held_to_the_schemas(text: str, fits: bool) -> None:
    assert accepts(form_of(), text) is fits


def test_without_parallel_calls_one_alone_may_come() -> None:
    for choice in ("auto", "required"):
        form = form_of(choice, parallel_tool_calls=False)
        assert accepts(form, MARKED)
        assert not accepts(form, f"{MARKED}\n{MARKED}")
    assert not accepts(form_of("required"), "Text.")
    assert not accepts(form_of(NAMED), STOP_IT)


def parameters_of(schema: Any, **more: Any) -> dict[str, Any]:
    return closed({"p": schema}, **more)


@pytest.mark.parametrize(
    ("parameters", "good", "bad"),
    [
        (parameters_of({"const": {"$ref": "#/a"}}), {"p": {"$ref": "#/a"}}, {"p": {"$ref": "#/b"}}),
        (parameters_of({"enum": [{"$ref": "#/a"}]}), {"p": {"$ref": "#/a"}}, {"p": 1}),
        (parameters_of({"type": "null", "default": {"$ref": "#/a"}}), {"p": None}, {"p": 1}),
        (parameters_of({"type": "null", "examples": [{"$ref": "#"}]}), {"p": None}, {"p": 1}),
        (parameters_of({"$ref": "#a"}, **{"$defs": {"s": {"$anchor": "a", "enum": ["x"]}}}), {"p": "x"}, {"p": "y"}),
        (parameters_of({"$ref": "#/$defs/s"}, **{"$defs": {"s": {"enum": ["x"]}}}), {"p": "x"}, {"p": "y"}),
        (
            parameters_of({"$ref": "s"}, **{"$id": "http://a/b", "$defs": {"s": {"$id": "s", "enum": ["x"]}}}),
            {"p": "x"},
            {"p": "y"},
        ),
        (parameters_of({"$ref": "#"}, required=[]), {"p": {"p": {}}}, {"p": 1}),
        (
            parameters_of({"$ref": "#/$defs/s", "maxLength": 1}, **{"$defs": {"s": {"type": "string"}}}),
            {"p": "x"},
            {"p": "xx"},
        ),
        ({"$ref": "#/$defs/s", "$defs": {"s": parameters_of({"type": "null"})}}, {"p": None}, {"p": 1}),
        ({"anyOf": [{"type": "string"}, parameters_of({"type": "null"})]}, {"p": None}, "x"),
        ({"type": ["object", "null"]}, {}, None),
        ({"enum": [{"a": 1}, "x"]}, {"a": 1}, "x"),
        ({"description": "%llguidance {}"}, {"a": [1]}, "x"),
        ({}, {"a": [1]}, 5),
        (None, {}, {"a": 1}),
    ],
    ids=lambda value: str(value)[:60],
)
def test_arguments_are_objects_and_schemas_keep_references(parameters: Any, good: Any, bad: Any) -> None:
    """Arguments are objects, and their schemas keep their references."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    named = {"type": "function", "function": {"name": "f"}}
    for choice, frame in (("required", '[{{"name": "f", "parameters": {}}}]'), (named, "{}")):
        form = form_of(choice, tools, None)
        assert accepts(form, frame.format(json.dumps(good)))
        assert not accepts(form, frame.format(json.dumps(bad)))


@pytest.mark.parametrize("choice", ["none", "auto", "required", {"type": "function", "function": {"name": "f"}}])
@pytest.mark.parametrize("parameters", [{"type": "string"}, {"type": ["string", "null"]}, {"type": None}, True, []])
def test_parameters_that_are_no_object_are_refused(openai: Any, parameters: Any, choice: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    with pytest.raises(BadRequestError) as caught:
        openai.chat.completions.create(**CHAT, tools=tools, tool_choice=choice)
    assert caught.value.param == "tools"


@pytest.mark.parametrize("parameters", [{"const": "x"}, {"anyOf": [{"type": "string"}, {"type": "null"}]}])
def test_parameters_that_allow_no_object_are_refused(openai: Any, parameters: Any) -> None:
    functions = [{"name": "a", "parameters": {}}, {"name": "f", "parameters": parameters}]
    tools = [{"type": "function", "function": function} for function in functions]
    with pytest.raises(BadRequestError) as caught:
        openai.chat.completions.create(**CHAT, tools=tools, tool_choice="required")
    assert caught.value.param == "tools"
    assert "'f'" in caught.value.message


@pytest.mark.parametrize("template", [TEMPLATE, TEMPLATE_OF_HERMES])
@pytest.mark.parametrize("max_tokens", [1, 5, 12])
def test_a_required_call_that_is_cut_shows_nothing_as_text(openai: Any, template: str, max_tokens: int) -> None:
    asked = CHAT | {"extra_body": {"chat_template": template}, "tools": TOOLS, "tool_choice": "required"}
    answer = openai.chat.completions.create(**asked, max_tokens=max_tokens).choices[0]
    assert (answer.message.content, answer.finish_reason) == (None, "length")
    _, text, reasons = joined(list(openai.chat.completions.create(**asked, max_tokens=max_tokens, stream=True)))
    assert (text, reasons) == ("", ["length"])


@pytest.mark.parametrize("choice", [None, "auto", "required", NAMED])
def test_hermes_calls_are_whole_and_streamed(openai: Any, monkeypatch: pytest.MonkeyPatch, choice: Any) -> None:
    call_at_once(monkeypatch)
    asked: dict[str, Any] = {**HERMES_CHAT, "tools": TOOLS, "temperature": 1.2, "seed": 4, "max_tokens": 500}
    asked |= {"parallel_tool_calls": False} | ({} if choice is None else {"tool_choice": choice})
    whole = openai.chat.completions.create(**asked).choices[0]
    (call,) = whole.message.tool_calls or []
    assert_is_call(call.function.name, call.function.arguments)
    reason = "stop" if choice == NAMED else "tool_calls"
    assert (whole.message.content, whole.finish_reason) == (None, reason)
    found, text, reasons = joined(list(openai.chat.completions.create(**asked, stream=True)))
    assert [(name, arguments) for _, name, arguments in found] == [(call.function.name, call.function.arguments)]
    assert (text, reasons) == ("", [reason])


def test_unenforceable_schema_is_refused_if_strict_else_named(openai: Any) -> None:
    """A schema that cannot be enforced is refused if strict, and named otherwise."""
    function: dict[str, Any] = {"name": "f", "parameters": {"type": "object", "not": {"minProperties": 3}}}
    asked: dict[str, Any] = HERMES_CHAT | {"max_tokens": 3}
    tools: Any = [{"type": "function", "function": function}]
    answer = openai.chat.completions.with_raw_response.create(**asked, tools=tools)
    assert answer.headers["x-d3-ignored-fields"] == "tools.parameters"
    with pytest.raises(BadRequestError) as caught:
        openai.chat.completions.create(**asked, tools=[{"type": "function", "function": function | {"strict": True}}])
    assert caught.value.param == "tools"


@pytest.mark.parametrize("choice", [None, "auto"])
def test_a_model_whose_calls_are_unknown_answers_with_text(openai: Any, choice: Any) -> None:
    asked = CHAT | {"max_tokens": 9, "tools": TOOLS} | ({} if choice is None else {"tool_choice": choice})
    shown = openai.chat.completions.with_raw_response.create(**asked)
    hidden = openai.chat.completions.with_raw_response.create(**asked | {"extra_body": {}})
    for answer in (shown, hidden):  # the bundled model's own template refuses tools
        assert answer.headers["x-d3-ignored-fields"] == "tools"
        assert answer.parse().choices[0].message.content
    prompts = [answer.parse().usage.prompt_tokens for answer in (shown, hidden)]
    assert prompts[0] > prompts[1] + 50


def test_tokenize_counts_the_tools_that_a_chat_shows(openai: Any) -> None:
    answer = openai.chat.completions.create(**HERMES_CHAT, tools=TOOLS, max_tokens=1)
    asked = {"messages": MESSAGES, "chat_template": TEMPLATE_OF_HERMES}
    url = str(openai.base_url).removesuffix("v1/") + "tokenize"
    assert httpx.post(url, json=asked | {"tools": TOOLS}).json()["count"] == answer.usage.prompt_tokens
    assert httpx.post(url, json=asked).json()["count"] < answer.usage.prompt_tokens
    assert httpx.post(url, json={"prompt": "a", "tools": TOOLS}).status_code == 400


@pytest.mark.parametrize("arguments", ["[1]", "5", "null", "{"])
def test_arguments_of_earlier_calls_are_objects(openai: Any, arguments: str) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "count", "arguments": arguments}}
    messages = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}]
    with pytest.raises(BadRequestError, match="JSON object"):
        openai.chat.completions.create(**CHAT | {"messages": messages})


@pytest.mark.parametrize("field", ["function_call", "audio"])
def test_fields_of_messages_that_no_template_reads_are_refused(openai: Any, field: str) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "a", field: {"name": "count", "arguments": "{}"}}]
    with pytest.raises(BadRequestError, match=field):
        openai.chat.completions.create(**CHAT | {"messages": messages})
