"""What a chat template knows of functions and reasoning, and how a request's functions may be called."""

from __future__ import annotations

import asyncio
import json
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from d3engine.errors import InvalidValueError, must_be, require
from d3engine.request.params import StructuredOutputsParams
from d3engine.server.errors import invalid
from d3engine.server.requests import formats
from d3engine.server.schemas.requests import FUNCTIONS_NAME, MAX_TOOLS, ChatRequest, NamedTool, Tool

if TYPE_CHECKING:
    from d3engine.async_engine.async_engine import AsyncEngine

_DESCRIPTION = "Described to the model."
_TOOL = {"name": formats.EXAMPLE, "description": _DESCRIPTION, "parameters": {"type": "object", "properties": {}}}
_NUM_KEPT = 8
_CODE = re.compile(r"\{[%{](?:(?!\{[%{]).)*?[%}]\}", re.DOTALL)
_STRING = re.compile(r"'[^']*'|\"[^\"]*\"")
_VARIABLE = re.compile(r"(?<![.\w])(enable_thinking|thinking|reasoning_effort)\b")


@dataclass(frozen=True)
class ChatStyle:
    """What is known of a chat template; None is a format that is unknown, or of reasoning that it has not.

    `variables` are those that switch reasoning. With `arguments_as_text` it writes the arguments of earlier calls only
    if they are JSON text. `special_ids` are the tokenizer's special tokens by their spelling.
    """

    shows_tools: bool = False
    calls: formats.ToolFormat | None = None
    reasoning: formats.ReasoningFormat | None = None
    variables: frozenset[str] = frozenset()
    arguments_as_text: bool = False
    special_ids: Mapping[str, int] = field(default_factory=dict)

    @property
    def has_special_marks(self) -> bool:
        """Whether reasoning is marked by special tokens, which no text of a grammar can be."""
        return self.reasoning is not None and self.reasoning.opening in self.special_ids


class ChatStyles:
    """The styles of one model's own template and of the last few that requests brought.

    `tool_parser` and `reasoning_parser` name formats that hold instead of a template's own: "auto" is its own, and
    "none" is no format.
    """

    def __init__(self, client: AsyncEngine, tool_parser: str = "auto", reasoning_parser: str = "auto") -> None:
        self._client = client
        self._tool_parser = tool_parser
        self._reasoning_parser = reasoning_parser
        self._known: OrderedDict[str | None, ChatStyle] = OrderedDict()

    async def of(self, template: str | None) -> ChatStyle:
        if template not in self._known:
            self._known[template] = await self._find(template)
            if len(self._known) > _NUM_KEPT:
                self._known.popitem(last=False)
        return self._known[template]

    async def _find(self, template: str | None) -> ChatStyle:
        tokenizer = self._client.tokenizer
        assert tokenizer is not None
        source = (template if template is not None else await self._client.chat_template()) or ""
        spelled = {tokenizer.convert_id_to_token(token) or "": token for token in sorted(tokenizer.special_ids)}
        specials = {text: token for text, token in spelled.items() if text}
        texts = [await self._rendered(template, arguments) for arguments in ({"value": 1}, '{"value": 1}')]
        rendered = texts[0] or texts[1]
        return ChatStyle(
            shows_tools=_DESCRIPTION in rendered,
            calls=self._tool_format(rendered, source, specials),
            reasoning=self._reasoning_format(source),
            variables=_variables(source),
            arguments_as_text=not texts[0] and bool(texts[1]),
            special_ids=specials,
        )

    def _tool_format(self, rendered: str, source: str, specials: Mapping[str, int]) -> formats.ToolFormat | None:
        found = formats.tool_format_of(rendered, source, specials)
        if self._tool_parser == "auto":
            return found
        if self._tool_parser == "none":
            return None
        named = formats.tool_format_named(self._tool_parser)
        # A family may have two formats under one name, of which the template shows one.
        return found if found is not None and found.name.startswith(f"{named.name}_v") else named

    def _reasoning_format(self, source: str) -> formats.ReasoningFormat | None:
        if self._reasoning_parser == "auto":
            return formats.reasoning_format_of(source)
        return None if self._reasoning_parser == "none" else formats.reasoning_format_named(self._reasoning_parser)

    async def _rendered(self, template: str | None, arguments: object) -> str:
        """The example as the template writes it, special tokens included; "" where it refuses functions or calls."""
        function = {"name": formats.EXAMPLE, "arguments": arguments}
        calls = [{"id": "shownCall", "type": "function", "function": function}]
        said = {"role": "assistant", "content": "", "tool_calls": calls}
        try:
            prompt = await self._client.chat_prompt(
                [{"role": "user", "content": "A question."}, said],
                tools=[{"type": "function", "function": _TOOL}],
                chat_template=template,
                add_generation_prompt=False,
            )
        except InvalidValueError:
            return ""
        tokenizer = self._client.tokenizer
        assert tokenizer is not None
        return await asyncio.to_thread(tokenizer.decode, prompt["prompt_token_ids"], skip_special_tokens=False)


def _variables(source: str) -> frozenset[str]:
    """The variables of a template that switch reasoning."""
    return frozenset(_VARIABLE.findall(" ".join(_STRING.sub("''", code) for code in _CODE.findall(source))))


_NAME = re.compile(FUNCTIONS_NAME)
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_ANY_ARGUMENTS = {"type": "object"}
_FAULT = re.compile(
    r"a grammar to answer by \((?:at (?P<line>\d+)\(\d+\): failed to compile JSON schema: )?(?P<why>.*)\)"
)


@dataclass(frozen=True)
class Calling:
    """How an answer calls functions.

    Attributes:
        kind: the model decides ("auto"), it must call ("required"), or it must call the one function ("named").
        names: of the functions that may be called.
        format: of the calls; None: the answer is the arguments of the one function ("named") alone.
        form: what the answer must be.
        best_effort: the form to take where `form` cannot be compiled: any object as arguments.
        schemas: of the arguments of each function, where the format's texts must be told from other values.
    """

    kind: Literal["auto", "required", "named"]
    names: tuple[str, ...]
    format: formats.ToolFormat | None
    form: StructuredOutputsParams
    best_effort: StructuredOutputsParams | None = None
    schemas: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class Thinking:
    """How an answer marks its reasoning; `is_open`: the prompt has begun it."""

    format: formats.ReasoningFormat
    is_open: bool

    @property
    def frame(self) -> tuple[str, str]:
        """`reasoning` of the form that may follow it."""
        return ("" if self.is_open else self.format.opening), self.format.closing


def thinking_of(written: formats.ReasoningFormat, end_of_prompt: str, continues: bool) -> Thinking | None:
    """How an answer to a prompt marks its reasoning; None where none can come."""
    is_open = end_of_prompt.rstrip().endswith(written.opening)
    is_closed = end_of_prompt.rstrip().endswith(written.closing)
    return None if is_closed or (continues and not is_open) else Thinking(written, is_open)


NO_EFFORT = "none"
"""The `reasoning_effort` that asks for no reasoning; every other asks for one."""


def thinking_variables(enabled: bool | None, effort: str | None, style: ChatStyle) -> dict[str, Any]:
    """The template's variables by which the model thinks, or does not, as a request asks.

    Raises `InvalidValueError` where the template has none and the model would do otherwise.
    """
    found: dict[str, Any] = {}
    if effort is not None and "reasoning_effort" in style.variables:
        found["reasoning_effort"], effort = effort, None
    switch = next((one for one in ("enable_thinking", "thinking") if one in style.variables), None)
    thinks = style.reasoning is not None
    for name, given, wanted in (
        ("enable_thinking", enabled, enabled),
        ("reasoning_effort", effort, effort != NO_EFFORT),
    ):
        if given is None:
            continue
        if switch is not None:
            agrees = found.setdefault(switch, wanted) == wanted
            require(agrees, name, given, "absent, or ask for the same as enable_thinking")
        else:
            does = "always thinks" if thinks else "does not think"
            require(wanted == thinks, name, given, f"absent, since the model {does}")
    return found


@dataclass(frozen=True)
class ToolUse:
    """What a request's tools come to: the functions `shown` to the template, without `strict`, and how an answer calls
    them; None: it is shown none, and the answer is text.

    `ignored` are the fields that change nothing, for the header that names them.
    """

    shown: Sequence[Mapping[str, Any]] | None = None
    calling: Calling | None = None
    ignored: tuple[str, ...] = ()


def tool_use_of(asked: ChatRequest, style: ChatStyle) -> ToolUse:
    """What the tools of a chat come to by a template of this style. Raises `RequestError`."""
    if not asked.tools:
        fits = asked.tool_choice in (None, "none", "auto")
        require(fits, "tool_choice", asked.tool_choice, 'absent, "none" or "auto" without tools')
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
    calling = _calling(choice, chosen, style, asked.parallel_tool_calls is not False)
    return ToolUse(_shown(asked.tools), calling, ignored)


def _shown(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{**tool, "function": {k: v for k, v in tool["function"].items() if k != "strict"}} for tool in tools]


def _calling(choice: object, tools: Sequence[Tool], style: ChatStyle, several: bool) -> Calling:
    names = tuple(tool.function.name for tool in tools)
    written = style.calls or formats.UNKNOWN_FORMAT
    reasoning = None if style.reasoning is None else style.reasoning.opening
    with fault_of_tools(names):
        schemas = list(map(_arguments, tools))
        asked = formats.AskedCalls(schemas, names, several, choice == "auto", style.special_ids, reasoning)
        if choice == "auto":
            loose = written.grammar(replace(asked, schemas=[_ANY_ARGUMENTS] * len(tools)))
            is_strict = any(tool.function.strict for tool in tools)
            try:
                form = written.grammar(asked)
            except InvalidValueError:  # it is too long, or the format has no words for it
                if is_strict:
                    raise
                form = loose
            return Calling("auto", names, written, form, None if is_strict else loose, schemas)
        if choice == "required":
            return Calling("required", names, written, written.grammar(asked), schemas=schemas)
        if style.calls is None:
            form = StructuredOutputsParams(grammar=f"start: {formats.json_rule(schemas[0])}")
            return Calling("named", names, None, form)
        form = written.grammar(replace(asked, several=False))
        return Calling("named", names, written, form, schemas=schemas)


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


def with_arguments_read(messages: list[dict[str, Any]], *, as_text: bool = False) -> list[dict[str, Any]]:
    """The messages, with the arguments of earlier calls as the objects that templates write, or as JSON text."""
    for place, message in enumerate(messages):
        for name in ("function_call", "audio"):
            if message.get(name) is not None:
                why = "absent, since templates read tool_calls and text"
                raise invalid("messages", must_be(f"messages[{place}].{name}", message[name], why) + ".")
    return [_read_calls(message, as_text) if message.get("tool_calls") else message for message in messages]


def _read_calls(message: dict[str, Any], as_text: bool) -> dict[str, Any]:
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
        if as_text and isinstance(function, dict) and isinstance(arguments, dict):
            call = {**call, "function": {**function, "arguments": json.dumps(arguments, ensure_ascii=False)}}
        found.append(call)
    return {**message, "tool_calls": found}


def _tools(given: Sequence[Mapping[str, Any]]) -> list[Tool]:
    require(len(given) <= MAX_TOOLS, "tools", f"{len(given)} tools", f"at most {MAX_TOOLS} of them")
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
    require(len(set(names)) == len(names), "tools", names, "functions of different names")
    return tools


def _named(choice: object, tools: Sequence[Tool]) -> Tool:
    allowed = '"none", "auto", "required", or {"type": "function", "function": {"name": one of the tools}}'
    try:
        name = msgspec.convert(choice, NamedTool).function.name
        return next(tool for tool in tools if tool.function.name == name)
    except (msgspec.ValidationError, StopIteration):
        raise InvalidValueError("tool_choice", choice, allowed) from None


def _arguments(tool: Tool) -> dict[str, Any]:
    """The schema of a function's arguments, which are an object whatever else it allows."""
    given = tool.function.parameters
    return _NO_ARGUMENTS if given is None else {**given, "type": "object"}
