"""Every error that is raised on purpose; a message names the field, the value that was
given and what is allowed."""

from __future__ import annotations

import shlex
import sys
from numbers import Integral
from pathlib import Path
from typing import Any, Final

NOTHING: Final = object()
"""In place of a value that would say nothing: of a flag, or of what was not given."""


class D3EngineError(Exception):
    """Base of all errors that d3engine raises on purpose."""


class InvalidValueError(D3EngineError, ValueError):
    """A value from the outside that is not allowed: a sampling parameter, an engine argument, a prompt."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(must_be(field, value, allowed))
        self.field = field
        self.value = value
        self.allowed = allowed


def must_be(field: str, value: object, allowed: str) -> str:
    """What is wrong with a value, as a sentence; `allowed` goes on after "must be", what was given is cut to size."""
    field = cut(field)
    if value is NOTHING:
        return f"{field} must be {allowed}"
    return f"{field} must be {allowed}; got {shown(value)}"


def shown(value: object) -> str:
    """A value as an error shows it: cut to size, also one that Python does not write down."""
    try:
        return cut(repr(value), 200)
    except ValueError:  # an integer with more digits than Python converts, or something that holds one
        return f"{type(value).__name__} with more than {sys.get_int_max_str_digits():,} digits"


def cut(text: str, most: int = 300) -> str:
    """A text cut to size, such as what a compiler says, which may quote all that it was given."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


class ModelFormatError(D3EngineError, ValueError):
    """A model directory that cannot be loaded as it is; the message names the file and the tensor or field."""


class TokenizerError(D3EngineError, RuntimeError):
    """The tokenizer's own library failed on a text or on token ids: a fault of its file, or of this one text."""


class EngineDeadError(D3EngineError, RuntimeError):
    """The engine met a fault of its own and has ended; every later call raises this, with the fault as its cause."""


class EngineClosedError(D3EngineError, RuntimeError):
    """The engine is closed, or takes no more requests because it soon will be."""


class EngineBusyError(D3EngineError, RuntimeError):
    """A call came while another was running; nothing was done, and the running one goes on."""


class FailedError(D3EngineError, RuntimeError):
    """Something that was allowed and failed on the way: a request's fault, a disk that is full."""


class MissingExtraError(D3EngineError, ImportError):
    """An optional package is not installed; the message names the extra that brings it."""

    def __init__(self, package: str, extra: str, what: str = "this") -> None:
        super().__init__(f"{what} needs the package {package!r}: {install_command(extra)}")


def install_command(extra: str) -> str:
    """What to type for an extra: there is no release under this name yet, so it comes from a checkout."""
    checkout = Path(__file__).resolve().parents[1]
    is_there = (checkout / "pyproject.toml").is_file()
    name = f"-e '{checkout}[{extra}]'" if is_there else f"'.[{extra}]' in a checkout of d3engine"
    return f"{shlex.quote(sys.executable)} -m pip install {name}"


def require(condition: bool, field: str, value: object, allowed: str) -> None:
    """Raise `InvalidValueError(field, value, allowed)` unless `condition` holds."""
    if not condition:
        raise InvalidValueError(field, value, allowed)


def require_name(field: str, name: object) -> None:
    """Raise `InvalidValueError` unless `name` can stand in lists and logs: 1 to 256 printable characters."""
    is_name = isinstance(name, str) and 0 < len(name) <= 256 and name.isprintable()
    require(is_name, field, name, "1 to 256 printable characters")


def integer_in(text: str) -> int | None:
    """The integer that ASCII digits write; None for other text, and for more than 18 digits, which nothing here has."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 18 else None


def require_integer(field: str, value: Any, low: int, high: int | None = None) -> int:
    """Return `value` if it is an int (never a bool) in [low, high]; raise `InvalidValueError` otherwise."""
    is_integer = type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))
    if not (is_integer and value >= low and (high is None or value <= high)):
        allowed = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
        raise InvalidValueError(field, value, allowed)
    return int(value)


def require_number(
    field: str, value: Any, low: float, high: float, *, open_low: bool = False, open_high: bool = False
) -> float:
    """Return `value` as a finite float within the bounds; raise `InvalidValueError` otherwise."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    above = is_number and (value > low if open_low else value >= low)
    if not (above and (value < high if open_high else value <= high)):
        allowed = f"a finite number in {'(' if open_low else '['}{low:g}, {high:g}{')' if open_high else ']'}"
        raise InvalidValueError(field, value, allowed)
    return float(value)
