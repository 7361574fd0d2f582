"""The depth options that several commands share: `--depth d3 --alpha 0.9 --start 0.6`.

The one idea: a command declares one parameter, `depth`, and `takes_depth` shows it on the command line as
`--depth` and the policies' own options. An option of another policy is refused by name, never ignored.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from enum import Enum, StrEnum
from typing import Annotated, Any, Literal, TypeAlias

import typer

from d3engine.depth import DepthPolicy, policy_from_name
from d3engine.depth.policy import policy_options
from d3engine.errors import InvalidValueError, require

AUTO: Literal["auto"] = "auto"

Depth: TypeAlias = DepthPolicy | Literal["auto"]
"""What a command gets: a policy, or "auto" for the one in the model's d3.json (full depth without one)."""


class DepthName(StrEnum):
    """The values of `--depth`."""

    auto = "auto"
    full = "full"
    d3 = "d3"
    skipdecode = "skipdecode"
    unified = "unified"
    self_speculative = "self-speculative"
    lossless = "lossless"
    speculative = "speculative"


class DraftName(StrEnum):
    """The values of `--draft`: the policies that may draft."""

    d3 = "d3"
    skipdecode = "skipdecode"
    unified = "unified"


class OnSkipName(StrEnum):
    """The values of `--on-skip`."""

    none = "none"
    copy = "copy"
    project = "project"


PANEL = "Depth"

OPTIONS: dict[str, tuple[str, type, str]] = {
    "alpha": ("--alpha", float, "d3: the decay, in (0, 1]."),
    "start": ("--start", str, "d3: the fraction of the layers below the skipped window, in (0, 1)."),
    "tail": ("--tail", int, "d3: this many last layers are never skipped."),
    "max_tokens": ("--decay-steps", int, "skipdecode: the steps over which the depth falls."),
    "min_layers": ("--min-layers", int, "skipdecode: the depth after the last of these steps."),
    "max_layers": ("--max-layers", int, "skipdecode: the depth the line starts from (all layers)."),
    "warmup": ("--warmup", int, "skipdecode: this many lowest layers always run (1)."),
    "speedup": ("--speedup", str, "unified: layers of the model over layers kept."),
    "on_skip": ("--on-skip", OnSkipName, "What the KV cache holds at a skipped layer (none)."),
    "draft": ("--draft", DraftName, "self-speculative: the policy whose layers draft, with its own options."),
    "draft_model": ("--draft-model", str, "speculative: the directory of a smaller model of the same vocabulary."),
    "draft_length": ("--draft-length", int, "lossless, (self-)speculative: tokens of a draft at most (4)."),
    "stop_probability": ("--stop-probability", float, "The same: end a draft whose best token is less likely (0)."),
    "adaptive": ("--adaptive", bool, "The same: let each answer adapt the length of its drafts."),
}
"""Field of the policies -> flag, type, help. None stands for an option that was not given."""


def depth_from_options(name: DepthName, options: dict[str, Any]) -> Depth:
    """The policy of `--depth`; `options` maps the fields of `OPTIONS` to values, None where not given."""
    given = {
        field: value.value if isinstance(value, Enum) else value
        for field, value in options.items()
        if value is not None
    }
    if name is DepthName.lossless:
        require("draft" not in given, "--draft", given.get("draft"), "--depth lossless drafts by d3, with its options")
        return _drafted(name, DepthName.d3, given)
    if name is DepthName.self_speculative:
        require("draft" in given, "--depth", name.value, f"it needs --draft, one of {', '.join(DraftName)}")
        return _drafted(name, DepthName(given.pop("draft")), given)
    return _plain(name, given)


def _drafted(name: DepthName, draft: DepthName, given: dict[str, Any]) -> DepthPolicy:
    """The policy `name` whose drafts run the layers of `draft`; options that are not its own go to the draft."""
    own = {field: value for field, value in given.items() if field in policy_options(name.value)}
    drafting = _plain(draft, {field: value for field, value in given.items() if field not in own})
    return policy_from_name(name.value, draft=drafting, **own)


def _plain(name: DepthName, given: dict[str, Any]) -> Depth:
    takes = () if name is DepthName.auto else policy_options(name.value)
    for field, value in given.items():
        if field not in takes:
            flags = ", ".join(OPTIONS[option][0] for option in takes)
            raise InvalidValueError(OPTIONS[field][0], value, f"--depth {name.value} takes {flags or 'no options'}")
    if name is DepthName.auto:
        return AUTO
    needed = {DepthName.d3: ("alpha", "start"), DepthName.skipdecode: ("max_tokens", "min_layers")}
    missing = [field for field in needed.get(name, takes[:1]) if field not in given]
    if missing:
        flags = " and ".join(OPTIONS[field][0] for field in missing)
        raise InvalidValueError("--depth", name.value, f"it needs {flags}")
    return policy_from_name(name.value, **given)


def takes_depth(command: Callable[..., Any]) -> Callable[..., Any]:
    """Replace the parameter `depth` of a typer command by `--depth` and the options of the policies."""

    @functools.wraps(command)
    def with_policy(**arguments: Any) -> Any:
        options = {field: arguments.pop(field) for field in OPTIONS}
        arguments["depth"] = depth_from_options(arguments["depth"], options)
        return command(**arguments)

    signature = inspect.signature(command, eval_str=True)
    parameters = [parameter for parameter in signature.parameters.values() if parameter.name != "depth"]
    parameters += _depth_parameters()
    # Typer reads one or the other, by version.
    with_policy.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    with_policy.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return with_policy


def _depth_parameters() -> list[inspect.Parameter]:
    name = typer.Option("--depth", help="Which layers run for each token.", rich_help_panel=PANEL)
    parameters = [_keyword("depth", Annotated[DepthName, name], DepthName.auto)]
    for field, (flag, kind, text) in OPTIONS.items():
        option = typer.Option(flag, help=text, show_default=False, rich_help_panel=PANEL)
        parameters.append(_keyword(field, Annotated[kind | None, option], None))
    return parameters


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
