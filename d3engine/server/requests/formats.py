"""The tables of call formats and reasoning formats: how each family of models writes them, and how they are found."""

from __future__ import annotations

import json
import re
import secrets
import string
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from d3engine.errors import InvalidValueError, require
from d3engine.request.params import StructuredOutputsParams
from d3engine.server.schemas.requests import MAX_TOOLS
from d3engine.text.structured.references import resolved

SPACE = r"[ \n\t]{0,16}"
"""What may stand between the parts of a bare call."""
EXAMPLE = "shown_function"
"""The function whose call is rendered to find a template's format."""

_FENCES = ("```json", "```", "")
_JSON_HEAD = (
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"(?P<name>[\w-]+)"\s*,'
    r'\s*"(?:parameters|arguments)"\s*:\s*(?=\{)'
)

Parts = Sequence[Sequence[str]]
"""The texts of a bare call's beginning, in order, each one of several; space may stand between them."""


@dataclass(frozen=True)
class ToolFormat:
    """A call as JSON arguments between fixed texts, which are what the model writes.

    Attributes:
        name: as `--tool-call-parser` has it, in vLLM's spelling.
        seen: a regular expression that finds the format in a rendered call, or in the template's source.
        openings: texts after which calls must follow, wherever they stand in an answer; the first begins a forced call.
        head: before the arguments of a call; NAME stands for the function's name.
        tail: after them.
        begin: before the first call.
        between: between two calls.
        end: after the last call.
        keys: names of the arguments in a call without an opening, at an answer's very beginning; (): none is one.
        short_ids: whether the family's templates take no id of a call but nine letters and digits.
    """

    name: str
    seen: str
    openings: tuple[str, ...]
    head: str
    tail: str
    begin: str = ""
    between: str = ", "
    end: str = ""
    keys: tuple[str, ...] = ()
    short_ids: bool = False

    def new_id(self) -> str:
        if self.short_ids:
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
        return f"call_{uuid.uuid4().hex[:24]}"

    # -- grammar -----------------------------------------------------------------------------------------------------

    def grammar(self, asked: AskedCalls) -> StructuredOutputsParams:
        """One or more calls; under "auto" after any text, or text alone. Raises `InvalidValueError`."""
        marks = _Marks(asked.special_ids)
        more = f" ({marks.of(self.between)} one){{0,{MAX_TOOLS - 1}}}" if asked.several else ""
        rules = [f"calls: {marks.of(self.begin)} one{more} {marks.of(self.end)}"]
        if asked.is_auto:
            rules += self._free_text(asked, marks, more)
        else:
            rules.append(f"start: {marks.of(self.openings[0])} calls" if self.openings else "start: calls")
        one = [
            f"{marks.of(self.head.replace('NAME', name))} arguments_{nth} {marks.of(self.tail)}"
            for nth, name in enumerate(asked.names)
        ]
        # The schema of tool i stands in line i + 1, by which its faults are named.
        lines = [f"arguments_{nth}: {self.arguments(nth, schema)}" for nth, schema in enumerate(asked.schemas)]
        lines += [*self.further_rules(asked.schemas), *rules, f"one: {' | '.join(one)}", *marks.rules]
        openings = self.openings if asked.is_auto and self.openings else None
        return StructuredOutputsParams(grammar="\n".join(lines), openings=openings)

    def _free_text(self, asked: AskedCalls, marks: _Marks, more: str) -> list[str]:
        """The start under "auto": any text, a text that an opening ends, or a call at the very beginning.

        An answer that begins with reasoning is no text yet: an opening within it is none.
        """
        no_reasoning = rf" & ~/\s*{_regex(asked.reasoning_opening)}(?s:.*)/" if asked.reasoning_opening else ""
        ways, rules = ["TEXT"], [f"TEXT: /(?s:.*)/{no_reasoning}", f"SPACE: /{SPACE}/"]
        for nth, opening in enumerate(self.openings):
            ways.append(f"opening_{nth} calls")
            rules.append(f"opening_{nth}[lazy]: /(?s:.*){_regex(opening)}/{no_reasoning}")
            if marks.has_special(opening):
                ways.append(f"TEXT? {marks.of(opening)} calls")
        if self.is_bare:
            ways.append("bare")
            rules += ["FENCE: /(" + SPACE + "```)?/"]
            rules += [f"bare_{nth}[lazy]: /{self.bare_pattern(name)}/" for nth, name in enumerate(asked.names)]
            bare = " | ".join(f"bare_{nth} {self.bare_rest(nth)}" for nth in range(len(asked.names)))
            rules.append(f"bare: ({bare}){self.bare_end(more, marks)}")
        return [f"start: {' | '.join(ways)}", *rules]

    def arguments(self, nth: int, schema: Mapping[str, Any]) -> str:
        """The arguments of function `nth`, as an expression of the grammar."""
        return json_rule(schema)

    def further_rules(self, schemas: Sequence[Mapping[str, Any]]) -> list[str]:
        """Rules that the arguments use."""
        return []

    # -- a call without an opening -----------------------------------------------------------------------------------

    @property
    def is_bare(self) -> bool:
        return bool(self.bare_parts(()))

    def bare_parts(self, names: Sequence[str]) -> list[Parts]:
        """The beginnings of a bare call, each up to its arguments."""
        key, name = [f'"{one}"' for one in self.keys], [f'"{one}"' for one in names]
        head = [["{"], ['"name"'], [":"], name, [","], key, [":"]]
        typed = [["{"], ['"type"'], [":"], ['"function"'], [","], *head[1:]]
        return [[[fence], *one] for one in (head, typed) for fence in _FENCES] if self.keys else []

    def bare_pattern(self, name: str) -> str:
        found = [SPACE + SPACE.join(_either(options) for options in parts) for parts in self.bare_parts([name])]
        return f"({'|'.join(found)})"

    def bare_rest(self, nth: int) -> str:
        """What follows it, as an expression of the grammar."""
        return f'SPACE arguments_{nth} SPACE "}}"'

    def bare_end(self, more: str, marks: _Marks) -> str:
        """What follows a whole bare call."""
        return f"{more if self.between == '; ' else ''} FENCE"

    # -- reading -----------------------------------------------------------------------------------------------------

    def head_pattern(self) -> re.Pattern[str]:
        """What stands between two calls, and before the first, up to the arguments."""
        fixed = (*self.openings, self.begin, self.between, self.end, self.tail, "```json", "```")
        between = "|".join(re.escape(text) for text in fixed if text)
        head = _JSON_HEAD if "{" in self.head else re.escape(self.head).replace("NAME", r"(?P<name>[\w-]+)") + r"(?=\{)"
        return re.compile(rf"(?:[\s\[\],;}}]|{between})*{head}")


@dataclass(frozen=True)
class AskedCalls:
    """The calls that a grammar is to hold: of `names`, whose arguments have `schemas`; with `is_auto` text may come.

    No text of a grammar can be one of `special_ids`, the special tokens by their spelling, nor begin with reasoning.
    """

    schemas: Sequence[Mapping[str, Any]]
    names: Sequence[str]
    several: bool
    is_auto: bool
    special_ids: Mapping[str, int]
    reasoning_opening: str | None = None


class _Marks:
    """Fixed texts as expressions of a grammar: what of them is a special token, by its id."""

    def __init__(self, special_ids: Mapping[str, int]) -> None:
        self._ids = special_ids
        self._found: dict[int, str] = {}
        spelled = "|".join(map(re.escape, sorted(special_ids, key=len, reverse=True)))
        self._split = re.compile(f"({spelled})") if spelled else None

    def has_special(self, text: str) -> bool:
        return self._split is not None and self._split.search(text) is not None

    @property
    def rules(self) -> list[str]:
        """The rules of the special tokens that were used."""
        return [f"{name}: <[{token}]>" for token, name in self._found.items()]

    def of(self, text: str) -> str:
        """A text; nothing of an empty one."""
        parts = [text] if self._split is None else self._split.split(text)
        return " ".join(self._one(part) for part in parts if part)

    def _one(self, part: str) -> str:
        token = self._ids.get(part)
        if token is None:
            return json.dumps(part, ensure_ascii=False)
        return self._found.setdefault(token, f"special_{token}")


def json_rule(schema: Mapping[str, Any]) -> str:
    """A schema within a grammar; the escape keeps it from being read as a directive of the grammar."""
    return "%json " + json.dumps(schema).replace("%", "\\u0025")


def _regex(text: str) -> str:
    """A text as a regular expression between slashes."""
    return re.sub(r"([\\/.+*?()|\[\]{}^$\-&~#])", r"\\\1", text).replace("\n", r"\n")


def _either(options: Sequence[str]) -> str:
    return _regex(options[0]) if len(options) == 1 else f"({'|'.join(map(_regex, options))})"


_PLAIN = frozenset({"type", "properties", "required", "additionalProperties", "title", "description"})
_DEFINITIONS = frozenset({"$defs", "definitions", "$schema"})


class PythonFormat(ToolFormat):
    """Calls as a Python list: `[f(a=1, b="x"), g()]`. Values are JSON, but for True, False and None."""

    separator = '", " '
    pair = '/[A-Za-z_][A-Za-z0-9_]*/ "=" %json {}'
    """Between two arguments, and any argument."""

    def argument(self, name: str, value: str, schema: Mapping[str, Any]) -> str:
        """One argument, whose value is an expression of the grammar."""
        return f"{json.dumps(f'{name}=')} {value}"

    def value(self, schema: Mapping[str, Any]) -> str:
        is_boolean = {name: one for name, one in schema.items() if name not in _DEFINITIONS} == {"type": "boolean"}
        return '("True" | "False")' if is_boolean else json_rule(schema)

    def bare_parts(self, names: Sequence[str]) -> list[Parts]:
        return [[["["], [f"{name}(" for name in names]]]

    def bare_rest(self, nth: int) -> str:
        return f'arguments_{nth} ")"'

    def bare_end(self, more: str, marks: _Marks) -> str:
        return f"{more} {marks.of(self.end)}"

    def arguments(self, nth: int, schema: Mapping[str, Any]) -> str:
        if "properties" not in schema and schema.get("additionalProperties", True) is not False:
            return f"(pair ({self.separator}pair)*)?"
        return f"first_{nth}_0"

    def further_rules(self, schemas: Sequence[Mapping[str, Any]]) -> list[str]:
        """Of each function, the arguments from one on: those that must come, and those that may."""
        rules = [f"pair: {self.pair}"]
        for nth, schema in enumerate(schemas):
            if unknown := sorted(set(schema) - _PLAIN - _DEFINITIONS):
                allowed = f"functions of named parameters alone, as calls are written here (without {unknown[0]!r})"
                raise InvalidValueError("tools", dict(schema), allowed)
            try:
                rules += self._rules_of(nth, schema)
            except (AttributeError, TypeError):
                allowed = "functions whose parameters are a JSON schema: a keyword's value has the wrong type"
                raise InvalidValueError("tools", dict(schema), allowed) from None
        return rules

    def _rules_of(self, nth: int, schema: Mapping[str, Any]) -> list[str]:
        rules = []
        shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        properties, needed = schema.get("properties") or {}, set(schema.get("required") or ())
        for place, (name, of_value) in enumerate(properties.items()):
            own = {**({} if of_value is True else of_value or {"not": {}}), **shared}
            given = f"{self.argument(name, f'value_{nth}_{place}', own)} rest_{nth}_{place + 1}"
            rules.append(f"value_{nth}_{place}: {self.value(own)}")
            for kind, before in (("first", ""), ("rest", self.separator)):
                skipped = "" if name in needed else f" | {kind}_{nth}_{place + 1}"
                rules.append(f"{kind}_{nth}_{place}: {before}{given}{skipped}")
        return rules + [f'{kind}_{nth}_{len(properties)}: ""' for kind in ("first", "rest")]

    def head_pattern(self) -> re.Pattern[str]:
        return re.compile(r"(?:[\s\[,)]|<\|python_tag\|>)*(?P<name>[\w-]+)\(")


class XmlFormat(PythonFormat):
    """Calls with an element for each argument: a text stands there as it is, other values as JSON."""

    separator = ""
    pair = r'"<parameter=" /[^>\n]+/ ">\n" xml_text'

    def argument(self, name: str, value: str, schema: Mapping[str, Any]) -> str:
        end = "" if is_raw_text(schema) and not _texts(schema) else r' "\n</parameter>\n"'
        return f"{json.dumps(f'<parameter={name}>' + chr(10))} {value}{end}"

    def value(self, schema: Mapping[str, Any]) -> str:
        if not is_raw_text(schema):
            return super().value(schema)
        texts = _texts(schema)
        return " | ".join(map(json.dumps, texts)) if texts else "xml_text"

    def further_rules(self, schemas: Sequence[Mapping[str, Any]]) -> list[str]:
        return [r"xml_text[lazy]: /(?s:.*)\n<\/parameter>\n/", *super().further_rules(schemas)]

    def bare_parts(self, names: Sequence[str]) -> list[Parts]:
        return []

    def head_pattern(self) -> re.Pattern[str]:
        return re.compile(r"(?:\s|</?tool_call>)*<function=(?P<name>[\w-]+)>\n?")


def is_raw_text(schema: Mapping[str, Any]) -> bool:
    """Whether values of a schema are texts, which stand in an element as they are; those with a form are JSON."""
    known = _resolved(schema)
    own = set(known) - _DEFINITIONS - {"title", "description", "default", "examples"}
    return bool(_texts(schema)) or (own == {"type"} and known["type"] == "string")


def _texts(schema: Mapping[str, Any]) -> list[str]:
    """The texts of which a value is one, if its schema lists nothing else."""
    values = _resolved(schema).get("enum")
    is_listed = isinstance(values, list) and all(isinstance(one, str) and "\n" not in one for one in values)
    return values if is_listed and values is not None else []


def _resolved(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    found = resolved(schema, schema["$ref"]) if "$ref" in schema else schema
    return found if isinstance(found, Mapping) else {}


_JSON_CALL = '{"name": "NAME", "arguments": '
_DEEPSEEK = tuple(
    f"<\uff5ctool\u2581{word}\uff5c>"
    for word in ("calls\u2581begin", "call\u2581begin", "sep", "call\u2581end", "calls\u2581end")
)
"""The marks of DeepSeek's models, with fullwidth bars, and low blocks for spaces."""


def _listed(name: str, seen: str, *openings: str, short_ids: bool = False) -> ToolFormat:
    """Calls as one JSON list behind an opening."""
    return ToolFormat(name, seen, openings, head=_JSON_CALL, tail="}", end="]", short_ids=short_ids)


TOOL_FORMATS: tuple[ToolFormat, ...] = (
    ToolFormat(
        name="deepseek_v3",
        seen=rf"{_DEEPSEEK[2]}{EXAMPLE}\s|type['\]]* *\+ *'{_DEEPSEEK[2]}",
        openings=_DEEPSEEK[:1],
        head=f"{_DEEPSEEK[1]}function{_DEEPSEEK[2]}NAME\n```json\n",
        tail=f"\n```{_DEEPSEEK[3]}",
        between="\n",
        end=_DEEPSEEK[4],
    ),
    ToolFormat(
        name="deepseek_v31",
        seen=rf"{EXAMPLE}{_DEEPSEEK[2]}|name['\]]* *\+ *'{_DEEPSEEK[2]}",
        openings=_DEEPSEEK[:1],
        head=f"{_DEEPSEEK[1]}NAME{_DEEPSEEK[2]}",
        tail=_DEEPSEEK[3],
        between="",
        end=_DEEPSEEK[4],
    ),
    ToolFormat(
        name="mistral_v11",
        seen=r"\[ARGS\]",
        openings=("[TOOL_CALLS]",),
        head="NAME[ARGS]",
        tail="",
        between="[TOOL_CALLS]",
        short_ids=True,
    ),
    _listed("mistral", r"\[TOOL_CALLS\]", "[TOOL_CALLS] [", "[TOOL_CALLS][", short_ids=True),
    _listed("phi4_mini_json", r"functools\[|<\|tool\|>|<\|/tool\|>", "functools[", "<|tool_call|>["),
    _listed("granite", r"<\|tool_call\|>", "<|tool_call|>[", "<tool_call>["),
    XmlFormat(
        name="qwen3_coder",
        seen=rf"<function=({EXAMPLE}|example_function_name)>\s*<parameter=|'<parameter='",
        openings=("<tool_call>",),
        head="\n<function=NAME>\n",
        tail="</function>\n</tool_call>",
        between="\n<tool_call>",
    ),
    ToolFormat(
        name="hermes",
        seen=r'<tool_call>(\\n)?\s*\{\\?"name\\?"',
        openings=("<tool_call>",),
        head=f"\n{_JSON_CALL}",
        tail="}\n</tool_call>",
        between="\n<tool_call>",
        keys=("arguments",),
    ),
    PythonFormat(
        name="pythonic",
        seen=rf"\[{EXAMPLE}\(value=|\[func_name1\(",
        openings=(),
        head="NAME(",
        tail=")",
        begin="[",
        end="]",
    ),
    ToolFormat(
        name="llama3_json",
        seen=r'"parameters":\s*\{"value":|<\|python_tag\|>',
        openings=("<|python_tag|>",),
        head='{"name": "NAME", "parameters": ',
        tail="}",
        between="; ",
        keys=("parameters", "arguments"),
    ),
)
"""In the order in which they are looked for: those with distinct marks first."""

UNKNOWN_FORMAT = ToolFormat(
    name="json", seen="(?!)", openings=(), head='{"name": "NAME", "parameters": ', tail="}", begin="[", end="]"
)
"""Where a call must come and the model's own format is not known: a JSON list, as vLLM has it."""

_ALIASES = {
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "qwen": "hermes",
    "qwen3_xml": "qwen3_coder",
    "deepseek_r1": "deepseek_v3",
}


def tool_format_of(rendered: str, source: str, specials: Mapping[str, int]) -> ToolFormat | None:
    """The format of a template: as it renders a call, else by its source or the tokenizer's special tokens."""
    found = next((one for one in TOOL_FORMATS if re.search(one.seen, rendered)), None)
    if found is None:  # distinct marks may be written down in words that the tokenizer changes
        likely = [one for one in TOOL_FORMATS if rendered == "" or not one.is_bare]
        found = next((one for one in likely if re.search(one.seen, source)), None)
    if found is None and "<|python_tag|>" in specials:
        return tool_format_named("llama3_json")
    return found


def tool_format_named(name: str) -> ToolFormat:
    known = {one.name: one for one in TOOL_FORMATS}
    own = _ALIASES.get(name, name)
    require(own in known, "tool_call_parser", name, f"auto, none, or one of {', '.join(known)}")
    return known[own]


@dataclass(frozen=True)
class ReasoningFormat:
    """How a model marks reasoning before its answer; a prompt that ends with `opening` has begun it."""

    name: str
    opening: str
    closing: str


REASONING_FORMATS: tuple[ReasoningFormat, ...] = (
    ReasoningFormat("qwen3", "<think>", "</think>"),
    ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
    ReasoningFormat("granite", "Here is my thought process:", "Here is my response:"),
)
_REASONING_ALIASES = {"deepseek_r1": "qwen3", "deepseek_v3": "qwen3", "glm45": "qwen3", "think": "qwen3"}


def reasoning_format_of(source: str) -> ReasoningFormat | None:
    return next((one for one in REASONING_FORMATS if one.closing in source), None)


def reasoning_format_named(name: str) -> ReasoningFormat:
    known = {one.name: one for one in REASONING_FORMATS}
    own = _REASONING_ALIASES.get(name, name)
    require(own in known, "reasoning_parser", name, f"auto, none, or one of {', '.join([*known, *_REASONING_ALIASES])}")
    return known[own]
