"""What every analysis returns: a table, a dict; and generation steps, from 0, grouped by
doubling, since answers change fast at first and fewer reach later steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

STEP = "step (from 0)"
"""The heading of a column of generation steps."""


@dataclass(frozen=True)
class Table:
    """A title, the header, rows of cells, and what has to be said below."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: tuple[str, ...] = ()


def step_groups(longest: int) -> list[range]:
    """Ranges of generation steps that cover [0, longest): 0, 1, 2-3, 4-7 and so on."""
    groups, start, size = [], 0, 1
    while start < longest:
        groups.append(range(start, min(start + size, longest)))
        start += size
        size = max(start, 1)
    return groups


def steps_in_words(group: range) -> str:
    """ "0", or "4-7"."""
    return f"{group.start}" if len(group) == 1 else f"{group.start}-{group.stop - 1}"


def counted(count: int, noun: str) -> str:
    """ "1 answer", or "2 answers"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
