"""Refusals by field: tables of values that a field cannot have, and what must refuse them by its name."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from d3engine.errors import InvalidValueError


def bad_values(**fields: list[Any]) -> list[tuple[dict[str, Any], str]]:
    """`bad_values(n=[0, 65], seed=[2**63])`: one case a value, as the fields that ask for it and the field's name."""
    return [({name: value}, name) for name, values in fields.items() for value in values]


@contextmanager
def assert_refused(field: str, words: str | None = None) -> Iterator[pytest.ExceptionInfo[InvalidValueError]]:
    """What is done meanwhile must be refused for its `field`, in these words."""
    with pytest.raises(InvalidValueError, match=words) as caught:
        yield caught
    assert caught.value.field == field
