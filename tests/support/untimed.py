"""What two answers of one request have in common: all but how long each took."""

from typing import Any


def untimed(summary: dict[str, Any]) -> dict[str, Any]:
    """A request's `d3ext` without its time, which it must have."""
    rest = dict(summary)
    rest.pop("decode_seconds")
    return rest
