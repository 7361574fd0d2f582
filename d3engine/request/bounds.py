"""Bounds of numbers that a request may bring: written once, for whoever checks them and whoever describes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from d3engine.errors import require_integer, require_number


@dataclass(frozen=True)
class Integers:
    """Whole numbers from `low` to `high`; None: no bound."""

    low: int
    high: int | None = None

    def check(self, field: str, value: object) -> None:
        """Raise `InvalidValueError` for what is none of them."""
        require_integer(field, value, self.low, self.high)

    @property
    def schema(self) -> dict[str, Any]:
        """The same in JSON Schema's words."""
        return {"minimum": self.low} | ({} if self.high is None else {"maximum": self.high})


@dataclass(frozen=True)
class Numbers:
    """Finite numbers from `low`, or above it where it is open, to `high`."""

    low: float
    high: float
    open_low: bool = False

    def check(self, field: str, value: object) -> None:
        """Raise `InvalidValueError` for what is none of them."""
        require_number(field, value, self.low, self.high, open_low=self.open_low)

    @property
    def schema(self) -> dict[str, Any]:
        """The same in JSON Schema's words."""
        return {"exclusiveMinimum" if self.open_low else "minimum": self.low, "maximum": self.high}
