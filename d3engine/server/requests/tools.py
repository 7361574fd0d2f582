"""How a chat template shows functions to the model and writes calls, found by rendering one call."""

from __future__ import annotations

import asyncio
import json
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

import msgspec

from d3engine.async_engine.client import EngineClient
from d3engine.errors import InvalidValueError, must_be
from d3engine.request.params import StructuredOutputsParams
from d3engine.server.errors import invalid
from d3engine.server.schemas.requests import FUNCTIONS_NAME, MAX_TOOLS, ChatRequest, NamedTool, Tool
from d3engine.text.tokenizer import Tokenizer

_STYLE_NAME = "shown_function"
_DESCRIPTION = "Described to the model."
_TOOL = {"name": _STYLE_NAME, "description": _DESCRIPTION, "parameters": {"type": "object", "properties": {}}}
_CALL = {"id": "shownCall", "type": "function", "function": {"name": _STYLE_NAME, "arguments": {"value": 1}}}
_MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "A question."},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
]
_HERMES = re.compile(rf'<tool_call>\s*{{"name":\s*"{_STYLE_NAME}",\s*"arguments":\s*{{"value":\s*1}}}}\s*</tool_call>')
_LLAMA3_MARK = "<|python_tag|>"
_NUM_KEPT = 8


class CallStyle(Enum):
    """The syntax in which a model calls functions by itself."""

    HERMES = "hermes"
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes 2 and 3, Qwen2.5 and Qwen3 write it."""
    LLAMA3 = "llama3"
    """`{"name": ..., "parameters": {...}}` as the whole answer."""


@dataclass(frozen=True)
class ToolStyle:
    """What is known of a template: whether it shows functions, and the syntax of calls, None where it is unknown."""

    shows_tools: bool
    calls: CallStyle | None


class ToolStyles:
    """The styles of one model's own template and of the last few that requests brought."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._known: OrderedDict[str | None, ToolStyle] = OrderedDict()

    async def of(self, template: str | None) -> ToolStyle:
        """The style of a request's template; None stands for the model's own."""
        if template not in self._known:
            self._known[template] = await self._find(template)
            if len(self._known) > _NUM_KEPT:
                self._known.popitem(last=False)
        return self._known[template]

    async def _find(self, template: str | None) -> ToolStyle:
        tokenizer = self._client.tokenizer
        assert tokenizer is not None
        try:
            prompt = await self._client.chat_prompt(
                _MESSAGES,
                tools=[{"type": "function", "function": _TOOL}],
                chat_template=template,
                add_generation_prompt=False,
            )
        except InvalidValueError:  # the template refuses functions or calls
            return ToolStyle(False, None)
        # An answer's text lacks special tokens, and so must the marks of a call that is found in it.
        text = await asyncio.to_thread(tokenizer.decode, prompt["prompt_token_ids"], skip_special_tokens=True)
        if _HERMES.search(text):
            return ToolStyle(_DESCRIPTION in text, CallStyle.HERMES)
        return ToolStyle(_DESCRIPTION in text, CallStyle.LLAMA3 if _is_llama3(tokenizer) else None)


def _is_llama3(tokenizer: Tokenizer) -> bool:
    return any(tokenizer.convert_id_to_token(token) == _LLAMA3_MARK for token in tokenizer.special_ids)


_NAME = re.compile(FUNCTIONS_NAME)
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_ANY_ARGUMENTS = {"type": "object"}
SPACE = r"[ \n\t]{0,16}"
_FAULT = re.compile(
    r"a grammar to answer by \((?:at (?P<line>\d+)\(\d+\): failed to compile JSON schema: )?(?P<why>.*)\)"
)


@dataclass(frozen=True)
class Calling:
    """How an answer calls functions.

    Attributes:
        kind: the model decides ("auto"), it must call ("required"), or it must call the one function ("named").
        names: of the functions that may be called.
        style: the syntax of a call; None: a JSON list of {"name", "parameters"}, or of "named" the arguments alone.
        form: what the answer must be; None where it may be any text.
        best_effort: the form to take where `form` cannot be compiled: any object as arguments.
    """

    kind: Literal["auto", "required", "named"]
    names: tuple[str, ...]
    style: CallStyle | None
    form: StructuredOutputsParams | None
    best_effort: StructuredOutputsParams | None = None


@dataclass(frozen=True)
class ToolUse:
    """What a request's tools come to.

    Attributes:
        shown: the functions as the template gets them, which is without `strict`; None: it gets none.
        calling: how the answer calls them; None: it is text.
        ignored: the fields that change nothing, for the header that names them.
    """

    shown: Sequence[Mapping[str, Any]] | None = None
    calling: Calling | None = None
    ignored: tuple[str, ...] = ()


def tool_use_of(asked: ChatRequest, style: ToolStyle) -> ToolUse:
    """What the tools of a chat come to by a template of this style. Raises `RequestError`."""
    if asked.tools is None:
        if asked.tool_choice not in (None, "none"):
            raise invalid(
                "tool_choice", must_be("tool_choice", asked.tool_choice, 'absent or "none" without tools') + "."
            )
        return ToolUse()
    tools = _tools(asked.tools)
    choice = "auto" if asked.tool_choice is None else asked.tool_choice
    chosen = tools if choice in ("none", "auto", "required") else [_named(choice, tools)]
    if choice == "none":
        return ToolUse()
    if choice == "auto" and style.calls is None:
        # The answer is text, with calls in a syntax of the model's own if its template shows it the functions.
        return ToolUse(_shown(asked.tools) if style.shows_tools else None, None, ("tools",))
    for name in ("response_format", "structured_outputs"):
        if getattr(asked, name) not in (None, {"type": "text"}):
            raise invalid(name, f'{name} must be absent where tools may be called (tool_choice is not "none").')
    ignored = () if style.shows_tools else ("tools",)
    calling = _calling(choice, chosen, style.calls, asked.parallel_tool_calls is not False)
    return ToolUse(_shown(asked.tools), calling, ignored)


def _shown(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{**tool, "function": {k: v for k, v in tool["function"].items() if k != "strict"}} for tool in tools]


def _calling(choice: object, tools: Sequence[Tool], style: CallStyle | None, several: bool) -> Calling:
    names = tuple(tool.function.name for tool in tools)
    with fault_of_tools(names):
        if choice == "auto":
            if style is CallStyle.LLAMA3:
                return Calling("auto", names, style, None)
            loose = _hermes([_ANY_ARGUMENTS] * len(tools), names, several=several, is_auto=True)
            is_strict = any(tool.function.strict for tool in tools)
            try:
                form = _hermes(list(map(_arguments, tools)), names, several=several, is_auto=True)
            except InvalidValueError:  # it is too long
                if is_strict:
                    raise
                form = loose
            return Calling("auto", names, style, form, None if is_strict else loose)
        kind: Literal["required", "named"] = "required" if choice == "required" else "named"
        schemas = list(map(_arguments, tools))
        if style is CallStyle.HERMES:
            several = several and kind == "required"
            return Calling(kind, names, style, _hermes(schemas, names, several=several, is_auto=False))
        if kind == "named":
            return Calling(kind, names, None, StructuredOutputsParams(grammar=f"start: {_json(schemas[0])}"))
        return Calling(kind, names, None, _list_of_calls(schemas, names, several=several))


def _hermes(
    schemas: Sequence[Mapping[str, Any]], names: Sequence[str], *, several: bool, is_auto: bool
) -> StructuredOutputsParams:
    """One or more calls in Hermes' syntax; with `is_auto` after any text, or text alone.

    Then an answer that begins as a call without the marks, as Qwen2.5-Coder writes it, is one too.
    """
    more = rf' ("\n<tool_call>" call){{0,{MAX_TOOLS - 1}}}' if several else ""
    rules = [f"calls: call{more}", r'call: "\n" one "\n</tool_call>"']
    if is_auto:
        bare = [f"bare_{i}[lazy]: /{bare_head(name)}/" for i, name in enumerate(names)]
        unmarked = " | ".join(f'bare_{i} SPACE arguments_{i} SPACE "}}" FENCE' for i in range(len(names)))
        rules += ["start: TEXT | opening calls | unmarked", "opening[lazy]: /(?s:.*)<tool_call>/"]
        rules += ["TEXT: /(?s:.*)/", f"SPACE: /{SPACE}/", f"FENCE: /({SPACE}```)?/", *bare, f"unmarked: {unmarked}"]
    else:
        rules += ['start: "<tool_call>" calls']
    return StructuredOutputsParams(grammar=_grammar(rules, schemas, names, "arguments"))


def bare_head(name: str) -> str:
    """A regular expression for the beginning of a call without marks, perhaps in a fence, up to its arguments."""
    head = ("(```(json)?)?", r"\{", '"name"', ":", f'"{name}"', ",", '"arguments"', ":")
    return SPACE + SPACE.join(head)


def _list_of_calls(
    schemas: Sequence[Mapping[str, Any]], names: Sequence[str], *, several: bool
) -> StructuredOutputsParams:
    """A JSON list of one or more calls."""
    more = f' (", " one){{0,{MAX_TOOLS - 1}}}' if several else ""
    return StructuredOutputsParams(grammar=_grammar([f'start: "[" one{more} "]"'], schemas, names, "parameters"))


def _grammar(rules: Sequence[str], schemas: Sequence[Mapping[str, Any]], names: Sequence[str], key: str) -> str:
    """A grammar in Lark's syntax: these rules, and `one` call as JSON with its arguments under `key`.

    Each schema is a grammar by itself, so its references keep their meaning; that of tool i stands in line i + 1.
    """
    arguments = [f"arguments_{i}: {_json(schema)}" for i, schema in enumerate(schemas)]
    heads = [json.dumps(f'{{"name": "{name}", "{key}": ') for name in names]
    one = " | ".join(f'{head} arguments_{i} "}}"' for i, head in enumerate(heads))
    return "\n".join([*arguments, *rules, f"one: {one}"])


def _json(schema: Mapping[str, Any]) -> str:
    """A schema within a grammar; the escape keeps it from being read as a directive of the grammar."""
    return "%json " + json.dumps(schema).replace("%", "\\u0025")


@contextmanager
def fault_of_tools(names: Sequence[str]) -> Iterator[None]:
    """Errors about the grammar of calls name the function that they come of."""
    try:
        yield
    except InvalidValueError as error:
        if error.field != "grammar":
            raise
        found = _FAULT.fullmatch(error.allowed)
        if found is None:
            allowed = "functions with less text in their parameters"
            raise InvalidValueError("tools", list(names), allowed) from None
        line = int(found["line"] or 0)
        given = names[line - 1] if 0 < line <= len(names) else list(names)
        allowed = f"functions whose parameters are a JSON schema to answer by ({found['why']})"
        raise InvalidValueError("tools", given, allowed) from None


def with_arguments_read(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages, with the arguments of earlier calls as the objects that templates write, not as their text."""
    for place, message in enumerate(messages):
        for name in ("function_call", "audio"):
            if message.get(name) is not None:
                why = "absent, since templates read tool_calls and text"
                raise invalid("messages", must_be(f"messages[{place}].{name}", message[name], why) + ".")
    return [_read_calls(message) if message.get("tool_calls") else message for message in messages]


def _read_calls(message: dict[str, Any]) -> dict[str, Any]:
    calls = message["tool_calls"]
    if not isinstance(calls, list):
        raise invalid("messages", must_be("messages", message, "with tool_calls, a list") + ".")
    found = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        arguments = function.get("arguments") if isinstance(function, dict) else None
        if isinstance(function, dict) and isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                arguments = None
            if not isinstance(arguments, dict):
                allowed = "with arguments that are a JSON object in every tool call"
                raise invalid("messages", must_be("messages", message, allowed) + ".")
            call = {**call, "function": {**function, "arguments": arguments}}
        found.append(call)
    return {**message, "tool_calls": found}


def _tools(given: Sequence[Mapping[str, Any]]) -> list[Tool]:
    """The functions, checked."""
    if not 0 < len(given) <= MAX_TOOLS:
        raise invalid("tools", must_be("tools", f"{len(given)} tools", f"absent, or 1 to {MAX_TOOLS} of them") + ".")
    tools = []
    for place, one in enumerate(given):
        allowed = '{"type": "function", "function": {"name", "description", "parameters", "strict"}}'
        try:
            tool = msgspec.convert(one, Tool)
        except msgspec.ValidationError as error:
            raise invalid("tools", must_be(f"tools[{place}]", one, f"{allowed} ({error})") + ".") from None
        if not _NAME.fullmatch(tool.function.name):
            allowed = "1 to 64 letters, digits, underscores and hyphens of ASCII"
            raise invalid("tools", must_be(f"tools[{place}].function.name", tool.function.name, allowed) + ".")
        kind = "object" if tool.function.parameters is None else tool.function.parameters.get("type", "object")
        if kind != "object" and not (isinstance(kind, list) and "object" in kind):
            raise invalid("tools", must_be(f"the type of the parameters of tools[{place}]", kind, '"object"') + ".")
        tools.append(tool)
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise invalid("tools", must_be("tools", names, "functions of different names") + ".")
    return tools


def _named(choice: object, tools: Sequence[Tool]) -> Tool:
    """The function that must be called."""
    allowed = '"none", "auto", "required", or {"type": "function", "function": {"name": one of the tools}}'
    try:
        name = msgspec.convert(choice, NamedTool).function.name
        return next(tool for tool in tools if tool.function.name == name)
    except (msgspec.ValidationError, StopIteration):
        raise invalid("tool_choice", must_be("tool_choice", choice, allowed) + ".") from None


def _arguments(tool: Tool) -> dict[str, Any]:
    """The schema of a function's arguments, which are an object whatever else it allows."""
    given = tool.function.parameters
    return _NO_ARGUMENTS if given is None else {**given, "type": "object"}
