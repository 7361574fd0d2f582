"""Each format of calls: what its grammar takes, what is read back, and how it is found from a chat template."""

import json
from dataclasses import replace
from typing import Any

import pytest
from bad_values import assert_refused
from json_schemas import closed
from tool_calls import accepts, read

from d3engine import InvalidValueError, StructuredOutputsParams
from d3engine.server.requests.formats import (
    TOOL_FORMATS,
    AskedCalls,
    _Marks,
    reasoning_format_named,
    reasoning_format_of,
    tool_format_named,
    tool_format_of,
)
from d3engine.server.requests.tools import Calling, ChatStyle, _variables, thinking_variables, tool_use_of
from d3engine.server.responses.reading import ReasoningReader
from d3engine.server.schemas.requests import ChatRequest
from d3engine.server.settings import ServerSettings

MANY = {"type": "integer", "minimum": 0, "maximum": 9}
COUNT = closed(
    {"what": {"$ref": "#/$defs/thing"}, "many": MANY, "new": {"type": "boolean"}},
    **{"required": ["what", "many"], "$defs": {"thing": {"enum": ['a "pen"', "{book}", "cup)"]}}},
)
NONE = closed({})
NAMES = ("count", "stop-it")
GOOD = '{"what": "{book}", "many": 5}'
D = tuple(
    f"<\uff5ctool\u2581{word}\uff5c>"
    for word in ("calls\u2581begin", "call\u2581begin", "sep", "call\u2581end", "calls\u2581end")
)
ONE = f'{{"name": "count", "arguments": {GOOD}}}'
TWO = '{"name": "stop-it", "arguments": {}}'
XML = "<function=count>\n<parameter=what>\n{book}\n</parameter>\n<parameter=many>\n5\n</parameter>\n</function>"
"""By name: what one call reads as, and two of them."""
WRITTEN: dict[str, tuple[str, str]] = {
    "hermes": (
        f"<tool_call>\n{ONE}\n</tool_call>",
        f"<tool_call>\n{ONE}\n</tool_call>\n<tool_call>\n{TWO}\n</tool_call>",
    ),
    "qwen3_coder": (
        f"<tool_call>\n{XML}\n</tool_call>",
        f"<tool_call>\n{XML}\n</tool_call>\n<tool_call>\n<function=stop-it>\n</function>\n</tool_call>",
    ),
    "llama3_json": (
        f'<|python_tag|>{{"name": "count", "parameters": {GOOD}}}',
        f'<|python_tag|>{{"name": "count", "parameters": {GOOD}}}; {{"name": "stop-it", "parameters": {{}}}}',
    ),
    "pythonic": ('[count(what="{book}", many=5)]', '[count(what="{book}", many=5), stop-it()]'),
    "mistral": (f"[TOOL_CALLS] [{ONE}]", f"[TOOL_CALLS] [{ONE}, {TWO}]"),
    "mistral_v11": (f"[TOOL_CALLS]count[ARGS]{GOOD}", f"[TOOL_CALLS]count[ARGS]{GOOD}[TOOL_CALLS]stop-it[ARGS]{{}}"),
    "granite": (f"<|tool_call|>[{ONE}]", f"<|tool_call|>[{ONE}, {TWO}]"),
    "phi4_mini_json": (f"functools[{ONE}]", f"functools[{ONE}, {TWO}]"),
    "deepseek_v3": (
        f"{D[0]}{D[1]}function{D[2]}count\n```json\n{GOOD}\n```{D[3]}{D[4]}",
        f"{D[0]}{D[1]}function{D[2]}count\n```json\n{GOOD}\n```{D[3]}\n"
        f"{D[1]}function{D[2]}stop-it\n```json\n{{}}\n```{D[3]}{D[4]}",
    ),
    "deepseek_v31": (
        f"{D[0]}{D[1]}count{D[2]}{GOOD}{D[3]}{D[4]}",
        f"{D[0]}{D[1]}count{D[2]}{GOOD}{D[3]}{D[1]}stop-it{D[2]}{{}}{D[3]}{D[4]}",
    ),
}
FORMATS = [pytest.param(name, id=name) for name in WRITTEN]


def asked(**changes: Any) -> AskedCalls:
    made = AskedCalls([COUNT, NONE], NAMES, several=True, is_auto=True, special_ids={})
    return replace(made, **changes)


def parsed(name: str, text: str, size: int, kind: Any = "auto") -> tuple[str, list[tuple[str, Any]]]:
    """What comes of a text in this format: the text, and the calls with their arguments."""
    written = tool_format_named(name)
    said, calls, _ = read(Calling(kind, NAMES, written, written.grammar(asked()), schemas=[COUNT, NONE]), text, size)
    return said, [(name, json.loads(arguments)) for name, arguments in calls]


def test_every_format_is_tried_here() -> None:
    assert {one.name for one in TOOL_FORMATS} == set(WRITTEN)


@pytest.mark.parametrize("name", FORMATS)
def test_a_grammar_takes_the_calls_of_its_format_alone(name: str) -> None:
    one, two = WRITTEN[name]
    written = tool_format_named(name)
    auto, forced = written.grammar(asked()), written.grammar(asked(is_auto=False))
    single = written.grammar(asked(several=False))
    for text in (one, two):
        assert accepts(auto, text)
        assert accepts(forced, text)
        for bad in (text.replace("5", "55"), text.replace("count", "other"), f"{text} and text"):
            assert not accepts(forced, bad)
            if name != "pythonic" or "other" not in bad:  # a list of other names is text
                assert not accepts(auto, bad)
    assert accepts(single, one)
    assert not accepts(single, two)
    assert accepts(auto, "Tom has 5 pens: {5} < [6].")
    assert not accepts(forced, "Tom has 5 pens.")
    if written.openings:
        assert accepts(auto, f"I count. {one}")
        assert not accepts(auto, f"I count. {written.openings[0]}")


@pytest.mark.parametrize("size", [1, 3, 10_000])
@pytest.mark.parametrize("name", FORMATS)
def test_calls_are_read_back_however_they_are_cut(name: str, size: int) -> None:
    one, two = WRITTEN[name]
    called = [("count", {"what": "{book}", "many": 5}), ("stop-it", {})]
    for kind in ("auto", "required"):
        assert parsed(name, one, size, kind) == ("", called[:1])
        assert parsed(name, two, size, kind) == ("", called)
    assert parsed(name, "Tom has 5 pens: {5} < [6].\n", size) == ("Tom has 5 pens: {5} < [6].\n", [])
    if tool_format_named(name).openings:
        assert parsed(name, f"I count.\n\n{two}", size) == ("I count.", called)


@pytest.mark.parametrize(
    ("arguments", "fits"),
    [
        ('what="cup)", many=0, new=True', True),
        ('what="a \\"pen\\"", many=0, new=False', True),
        ('what="cup)", many=0, new=true', False),
        ('many=0, what="cup)"', False),
        ('what="cup)"', False),
        ("", False),
    ],
)
def test_python_arguments_fit_the_schema_and_read_as_json(arguments: str, fits: bool) -> None:
    """Python arguments are held to the schema and read as JSON."""
    text = f"[count({arguments})]"
    assert accepts(tool_format_named("pythonic").grammar(asked(is_auto=False)), text) is fits
    if fits:
        validate(parsed("pythonic", text, 1)[1][0][1])


TEXT = {"type": "string", "description": "What to write"}
OPTIONAL = {"day": {"type": "string", "pattern": "^[0-9]{2}$"}, "tags": {"type": "array", "items": {"type": "string"}}}
NOTE: dict[str, Any] = {"type": "object", "properties": {"text": TEXT, "is_new": {"type": "boolean"}} | OPTIONAL}
NOTE["required"] = ["text"]


def element(name: str, value: str) -> str:
    return f"<parameter={name}>\n{value}\n</parameter>\n"


@pytest.mark.parametrize("size", [1, 10_000])
@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (element("text", "5"), {"text": "5"}),
        (element("text", ""), {"text": ""}),
        (element("text", 'a "b"\n<c>\n\n</parameter> d'), {"text": 'a "b"\n<c>\n\n</parameter> d'}),
        (element("text", "x") + element("day", '"05"'), {"text": "x", "day": "05"}),
        (element("text", "x") + element("tags", '["a", "b"]'), {"text": "x", "tags": ["a", "b"]}),
        (element("text", "x") + element("is_new", "True"), {"text": "x", "is_new": True}),
        (element("text", "x") + element("is_new", "yes"), None),
        (element("text", "x") + element("other", "1"), None),
        (element("tags", "[]"), None),
        ("", None),
    ],
)
def test_elements_of_arguments_are_held_to_the_schema(arguments: str, found: Any, size: int) -> None:
    written = tool_format_named("qwen3_coder")
    form = written.grammar(asked(schemas=[NOTE], names=("note",), is_auto=False))
    text = f"<tool_call>\n<function=note>\n{arguments}</function>\n</tool_call>"
    assert accepts(form, text) is (found is not None)
    if found is not None:
        said, ((name, read_back),), _ = read(Calling("required", ("note",), written, form, schemas=[NOTE]), text, size)
        assert (said, name, json.loads(read_back)) == ("", "note", found)


def validate(found: Any) -> None:
    import jsonschema

    jsonschema.Draft202012Validator(COUNT).validate(found)


@pytest.mark.parametrize("size", [1, 10_000])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", f"```json\n{ONE}\n```"),
        ("hermes", ONE),
        ("llama3_json", f'{{"name": "count", "parameters": {GOOD}}}'),
        ("llama3_json", f'{{"type": "function", "name": "count", "parameters": {GOOD}}}'),
        ("phi4_mini_json", f"<|tool_call|>[{ONE}]"),
        ("granite", f"<tool_call>[{ONE}]"),
        ("mistral", f"[TOOL_CALLS][{ONE}]"),
    ],
)
def test_what_models_write_instead_is_a_call_too(name: str, text: str, size: int) -> None:
    assert accepts(tool_format_named(name).grammar(asked()), text)
    assert parsed(name, text, size) == ("", [("count", {"what": "{book}", "many": 5})])


def test_ids_have_the_length_that_templates_ask_for() -> None:
    ids = {tool_format_named("mistral").new_id() for _ in range(9)}
    assert len(ids) == 9
    assert all(len(one) == 9 and one.isalnum() for one in ids)


# -- special tokens ----------------------------------------------------------------------------------------------------


def with_specials(name: str) -> tuple[Any, dict[str, int]]:
    """A vocabulary of bytes whose marks of this format are special tokens, and their ids."""
    from llguidance import LLTokenizer, TokenizerWrapper

    marks = {"mistral": ["[TOOL_CALLS]"], "llama3_json": ["<|python_tag|>"], "granite": ["<|tool_call|>"]}
    marks["deepseek_v3"] = list(D)

    class Tokens:
        bos_token_id = None

        def __init__(self) -> None:
            self.tokens = [bytes([i]) for i in range(256)] + [one.encode() for one in marks[name]] + [b"other", b"end"]
            self.special_token_ids = list(range(256, len(self.tokens)))
            self.eos_token_id = len(self.tokens) - 1

        def __call__(self, text: object) -> list[int]:
            return []

    return LLTokenizer(TokenizerWrapper(Tokens())), {text: 256 + nth for nth, text in enumerate(marks[name])}


@pytest.mark.parametrize("name", ["mistral", "deepseek_v3", "llama3_json", "granite"])
def test_special_tokens_of_a_format_are_taken_and_no_others(name: str) -> None:
    """Marks that are special tokens are taken as such, and others never."""
    from llguidance import LLMatcher

    from d3engine.text.structured.checker import answer
    from d3engine.text.structured.source import grammar_of

    vocabulary, ids = with_specials(name)
    other = 256 + len(ids)

    def tokens(text: str) -> list[int]:
        found: list[int] = []
        split = _Marks(ids)._split
        assert split is not None
        for part in split.split(text):
            found += [ids[part]] if part in ids else list(part.encode())
        return found

    for is_auto in (True, False):
        source = grammar_of(tool_format_named(name).grammar(asked(special_ids=ids, is_auto=is_auto)))
        assert answer({"source": source}) == {}
        for text in WRITTEN[name]:
            matcher = LLMatcher(vocabulary, source, log_level=0)
            given = [*(tokens("I count. ") if is_auto else []), *tokens(text)]
            assert matcher.try_consume_tokens(given) == len(given)
            assert matcher.is_accepting()
        matcher = LLMatcher(vocabulary, source, log_level=0)
        assert matcher.try_consume_tokens([other]) == 0


# -- found from a template ---------------------------------------------------------------------------------------------

SPECIALS = {"<|python_tag|>": 7}


@pytest.mark.parametrize(
    ("name", "rendered"),
    [
        ("hermes", '<tool_call>\n{"name": "shown_function", "arguments": {"value": 1}}\n</tool_call>'),
        ("qwen3_coder", "<tool_call>\n<function=shown_function>\n<parameter=value>\n1\n</parameter>\n</function>"),
        ("llama3_json", '<|start_header_id|>assistant{"name": "shown_function", "parameters": {"value": 1}}'),
        ("pythonic", "[shown_function(value=1)]<|eot|>"),
        ("mistral", '[TOOL_CALLS] [{"name": "shown_function", "arguments": {"value": 1}, "id": "shownCall"}]</s>'),
        ("mistral_v11", '[TOOL_CALLS]shown_function[ARGS]{"value": 1}</s>'),
        ("granite", '<|tool_call|>[{"name": "shown_function", "arguments": {"value": 1}}]'),
        ("phi4_mini_json", '<|system|>A<|tool|>[{"name": "shown_function"}]<|/tool|><|end|><|assistant|>'),
        ("deepseek_v3", f"{D[0]}{D[1]}function{D[2]}shown_function\n```json\n{{}}\n```{D[3]}{D[4]}"),
        ("deepseek_v31", f"{D[0]}{D[1]}shown_function{D[2]}{{}}{D[3]}{D[4]}"),
    ],
)
def test_the_format_is_that_of_a_rendered_call(name: str, rendered: str) -> None:
    assert getattr(tool_format_of(rendered, "", {}), "name", None) == name


def test_format_without_a_rendered_call_is_found_by_source() -> None:
    """Without a rendered call, the source or a special token shows the format."""
    qwen = '{{- \'\\n<tool_call>\\n{"name": "\' }}{{- tool_call.name }}'
    assert getattr(tool_format_of("", qwen, {}), "name", None) == "hermes"
    assert getattr(tool_format_of("", "", SPECIALS), "name", None) == "llama3_json"
    assert tool_format_of("User: A question.", "", {}) is None


def test_a_parser_is_named_as_in_vllm_and_others_are_refused() -> None:
    formats = ("hermes", "qwen3_coder", "llama3_json", "pythonic", "mistral", "granite")
    for name in (*formats, "phi4_mini_json", "deepseek_v3"):
        assert ServerSettings(model_names=("m",), tool_call_parser=name).tool_call_parser == name
    for name in ("qwen3", "deepseek_r1", "mistral", "granite", "none"):
        assert ServerSettings(model_names=("m",), reasoning_parser=name).reasoning_parser == name
    for field in ("tool_call_parser", "reasoning_parser"):
        with assert_refused(field, "auto, none, or one of"):
            ServerSettings(model_names=("m",), **{field: "other"})  # type: ignore[arg-type]


# -- reasoning ---------------------------------------------------------------------------------------------------------


def parted(text: str, size: int, *, is_open: bool = False, name: str = "qwen3") -> tuple[str, str]:
    reader = ReasoningReader(reasoning_format_named(name), is_open=is_open)
    parts = [text[i : i + size] for i in range(0, len(text), size)] + [""]
    found = [reader.read(part, is_last=nth == len(parts) - 1) for nth, part in enumerate(parts)]
    return "".join(reasoning for reasoning, _ in found), "".join(rest for _, rest in found)


@pytest.mark.parametrize("size", [1, 2, 5, 10_000])
@pytest.mark.parametrize(
    ("text", "is_open", "found"),
    [
        ("<think>\nTom has 5.\n\nSo 5.\n</think>\n\nFive.\n", False, ("Tom has 5.\n\nSo 5.", "Five.\n")),
        ("\nTom has 5.\n</think>\n\nFive.", True, ("Tom has 5.", "Five.")),
        ("Five <think>.", False, ("", "Five <think>.")),
        ("<thin", False, ("", "<thin")),
        ("<think>\nTom has </thi", False, ("Tom has </thi", "")),
        ("<think>\n\n</think>\n\nFive.", False, ("", "Five.")),
        ("", False, ("", "")),
    ],
)
def test_a_reasoning_is_parted_from_the_answer_however_it_is_cut(
    text: str, is_open: bool, found: tuple[str, str], size: int
) -> None:
    assert parted(text, size, is_open=is_open) == found


@pytest.mark.parametrize("size", [1, 3, 10_000])
@pytest.mark.parametrize(
    ("name", "source", "text"),
    [
        ("mistral", "{{ '[THINK]' + text + '[/THINK]' }}", "[THINK]Five [x].[/THINK]Five."),
        (
            "granite",
            "...Here is my response:...",
            "Here is my thought process:\n\nFive [x].\n\nHere is my response:\n\nFive.",
        ),
    ],
)
def test_other_marks_of_reasoning_are_found_and_read(name: str, source: str, text: str, size: int) -> None:
    """Marks of Magistral and Granite are found in a template's source, and part the reasoning."""
    assert reasoning_format_of(source) == reasoning_format_named(name)
    assert parted(text, size, name=name) == ("Five [x].", "Five.")
    assert reasoning_format_of("{% if '</think>' in content %}") == reasoning_format_named("deepseek_r1")


@pytest.mark.parametrize("name", FORMATS)
def test_what_stands_in_a_reasoning_opens_no_call(name: str) -> None:
    written = tool_format_named(name)
    one = WRITTEN[name][0]
    form = replace(written.grammar(asked(reasoning_opening="<think>")), reasoning=("<think>", "</think>"))
    begins = written.openings[0] if written.openings else "[count("
    assert accepts(form, f"<think>\nI {begins} x\n</think>\n\nFive.")
    assert accepts(form, f"<think>\nI {begins} x\n</think>\n\n{one}")
    assert accepts(form, one)
    assert not accepts(form, f"<think>\nI</think>\n\n{one.replace('5', '55')}")
    must = replace(written.grammar(asked(is_auto=False)), reasoning=("", "</think>"))
    assert accepts(must, f"I {begins} x\n</think>\n\n{one}")
    assert not accepts(must, one)


@pytest.mark.parametrize(
    "form",
    [
        {"json": {"type": "object", "properties": {"start": {"const": 1}}, "required": ["start"]}},
        {"grammar": 'start: "{" rest // start\nrest: "\\"start\\": 1}" | start'},
        {"regex": r"\{.*\}"},
        {"choice": ['{"start": 1}']},
    ],
)
def test_every_form_may_begin_behind_a_reasoning(form: dict[str, Any]) -> None:
    may = StructuredOutputsParams(**form, reasoning=("<think>", "</think>"))
    must = StructuredOutputsParams(**form, reasoning=("", "</think>"))
    assert accepts(may, '{"start": 1}')
    assert accepts(may, '<think>start "{"</think>\n{"start": 1}')
    assert accepts(must, 'start "{"</think>{"start": 1}')
    assert not accepts(must, '{"start": 1}')


SOURCES = {
    "qwen3": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
        "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
        "{% endif %}"
    ),
    "r1": (
        "{% for m in messages %}{% set content = m.content.split('</think>')[-1] %}{{ content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|Assistant|><think>\\n' }}{% endif %}"
    ),
    "plain": "{% for m in messages %}{{ m.thinking or m.content }}{% endfor %}",
    "effort": "{{ 'Reasoning: ' + reasoning_effort }}",
}
"""Chat templates, written after the real ones: how each asks for reasoning, and marks one."""


@pytest.mark.parametrize(
    ("source", "enabled", "effort", "found"),
    [
        ("qwen3", False, None, {"enable_thinking": False}),
        ("qwen3", None, "none", {"enable_thinking": False}),
        ("qwen3", None, "high", {"enable_thinking": True}),
        ("qwen3", None, None, {}),
        ("effort", None, "low", {"reasoning_effort": "low"}),
        ("r1", True, "low", {}),
        ("plain", False, "none", {}),
        ("r1", False, None, "enable_thinking"),
        ("r1", None, "none", "reasoning_effort"),
        ("plain", True, None, "enable_thinking"),
        ("plain", None, "low", "reasoning_effort"),
        ("qwen3", True, "none", "reasoning_effort"),
    ],
)
def test_reasoning_is_switched_by_template_or_refused_by_name(
    source: str, enabled: bool | None, effort: str | None, found: Any
) -> None:
    """Reasoning is switched by the template, or refused by name."""
    text = SOURCES[source]
    style = ChatStyle(reasoning=reasoning_format_of(text), variables=_variables(text))
    if isinstance(found, dict):
        assert thinking_variables(enabled, effort, style) == found
        return
    with assert_refused(found):
        thinking_variables(enabled, effort, style)


@pytest.mark.parametrize("name", ["pythonic", "qwen3_coder"])
@pytest.mark.parametrize(
    "schema",
    [{"properties": [1]}, {"properties": {"what": "string"}}, {"properties": {"what": {}}, "required": True}],
)
def test_parameters_of_a_wrong_type_are_no_fault(name: str, schema: dict[str, Any]) -> None:
    """A schema that is none is refused where a call must come, and else as free as one that cannot be enforced."""
    style = ChatStyle(shows_tools=True, calls=tool_format_named(name))
    tool = {"type": "function", "function": {"name": "count", "parameters": {"type": "object", **schema}}}

    def use(choice: str) -> Any:
        return tool_use_of(ChatRequest(messages=[], tools=[tool], tool_choice=choice), style)

    with pytest.raises(InvalidValueError, match="tools must be functions whose parameters are a JSON schema"):
        use("required")
    calling = use("auto").calling
    xml = "<function=count>\n<parameter=what>\n{book}\n</parameter>\n</function>"
    text = '[count(what="{book}")]' if name == "pythonic" else f"<tool_call>\n{xml}\n</tool_call>"
    assert accepts(calling.form, text)
    assert read(calling, text, 3)[1] == [("count", '{"what": "{book}"}')]
