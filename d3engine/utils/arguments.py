"""Arguments that are declared once: as the fields of a dataclass, from which checks, options and docs are made."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY as KW_ONLY
from dataclasses import Field, dataclass, field, fields
from difflib import get_close_matches
from functools import cache, wraps
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar, get_origin

from d3engine.errors import require, require_integer, require_number

P = ParamSpec("P")
S = TypeVar("S")
C = TypeVar("C")

CHECK, PANEL, LISTED = "check", "panel", "listed"
"""Keys of a field's metadata."""


class Check:
    """Which values a field may have: the kind that its option or its JSON has, and the bounds as JSON Schema."""

    kind: type = str

    @property
    def schema(self) -> Mapping[str, Any]:
        return {}

    def check(self, field: str, value: object) -> None:
        """Raise `InvalidValueError` for any other value."""

    def kept(self, value: Any) -> Any:
        """What a checked value is kept as."""
        return value


@dataclass(frozen=True)
class Integers(Check):
    """Integers from `low` to `high`; None: no bound."""

    low: int
    high: int | None = None
    kind = int

    def check(self, field: str, value: object) -> None:
        require_integer(field, value, self.low, self.high)

    @property
    def schema(self) -> dict[str, Any]:
        return {"minimum": self.low} | ({} if self.high is None else {"maximum": self.high})


@dataclass(frozen=True)
class Numbers(Check):
    """Finite numbers from `low`, or above it with `open_low`, to `high`."""

    low: float
    high: float
    open_low: bool = False
    kind = float

    def check(self, field: str, value: object) -> None:
        require_number(field, value, self.low, self.high, open_low=self.open_low)

    @property
    def schema(self) -> dict[str, Any]:
        return {"exclusiveMinimum" if self.open_low else "minimum": self.low, "maximum": self.high}


@dataclass(frozen=True)
class Switch(Check):
    """True or False."""

    kind = bool

    def check(self, field: str, value: object) -> None:
        require(isinstance(value, bool), field, value, "True or False")


@dataclass(frozen=True, init=False)
class OneOf(Check):
    """One of these strings."""

    names: tuple[str, ...]
    kind = str

    def __init__(self, *names: str) -> None:
        object.__setattr__(self, "names", names)

    def check(self, field: str, value: object) -> None:
        allowed = f"one of {', '.join(self.names)}"
        require(isinstance(value, str) and value in self.names, field, value, allowed)


@dataclass(frozen=True)
class Unchecked(Check):
    """Values that only the model or the machine can judge."""

    kind: type = str


def argument(default: Any, check: Check = Unchecked(), *, panel: str | None = None, listed: bool = True) -> Any:
    """A field with its default and its bounds; `panel` is the heading of its command-line option, None for no option.

    A field whose annotation ends with `| None` may be None. Help leaves out an option that is not `listed`.
    """
    return field(default=default, metadata={CHECK: check, PANEL: panel, LISTED: listed})


def check_arguments(self: Any) -> None:
    """Check every field of a dataclass instance that has a check and not its default value, and keep what that says."""
    cls: Any = type(self)
    for one in _checked(cls):
        value = getattr(self, one.name)
        if value is not one.default and not (value is None and str(one.type).endswith("| None")):
            check = one.metadata[CHECK]
            check.check(one.name, value)
            if (kept := check.kept(value)) is not value:
                object.__setattr__(self, one.name, kept)


@cache
def _checked(cls: Any) -> tuple[Field[Any], ...]:
    return tuple(one for one in fields(cls) if one.metadata.get(CHECK) is not None)


def documented(cls: type) -> dict[str, str]:
    """Field -> its text in the `Args` section of the docstring of `cls`, on one line."""
    section = inspect.cleandoc(cls.__doc__ or "").partition("Args:\n")[2].partition("\n\n")[0]
    found = re.findall(r"^    (\w+): (.*(?:\n     +.*)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


OptionTable: TypeAlias = Mapping[str, tuple[str, Any, str]]
"""Field -> flag, kind of value, help."""


def options_of(cls: type, defaults: Mapping[str, Any] = {}) -> dict[str, tuple[str, Any, str]]:
    """The command-line options of the fields of `cls` that have a panel.

    Help is the first sentence of a field's documentation with its default; `defaults` has other ones, or how to say
    them.
    """
    texts, found = documented(cls), {}
    for one in fields(cls):
        if one.metadata.get(PANEL) is None:
            continue
        flag, kind = f"--{one.name.replace('_', '-')}", one.metadata[CHECK].kind
        default = defaults.get(one.name, one.default)
        # A switch that is off needs no flag that turns it off, unless a file may have turned it on.
        flags = f"{flag}/--no-{flag[2:]}" if kind is bool and default else flag
        found[one.name] = (flags, kind, _help(texts[one.name], default, repeats=get_origin(kind) is list))
    return found


def panels_of(cls: type) -> dict[str, str]:
    """Field -> the heading of its option in the help."""
    return {one.name: one.metadata[PANEL] for one in fields(cls) if one.metadata.get(PANEL) is not None}


def unlisted(*classes: type) -> frozenset[str]:
    """The fields whose options help leaves out."""
    return frozenset(one.name for cls in classes for one in fields(cls) if not one.metadata.get(LISTED, True))


def _help(text: str, default: Any, *, repeats: bool) -> str:
    sentence = re.split(r"\.(?: |$)", text.replace("`", ""), maxsplit=1)[0]
    noun, _, of_none = sentence.partition("; None: ")
    if repeats:
        return f"{noun}; may be repeated."
    if default is None:
        default = of_none
    elif isinstance(default, bool):
        default = "on" if default else "off"
    return f"{noun} [default: {default}]."


def accepts(
    config: Callable[P, C], renamed: Mapping[str, tuple[str, Mapping[Any, Any]]] | None = None
) -> Callable[[Callable[[S, C], None]], Callable[Concatenate[S, P], None]]:
    """Let a method that takes one `config` be called with the arguments that make one.

    `renamed` has the arguments of the release before: old name -> new name, and old value -> new value.
    """

    def decorate(method: Callable[[S, C], None]) -> Callable[Concatenate[S, P], None]:
        @wraps(method)
        def with_arguments(self: S, /, *arguments: P.args, **named: P.kwargs) -> None:
            for name in named:
                if name not in signature.parameters and name not in (renamed or {}):
                    alike = get_close_matches(name, signature.parameters, 1)
                    hint = f"; did you mean {alike[0]!r}?" if alike else ""
                    called = type(self).__name__
                    raise TypeError(f"{called}() got an unexpected keyword argument {name!r}{hint}")
            method(self, config(*arguments, **with_new_names(named, renamed or {})))

        signature = inspect.signature(config)
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        parameters = [own, *signature.parameters.values()]
        with_arguments.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return with_arguments

    return decorate


def with_new_names(named: Mapping[str, Any], renamed: Mapping[str, tuple[str, Mapping[Any, Any]]]) -> dict[str, Any]:
    """`named` with the old names of `renamed` replaced, each with a `DeprecationWarning`."""
    found = dict(named)
    for old, (new, values) in renamed.items():
        if old in found:
            value = values.get(found.pop(old))
            warnings.warn(f"{old} is now {new}={value!r}", DeprecationWarning, stacklevel=4)
            found.setdefault(new, value)
    return found
