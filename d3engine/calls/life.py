"""Whether the engine still lives: open until it is closed, and sound until a fault of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from d3engine.errors import EngineClosedError, EngineDeadError


class EngineState:
    """Of one engine. A fault in the core may have left any state behind, so it ends the engine for every caller."""

    def __init__(self) -> None:
        self._fault: BaseException | None = None
        self._closed = False

    @property
    def is_sound(self) -> bool:
        """Whether no fault has left the core in a state of its own."""
        return self._fault is None

    def check_open(self) -> None:
        """Raises `EngineClosedError` once the engine is closed."""
        if self._closed:
            raise EngineClosedError("the engine is closed")

    def check(self) -> None:
        """Raises `EngineClosedError` once the engine is closed, `EngineDeadError` once a fault has ended it."""
        self.check_open()
        if self._fault is not None:
            raise EngineDeadError(f"the engine has ended: {self._fault!r}") from self._fault

    @contextmanager
    def ended_by_faults(self) -> Iterator[None]:
        """What is done in here ends the engine, loudly, by whatever it raises."""
        self.check()
        try:
            yield
        except BaseException as fault:
            self._fault = fault
            if isinstance(fault, Exception):
                raise EngineDeadError(f"the engine has ended: {fault!r}") from fault
            raise  # an interrupt keeps its own name

    def close(self) -> bool:
        """Close the engine; returns whether it was open."""
        was_open, self._closed = not self._closed, True
        self._fault = None  # a fault's traceback holds on to what it passed through
        return was_open
