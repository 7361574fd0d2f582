"""Which replica a request goes to: what a router knows is the time, the request's prefix and how busy each replica is.

Every rule but the first leaves a replica alone that already has far more to do than the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol


class Busy(Protocol):
    """A replica as a router sees it."""

    @property
    def outstanding(self) -> int:
        """Requests that it has been given and not finished."""


class Router(Protocol):
    """Chooses a replica for each request, in order of arrival."""

    def choose(self, now: float, prefix: int, replicas: Sequence[Busy]) -> int:
        """The replica for a request that arrives at `now` (seconds) and begins with the prefix of this number."""


@dataclass
class RoundRobin:
    """One after the other."""

    _next: int = 0

    def choose(self, now: float, prefix: int, replicas: Sequence[Busy]) -> int:
        chosen = self._next % len(replicas)
        self._next += 1
        return chosen


class LeastLoaded:
    """The one with the fewest requests; of equal ones the first."""

    def choose(self, now: float, prefix: int, replicas: Sequence[Busy]) -> int:
        return least_loaded(replicas)


@dataclass
class ByPrefix:
    """Each prefix has a home, whose cache then holds it; a home with `bound` times the average sends others away."""

    bound: float = 1.25

    def choose(self, now: float, prefix: int, replicas: Sequence[Busy]) -> int:
        home = prefix % len(replicas)
        return least_loaded(replicas) if is_overloaded(replicas, home, self.bound) else home


@dataclass
class ByCohort:
    """All that arrive within `window` seconds go to one replica, so that its answers are of one age and the other
    replicas, to which nobody young comes, stay shallow. The next window's is the least loaded one."""

    window: float
    bound: float = 1.25
    _current: int = 0
    _until: float = field(default=float("-inf"))

    def choose(self, now: float, prefix: int, replicas: Sequence[Busy]) -> int:
        if now >= self._until or is_overloaded(replicas, self._current, self.bound):
            self._current = least_loaded(replicas)
            self._until = now + self.window
        return self._current


def least_loaded(replicas: Sequence[Busy]) -> int:
    """The first of those with the fewest requests."""
    return min(range(len(replicas)), key=lambda place: replicas[place].outstanding)


def is_overloaded(replicas: Sequence[Busy], place: int, bound: float) -> bool:
    """Whether a replica would have more than `bound` times the average, the new request counted."""
    total = sum(replica.outstanding for replica in replicas) + 1
    return (replicas[place].outstanding + 1) * len(replicas) > bound * total + len(replicas)


ROUTERS: dict[str, Callable[[float], Router]] = {
    "round robin": lambda window: RoundRobin(),
    "least loaded": lambda window: LeastLoaded(),
    "by prefix": lambda window: ByPrefix(),
    "by depth cohort": lambda window: ByCohort(window),
}
"""Name -> a new router, given the seconds of a cohort's window."""
