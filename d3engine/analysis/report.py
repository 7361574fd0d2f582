"""What every analysis returns: a table for people, a dict for machines; and how generated positions are grouped.

The one idea: positions are grouped by doubling (0, 1, 2-3, 4-7, ...), because what changes along an answer changes
fast at its beginning and slowly later, and because later positions have fewer answers that reach them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Table:
    """A title, the header, and rows of cells."""

    title: str
    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


class Analysis(Protocol):
    """The result of one analysis."""

    def table(self) -> Table: ...

    def as_dict(self) -> dict[str, Any]: ...


def position_groups(longest: int) -> list[range]:
    """Ranges of generated positions that cover [0, longest): 0, 1, 2-3, 4-7 and so on."""
    groups, start, size = [], 0, 1
    while start < longest:
        groups.append(range(start, min(start + size, longest)))
        start += size
        size = max(start, 1)
    return groups


def positions_in_words(group: range) -> str:
    """ "0", or "4-7"."""
    return f"{group.start}" if len(group) == 1 else f"{group.start}-{group.stop - 1}"
