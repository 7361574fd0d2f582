"""Tables of refusals: each value that a field cannot have, beside the field that the refusal must name."""

from typing import Any


def bad_values(**fields: list[Any]) -> list[tuple[dict[str, Any], str]]:
    """`bad_values(n=[0, 65], seed=[2**63])`: one case a value, as the fields that ask for it and the field's name."""
    return [({name: value}, name) for name, values in fields.items() for value in values]
