"""`--depth "d3 alpha=0.9 start=0.6"`: a depth policy with its options, as commands take it."""

from __future__ import annotations

import functools
import inspect
import json
import shlex
from collections.abc import Callable
from dataclasses import Field, fields
from textwrap import wrap
from typing import Annotated, Any, Literal, TypeAlias, cast

import typer

from d3engine.cli.signatures import give_parameters, keyword, naming_flags
from d3engine.depth import DepthPolicy, policy_from_name
from d3engine.depth.policy import (
    OPTION,
    POLICIES,
    policy_class,
    policy_names,
    policy_options,
    required_options,
)
from d3engine.errors import NOTHING, InvalidValueError, integer_in, require

AUTO: Literal["auto"] = "auto"

Depth: TypeAlias = DepthPolicy | Literal["auto"]
"""What a command gets: a policy, or "auto" for the one in the model's d3.json (full depth without one)."""


OWN_NAMES = [name for name in POLICIES if name != "table"]
"""d3engine's policies that options can spell out; a table is too long for a command line."""


DRAFT_NAMES = ("d3", "nested", "skipdecode", "unified", "even", "fixed", "tail-skip", "distilled", "width")
"""The policies that may draft on a command line."""


PANEL = "Depth"


def number(text: str) -> float | str:
    """A number of the command line; a fraction ("1/3"), and what is no number, stay text for the policy to judge."""
    try:
        return float(text)
    except ValueError:
        return text


def layer_ids(text: str) -> list[int] | str:
    """Layers of the command line, "3,5,8-11"; what names none stays text for the policy to judge."""
    try:
        ends = [[int(end) for end in piece.split("-")] for piece in text.split(",")] if text else []
        return [layer for piece in ends for layer in range(piece[0], piece[-1] + 1)] if _are_short(ends) else text
    except ValueError:
        return text


def layer_windows(text: str) -> list[list[int]] | str:
    """Windows of the command line, "6:9,12:15" for the layers 6 to 8 and 12 to 14; other text stays text."""
    try:
        return [[int(end) for end in piece.split(":")] for piece in text.split(",")]
    except ValueError:
        return text


def _are_short(pieces: list[list[int]]) -> bool:
    """Whether each is a layer or two, and they are no more than a model might have."""
    return all(len(piece) <= 2 and piece[-1] - piece[0] < 1000 for piece in pieces)


_TYPES = {
    "float": float,
    "int": int,
    "bool": bool,
    "float | Fraction": number,
    "Sequence[int]": layer_ids,
    "Sequence[float]": lambda text: [number(one) for one in text.split(",")],
    "Sequence[str]": lambda text: text.split(","),
    "Sequence[Sequence[int]]": layer_windows,
}
"""Annotation of a policy's field -> what reads it; all others are text."""


def _options_of_policies() -> dict[str, tuple[str, Any, str]]:
    every: dict[str, Field[Any]] = {}
    for name in OWN_NAMES:
        for field in fields(cast(Any, policy_class(name))):
            if OPTION in field.metadata:
                every.setdefault(field.name, field)
    declared = {name: field.metadata[OPTION] for name, field in every.items()}
    declared = dict(sorted(declared.items(), key=lambda one: one[1].is_common))
    types = {name: _TYPES.get(str(field.type).removesuffix(" | None"), str) for name, field in every.items()}
    return {name: (one.spelling or name.replace("_", "-"), types[name], one.help) for name, one in declared.items()}


OPTIONS = _options_of_policies()
"""Field of the policies -> spelling on a command line, type, help."""

MOVED = {f"--{spelling}": field for field, (spelling, _, _) in OPTIONS.items()} | {"--depth-option": "", "--policy": ""}
"""Options of earlier releases that `--depth` has taken in; refused with the new spelling until the next one."""


def depth_names() -> list[str]:
    """The values of `--depth`, those that installed packages add among them."""
    return [AUTO, *(name for name in policy_names() if name != "table")]


def parse_depth(line: str, field: str = "--depth") -> Depth:
    """The policy of a line: its name, then `option=value`, spelled as in `OPTIONS` or as the policy's field.

    Quotation marks hold a value with spaces together. `field` names the line in errors.
    """
    words = _words(line, field)
    require(len(words) > 0, field, line, f"one of {', '.join(depth_names())}")
    name, *pairs = words
    require(name in depth_names(), field, name, f"one of {', '.join(depth_names())}")
    try:
        return (
            _drafting(name, pairs) if name in ("lossless", "self-speculative") else _plain(name, _options(name, pairs))
        )
    except InvalidValueError as error:
        where = f"{field} {line!r}{error.field and ': '}{error.field}"
        raise InvalidValueError(where, error.value, error.allowed) from error


def _words(line: str, field: str) -> list[str]:
    words = shlex.shlex(line, posix=True)
    words.whitespace_split, words.escape, words.commenters = True, "", ""  # paths of Windows have backslashes
    try:
        return list(words)
    except ValueError:
        raise InvalidValueError(field, line, "text whose quotation marks are closed") from None


def _drafting(name: str, pairs: list[str]) -> DepthPolicy:
    """A policy whose drafts run the layers of another; options that are not its own go to the draft."""
    given = _options(name, [pair for pair in pairs if _field(pair.partition("=")[0]) in policy_options(name)])
    others = [pair for pair in pairs if _field(pair.partition("=")[0]) not in policy_options(name)]
    if name == "lossless":
        require("draft" not in given, "draft", given.get("draft"), "absent, since lossless drafts by d3")
        given["draft"] = "d3"
    one_of = f"one of {', '.join(DRAFT_NAMES)}"
    draft = given.pop("draft", NOTHING)
    require(draft in DRAFT_NAMES, "draft", draft, one_of)
    return policy_from_name(name, draft=_plain(draft, _options(draft, others)), **given)


def _options(name: str, pairs: list[str]) -> dict[str, Any]:
    """The options of a named policy, each with the type that it must have."""
    takes = () if name == AUTO else policy_options(name)
    spelled = [_spelling(field) for field in takes]
    found: dict[str, Any] = {}
    for pair in pairs:
        key, separator, value = pair.removeprefix("--").partition("=")
        field = _field(key)
        if field not in takes or not separator:
            others = [one for one in OWN_NAMES if field in policy_options(one)]
            elsewhere = f" ({key} goes with {', '.join(others)})" if others and field not in takes else ""
            allowed = (
                f"option=value, with {', '.join(spelled)}" if spelled else f"absent, since {name} takes no options"
            )
            raise InvalidValueError("option", pair, allowed + elsewhere)
        require(field not in found, key, value, "given once")
        found[field] = _value(key, field if name in OWN_NAMES else "", value)
    return found


def _plain(name: str, given: dict[str, Any]) -> Depth:
    if name == AUTO:
        return AUTO
    missing = [_spelling(field) for field in required_options(name) if field not in given]
    require(not missing, "", NOTHING, f"given with {' and '.join(missing)}")
    return policy_from_name(name, **given)


def _value(key: str, field: str, text: str) -> Any:
    """A value as its option takes it; JSON, or else text, where an installed package brings the policy."""
    if field not in OPTIONS:
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text
    kind = OPTIONS[field][1]
    try:
        return {"true": True, "false": False}[text] if kind is bool else kind(text)
    except (ValueError, KeyError):
        raise InvalidValueError(key, text, KINDS.get(kind, "of its type")) from None


def _field(key: str) -> str:
    """The field of a policy that an option's spelling stands for."""
    key = key.removeprefix("--")
    return _FIELDS.get(key.replace("_", "-"), key) if key not in OPTIONS else key


def _spelling(field: str) -> str:
    return OPTIONS[field][0] if field in OPTIONS else field


_FIELDS = {spelling: field for field, (spelling, _, _) in OPTIONS.items()}
KINDS = {float: "a number", int: "an integer", bool: "true or false"}


def respelled(flag: str) -> str | None:
    """What to write in place of an option of an earlier release; None for any other."""
    if flag not in MOVED:
        return None
    field = MOVED[flag]
    if not field:
        return '--depth "POLICY option=value"'
    name = next(name for name in OWN_NAMES if field in policy_options(name))
    needed = [_spelling(one) for one in required_options(name)]
    shown = dict.fromkeys([*needed, _spelling(field)])
    return f'--depth "{name} {" ".join(f"{one}=..." for one in shown)}"'


def policies_help() -> str:
    """Every policy with its options, then every option, for the end of a command's help."""
    lines = ["Policies of --depth, with their options:", "", "\b"]
    for name in OWN_NAMES:
        fields, needed = policy_options(name), required_options(name)
        if name == "lossless":  # which drafts by d3
            fields, needed = (*policy_options("d3"), *fields[1:]), required_options("d3")
        options = [_spelling(one) if one in needed else f"[{_spelling(one)}]" for one in fields]
        lines += _wrapped(f"{name} {' '.join(options)}", 4)
    lines += ["", "Options, each as option=value:", "", "\b"]
    for spelling, _, text in OPTIONS.values():
        lines += _wrapped(f"{spelling:<18} {text}", 19)
    return "\n".join(lines)


def _wrapped(line: str, indent: int) -> list[str]:
    return wrap(line, 74, subsequent_indent=" " * indent, break_on_hyphens=False)


def takes_depth(command: Callable[..., Any]) -> Callable[..., Any]:
    """Read the parameter `depth` of a typer command, or each of `depths`, by `parse_depth`."""
    signature = inspect.signature(command, eval_str=True)
    name = "depths" if "depths" in signature.parameters else "depth"
    several = name == "depths"

    @functools.wraps(command)
    def with_policy(**arguments: Any) -> Any:
        given = arguments[name]
        lines = (given or [AUTO]) if several else [given]
        found = [parse_depth(line) for line in lines]
        fields = {_field(pair.partition("=")[0]) for line in lines for pair in _words(line, "--depth")[1:]}
        with naming_flags({"depth": "--depth", **{field: f"{_spelling(field)} of --depth" for field in fields}}):
            arguments[name] = found if several else found[0]
            return command(**arguments)

    text = 'Which layers run for each token: a policy with its options, "d3 alpha=A start=S"; '
    text += "may be repeated." if several else "d3engine schedule --help lists them."
    option = typer.Option("--depth", metavar="POLICY", help=text, rich_help_panel=PANEL)
    own = (
        keyword(name, Annotated[list[str] | None, option], None)
        if several
        else keyword(name, Annotated[str, option], AUTO)
    )
    give_parameters(with_policy, [*(one for one in signature.parameters.values() if one.name != name), own])
    return with_policy


def window_of(flag: str, words: str, num_layers: int) -> tuple[int, int]:
    """(first, stop) of "A:B", the layers A to B - 1."""
    first, stop = map(integer_in, words.partition(":")[::2])
    if first is None or stop is None or not first < stop <= num_layers:
        raise InvalidValueError(flag, words, f"A:B with 0 <= A < B <= {num_layers}, the layers A to B - 1")
    return first, stop
