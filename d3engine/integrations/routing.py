"""Which of several replicas a request goes to: what is known is the time, how its prompt begins, and who is how busy.

The one idea: the rules that `python -m benchmarks.cluster` simulates are the ones that Ray's router asks. All but the
first leave a replica alone that already has far more to do than the others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

PREFIX_BYTES = 256
"""Of a prompt, by which it is told whether others begin alike."""

_SEARCHED_BYTES = 65536
_PROMPTS = [re.compile(rb'"(?:%s)"\s*:\s*' % names) for names in (b"system|instructions", b"prompt|messages|input")]
"""The fields that a prompt begins with, where they stand in a body. No text in JSON can look like one of them."""

Busy = Mapping[str, int]
"""The name of each replica, of which there is one at least -> the requests that it has been given and not finished."""


class Routing(Protocol):
    """Chooses a replica for each request, in order of arrival."""

    def choose(self, now: float, prefix: bytes, busy: Busy) -> str:
        """The replica for a request that arrives at `now` (seconds) and begins with these bytes."""


@dataclass
class RoundRobin:
    """One after the other."""

    _next: int = 0

    def choose(self, now: float, prefix: bytes, busy: Busy) -> str:
        chosen = sorted(busy)[self._next % len(busy)]
        self._next += 1
        return chosen


class LeastLoaded:
    """The one with the fewest requests; of equal ones the first."""

    def choose(self, now: float, prefix: bytes, busy: Busy) -> str:
        return least_loaded(busy)


@dataclass
class ByPrefix:
    """Each prefix has a home, whose cache then holds it; a home with `bound` times the average sends others away.

    Where replicas come or go, only the prefixes of those that have gone, and a fair share for each that has come, move
    (highest random weight: Thaler and Ravishankar, "A Name-Based Mapping Scheme for Rendezvous", 1996).
    """

    bound: float = 1.25

    def choose(self, now: float, prefix: bytes, busy: Busy) -> str:
        home = max(busy, key=lambda name: blake2b(prefix, key=blake2b(name.encode()).digest(), digest_size=8).digest())
        return least_loaded(busy) if is_overloaded(busy, home, self.bound) else home


@dataclass
class ByCohort:
    """All that arrive within `window` seconds go to one replica, so that its answers are of one age and the other
    replicas, to which nobody young comes, stay shallow. The next window's is the least loaded one."""

    window: float
    bound: float = 1.25
    _current: str = ""
    _until: float = float("-inf")

    def choose(self, now: float, prefix: bytes, busy: Busy) -> str:
        is_over = now >= self._until or self._current not in busy
        if is_over or is_overloaded(busy, self._current, self.bound):
            self._current = least_loaded(busy)
            self._until = now + self.window
        return self._current


def least_loaded(busy: Busy) -> str:
    """The first of those with the fewest requests."""
    return min(busy, key=lambda name: busy[name])


def is_overloaded(busy: Busy, name: str, bound: float) -> bool:
    """Whether a replica would have more than `bound` times the average, the new request counted, and one to spare."""
    total = sum(busy.values()) + 1
    return (busy[name] + 1) * len(busy) > bound * total + len(busy)


def beginning(body: bytes) -> bytes:
    """How the prompt of a request begins, as it stands in its JSON; of one without a prompt, how its body begins.

    What is said to the model before all else counts, wherever it stands. The body is not read as JSON, so a prompt that
    is written in two ways has two beginnings.
    """
    for prompt in _PROMPTS:
        if found := prompt.search(body, 0, _SEARCHED_BYTES):
            return body[found.end() : found.end() + PREFIX_BYTES]
    return body[:PREFIX_BYTES]


ROUTINGS: dict[str, Callable[[float], Routing]] = {
    "round robin": lambda window: RoundRobin(),
    "least loaded": lambda window: LeastLoaded(),
    "by prefix": lambda window: ByPrefix(),
    "by depth cohort": lambda window: ByCohort(window),
}
"""Name -> a new routing, given the seconds of a cohort's window."""
