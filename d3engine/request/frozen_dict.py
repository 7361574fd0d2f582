"""A dict that cannot be changed: what a checked value holds must stay what was checked.

A `types.MappingProxyType` would not do: it can neither be pickled nor copied deeply.
"""

from __future__ import annotations

from typing import Any, Never, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class FrozenDict(dict[K, V]):
    """A dict made once; whatever would change it raises `TypeError`. It can be hashed where its values can."""

    def _refuse(self, *arguments: Any, **named: Any) -> Never:
        raise TypeError("this mapping cannot be changed: make a new one")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[type[FrozenDict[K, V]], tuple[dict[K, V]]]:
        return type(self), (dict(self),)
