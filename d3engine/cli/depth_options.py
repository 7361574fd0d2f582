"""The depth options that several commands share: `--depth d3 --alpha 0.9 --start 0.6`.

The one idea: a command declares one parameter, `depth`, and `takes_depth` shows it on the command line as
`--depth` and the policies' own options. An option of another policy is refused by name, never ignored.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Sequence
from enum import Enum, StrEnum
from typing import Annotated, Any, Literal, TypeAlias

import typer

from d3engine.cli.signatures import give_parameters, keyword, naming_flags
from d3engine.depth import DepthPolicy, policy_from_name
from d3engine.depth.policy import POLICY_CLASSES, policy_names, policy_options, required_options
from d3engine.errors import NOTHING, InvalidValueError, require

AUTO: Literal["auto"] = "auto"

Depth: TypeAlias = DepthPolicy | Literal["auto"]
"""What a command gets: a policy, or "auto" for the one in the model's d3.json (full depth without one)."""


OWN_NAMES = [name for name in POLICY_CLASSES if name != "table"]
"""d3engine's policies that options can spell out; a table is too long for a command line."""


DRAFT_NAMES = ("d3", "nested", "skipdecode", "unified", "even", "fixed", "tail-skip")
"""The policies that may draft on a command line."""


class OnSkipName(StrEnum):
    """The values of `--on-skip`."""

    none = "none"
    copy = "copy"
    project = "project"


class ConfidenceName(StrEnum):
    """The values of `--confidence`."""

    softmax_max = "softmax_max"
    softmax_diff = "softmax_diff"
    cosine = "cosine"


class BatchName(StrEnum):
    """The values of `--exit-batch`."""

    per_row = "per_row"
    batch_min = "batch_min"


PANEL = "Depth"
OTHER_OPTIONS = "depth_option"
"""The parameter for options that have no flag of their own: those of policies that other packages bring."""


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


OPTIONS: dict[str, tuple[str, Any, str]] = {
    "alpha": ("--alpha", float, "d3, nested: the decay, in (0, 1]."),
    "start": ("--start", number, "d3: the fraction of the layers below the skipped window, in (0, 1)."),
    "tail": ("--tail", int, "d3: this many last layers are never skipped."),
    "windows": ("--windows", layer_windows, "nested: windows of layers in the order in which they go, 6:9,12:15."),
    "max_tokens": ("--decay-steps", int, "skipdecode: the steps the depth falls over; tail-skip: of the mean."),
    "min_layers": ("--min-layers", int, "skipdecode: the depth after the last of these steps (or --mean-layers)."),
    "max_layers": ("--max-layers", int, "skipdecode: the depth the line starts from (all layers)."),
    "warmup": ("--warmup", int, "skipdecode: this many lowest layers always run (1)."),
    "speedup": ("--speedup", number, "unified, even: layers of the model over layers kept."),
    "skip_layers": ("--skip-layers", layer_ids, "fixed: the layers left out, such as 3,5,8-11."),
    "mean_layers": ("--mean-layers", number, "tail-skip, skipdecode: the mean depth over --decay-steps tokens."),
    "threshold": ("--threshold", float, "early-exit: the confidence that lets a token leave, 0 to 2."),
    "confidence": ("--confidence", ConfidenceName, "early-exit: what is compared with it (softmax_max)."),
    "decay": ("--threshold-decay", float, "early-exit: how fast the threshold falls; 0 keeps it (4)."),
    "min_layer": ("--exit-min-layer", int, "early-exit: the lowest layer, from 0, after which a token may leave (0)."),
    "every": ("--exit-every", int, "early-exit: look only after every so many layers (1)."),
    "batch": (
        "--exit-batch",
        BatchName,
        "early-exit: who decides; under batch_min company changes answers (per_row).",
    ),
    "on_skip": ("--on-skip", OnSkipName, "What the KV cache holds at a skipped layer (none; early-exit: project)."),
    "bridges": ("--bridges", str, "What stands in for skipped layers: a file of d3engine bridge fit, or auto."),
    "draft": ("--draft", str, "self-speculative: the policy whose layers draft, with its own options."),
    "draft_model": ("--draft-model", str, "speculative: a smaller model of the same vocabulary, named as MODEL is."),
    "skip_attention": ("--skip-attention", layer_ids, "draft-and-verify: layers whose attention a draft leaves out."),
    "skip_mlp": ("--skip-mlp", layer_ids, "The same of the MLP."),
    "target_acceptance": ("--target-acceptance", float, "The same: what share of a draft is to be accepted (0.9)."),
    "draft_length": (
        "--draft-length",
        int,
        "Tokens of a draft at most: of draft-and-verify (8), of lossless, (self-)speculative (4).",
    ),
    "stop_probability": (
        "--stop-probability",
        float,
        "End a draft whose best token is less likely: of draft-and-verify at first (0.8), of the others (0).",
    ),
    "adaptive": ("--adaptive", bool, "lossless, (self-)speculative: let each answer adapt the length of its drafts."),
}
"""Field of the policies -> flag, type, help. None stands for an option that was not given."""

PARSERS: dict[Any, str] = {number: "NUMBER", layer_ids: "LAYERS", layer_windows: "WINDOWS"}
"""The types that are functions of a text, and what help calls their values."""


def depth_names() -> list[str]:
    """The values of `--depth`, those that installed packages add among them."""
    return [AUTO, *(name for name in policy_names() if name != "table")]


def depth_from_options(name: str, options: dict[str, Any], others: Sequence[str] = ()) -> Depth:
    """The policy of `--depth`; `options` maps the fields of `OPTIONS` to values, None where not given.

    `others` are "option=value" of policies that other packages bring; a value is JSON, or else text.
    """
    require(name in depth_names(), "--depth", name, f"one of {', '.join(depth_names())}")
    given = {
        field: value.value if isinstance(value, Enum) else value
        for field, value in options.items()
        if value is not None
    }
    if name in ("lossless", "self-speculative"):
        return _drafting(name, given)
    return _plain(name, given, others)


def _drafting(name: str, given: dict[str, Any]) -> DepthPolicy:
    """A policy whose drafts run the layers of another; options that are not its own go to the draft."""
    draft = given.pop("draft", None)
    if name == "lossless":
        require(draft is None, "--draft", draft, "absent, since --depth lossless drafts by d3, with its options")
        draft = "d3"
    allowed = f"given with --draft, one of {', '.join(DRAFT_NAMES)}"
    require(draft is not None, f"--depth {name}", NOTHING, allowed)
    require(draft in DRAFT_NAMES, "--draft", draft, f"one of {', '.join(DRAFT_NAMES)}")
    own = {field: value for field, value in given.items() if field in policy_options(name)}
    drafting = _plain(draft, {field: value for field, value in given.items() if field not in own})
    return policy_from_name(name, draft=drafting, **own)


def _plain(name: str, given: dict[str, Any], others: Sequence[str] = ()) -> Depth:
    takes = () if name == AUTO else policy_options(name)
    for pair in others:
        field, separator, value = pair.partition("=")
        fits = bool(separator) and field in takes and field not in given
        allowed = f"option=value, once for each of {', '.join(takes)}" if takes else f"absent, since {name} takes none"
        require(fits, "--depth-option", pair, allowed)
        given[field] = _json_or_text(value)
    for field, value in given.items():
        if field not in takes:
            flags = ", ".join(_flag(option) for option in takes)
            takers = [other for other in depth_names() if other != AUTO and field in policy_options(other)]
            allowed = f"absent, since --depth {name} takes {flags or 'no options'} (it goes with {', '.join(takers)})"
            raise InvalidValueError(_flag(field), value, allowed)
    if name == AUTO:
        return AUTO
    missing = [_flag(field) for field in required_options(name) if field not in given]
    if missing:
        raise InvalidValueError(f"--depth {name}", NOTHING, f"given with {' and '.join(missing)}")
    return policy_from_name(name, **given)


def _flag(field: str) -> str:
    return OPTIONS[field][0] if field in OPTIONS else f"--depth-option {field}=..."


def _json_or_text(value: str) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def policy_from_words(words: list[str], field: str = "--policy") -> Depth:
    """A policy in one line: its name and its options as `option=value`, in the flags' names or in Python's.

    `field` is what errors call the line.
    """
    require(len(words) > 0, field, "", f"one of {', '.join(depth_names())}")
    name, *pairs = words
    require(name in depth_names(), field, name, f"one of {', '.join(depth_names())}")
    fields = {flag.removeprefix("--"): option for option, (flag, _, _) in OPTIONS.items()}
    own = () if name in (AUTO, *OWN_NAMES) else policy_options(name)
    options, others = {}, []
    for pair in pairs:
        key, separator, value = pair.removeprefix("--").partition("=")
        allowed = [*fields, *own]
        if key in own:
            others.append(pair.removeprefix("--"))
            continue
        option = key if key in OPTIONS else fields.get(key.replace("_", "-"))
        if option is None or not separator:
            raise InvalidValueError(field, pair, f"option=value, with {', '.join(allowed)}")
        require(option not in options, field, " ".join(words), f"a name with each option once ({key} stands twice)")
        kind = OPTIONS[option][1]
        try:
            options[option] = {"true": True, "false": False}[value] if kind is bool else kind(value)
        except (ValueError, KeyError):
            wanted = "true or false" if kind is bool else f"a value of type {getattr(kind, '__name__', kind)}"
            raise InvalidValueError(f"{field} {' '.join(words)!r}: {key}", value, wanted) from None
    try:
        return depth_from_options(name, options, others)
    except InvalidValueError as error:
        raise _in_words(error, f"{field} {' '.join(words)!r}") from error


def _in_words(error: InvalidValueError, line: str) -> InvalidValueError:
    """The same fault in a line of words, with options spelled as there rather than as flags."""
    field = "" if error.field.startswith("--depth ") else f": {error.field.removeprefix('--')}"
    return InvalidValueError(line + field, error.value, error.allowed.replace("--depth ", "").replace("--", ""))


def takes_depth(command: Callable[..., Any]) -> Callable[..., Any]:
    """Replace the parameter `depth` of a typer command by `--depth` and the options of the policies."""

    @functools.wraps(command)
    def with_policy(**arguments: Any) -> Any:
        options = {field: arguments.pop(field) for field in OPTIONS}
        others = arguments.pop(OTHER_OPTIONS) or ()
        given = {field: OPTIONS[field][0] for field, value in options.items() if value is not None}
        with naming_flags({**given, "depth": "--depth"}):
            arguments["depth"] = depth_from_options(arguments["depth"], options, others)
            return command(**arguments)

    signature = inspect.signature(command, eval_str=True)
    parameters = [parameter for parameter in signature.parameters.values() if parameter.name != "depth"]
    parameters += _depth_parameters()
    give_parameters(with_policy, parameters)
    return with_policy


def _depth_parameters() -> list[inspect.Parameter]:
    text = f"Which layers run for each token: {', '.join([AUTO, *OWN_NAMES])}, or one that an installed package brings."
    name = typer.Option("--depth", metavar="NAME", help=text, rich_help_panel=PANEL)
    parameters = [keyword("depth", Annotated[str, name], AUTO)]
    for field, (flag, kind, text) in OPTIONS.items():
        named: dict[str, Any] = {"help": text, "show_default": False, "rich_help_panel": PANEL}
        if kind in PARSERS:
            option, annotation = typer.Option(flag, parser=kind, metavar=PARSERS[kind], **named), str | None
        else:
            option, annotation = typer.Option(flag, **named), kind | None
        parameters.append(keyword(field, Annotated[annotation, option], None))
    text = "OPTION=VALUE of a policy that an installed package brings; may stand several times."
    other = typer.Option("--depth-option", help=text, show_default=False, rich_help_panel=PANEL)
    parameters.append(keyword(OTHER_OPTIONS, Annotated[list[str] | None, other], None))
    return parameters
