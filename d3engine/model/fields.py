"""Typed, bounded access to the values of a model's JSON files; errors name the field."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from d3engine.errors import ModelFormatError, must_be
from d3engine.utils.files import UnreadableFileError, as_json, read_bytes

_MAX_SIZE = 2**31 - 1
"""Limit of every integer: far above any real model, low enough for shapes built from it to be harmless."""


@contextmanager
def of_a_model() -> Iterator[None]:
    """Raise `ModelFormatError` in place of an `UnreadableFileError`: the file is one of a model."""
    try:
        yield
    except UnreadableFileError as error:
        raise ModelFormatError(str(error)) from None


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; raise `ModelFormatError` naming a file that cannot be read."""
    with of_a_model():
        content = read_bytes(path)
    return json_object(content, path)


def json_object(content: bytes, path: Path) -> dict[str, Any]:
    """As `read_json_object`, of the bytes of a file that errors call `path`."""
    with of_a_model():
        parsed = as_json(content, path)
    if not isinstance(parsed, dict):
        raise ModelFormatError(f"{path} must hold a JSON object, not a {type(parsed).__name__}")
    return parsed


@dataclass(frozen=True)
class Fields:
    """Typed, bounded access to the values of one JSON object; null counts as absent, as in transformers."""

    values: Mapping[str, Any]
    source: str  # how errors call the object: "config.json", "config.json: rope_scaling"

    def get(self, name: str) -> Any:
        return self.values.get(name)

    def refuse(self, name: str, allowed: str) -> NoReturn:
        """Raise `ModelFormatError` with the source, the field, its value and what is allowed."""
        raise ModelFormatError(must_be(f"{self.source}: {name}", self.values.get(name), allowed))

    def _required(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is not None:
            return value
        if default is None:
            raise ModelFormatError(f"{self.source}: {name} is missing")
        return default

    def integer(self, name: str, *, low: int = 1, high: int = _MAX_SIZE, default: int | None = None) -> int:
        """Return the integer of a field, `low` <= it <= `high`; without a default the field must be there."""
        value = self._required(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            self.refuse(name, f"an integer from {low} to {high}")
        return value

    def number(self, name: str, *, default: float | None = None, zero_allowed: bool = False) -> float:
        value = self._required(name, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        # Compared before any conversion: an int of a thousand digits has no float.
        if not is_number or not 0 <= value <= 1e300 or (value == 0 and not zero_allowed):
            self.refuse(name, "a finite number of at least 0" if zero_allowed else "a finite number above 0")
        return float(value)

    def optional_number(self, name: str, *, zero_allowed: bool = False) -> float | None:
        return None if self.get(name) is None else self.number(name, zero_allowed=zero_allowed)

    def optional_integer(self, name: str, *, low: int = 1) -> int | None:
        return None if self.get(name) is None else self.integer(name, low=low)

    def boolean(self, name: str, *, default: bool = False) -> bool:
        value = self._required(name, default)
        if not isinstance(value, bool):
            self.refuse(name, "true or false")
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One id or a list of ids, as `eos_token_id` may be either; null is none."""
        value = self.get(name)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id <= _MAX_SIZE:
                self.refuse(name, "a token id, or a list of token ids, each an integer of at least 0")
        return tuple(ids)
