"""Engines for many callers, and a gate before their steps: what happens between two steps is the test's to say."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from d3engine import AsyncEngine, Engine

HANG_SECONDS = 120.0
"""Against tests that hang: no test is judged by it."""


class Gate:
    """Stands before each step of an engine: lets steps through, holds them, or makes them fail."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.fault: BaseException | None = None
        self._open = threading.Event()
        self._open.set()
        self._reached = threading.Event()
        self._num_free = 0

    def __call__(self) -> None:
        if not self._open.is_set():
            if self._num_free == 0:
                self._reached.set()
                assert self._open.wait(HANG_SECONDS)
            self._num_free -= 1
        self.num_steps += 1
        if self.fault is not None:
            raise self.fault

    def shut(self, after: int = 0) -> None:
        """Hold the engine when it has made `after` steps more."""
        self._reached.clear()
        self._num_free = after
        self._open.clear()

    def wait_until_held(self) -> None:
        """Return when the engine stands before the gate."""
        assert self._reached.wait(HANG_SECONDS)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open()


@pytest.fixture
def make_async(make_engine: Callable[..., Engine], gate: Gate) -> Iterator[Callable[..., AsyncEngine]]:
    """`make_async(**arguments)`: as `make_engine`, with the gate before its steps."""
    made = []

    def make(**arguments: Any) -> AsyncEngine:
        made.append(AsyncEngine.from_engine(make_engine(**arguments), before_step=gate))
        return made[-1]

    yield make
    gate.open()
    for engine in made:
        engine._end()
