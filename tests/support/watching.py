"""What tests see of the calls of a function that goes on doing its work."""

from collections.abc import Callable
from typing import Any

import pytest


def watch(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, note: Callable[..., Any]) -> list[Any]:
    """What `note` makes of the arguments of each call of `owner.name` from now on."""
    seen: list[Any] = []
    itself = getattr(owner, name)

    def watched(*arguments: Any, **named: Any) -> Any:
        seen.append(note(*arguments, **named))
        return itself(*arguments, **named)

    monkeypatch.setattr(owner, name, watched)
    return seen
