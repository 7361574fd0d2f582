"""The straight way of a stream: what is new goes from the engine's outputs to the socket without waking any task.

The one idea: tasks are for what begins, ends, fails or must wait. Between a stream's first event and its last, as long
as its client reads, there is nothing to wait for: the event loop's call that hears of a step writes what it brought to
all of its streams.
"""

from __future__ import annotations

from typing import Protocol


class DirectWriter(Protocol):
    """What a connection offers for an answer in pieces (`scope["state"]["outlet"]`); servers of others offer none."""

    @property
    def is_free(self) -> bool:
        """Whether what is written now goes on its way."""

    def write(self, content: bytes) -> None:
        """Write a piece that is not empty, while it is free."""


class DirectStream:
    """Of one stream. `outlet` is None until its task opens it, when the first event is out."""

    def __init__(self) -> None:
        self.outlet: DirectWriter | None = None
        self.num_writes = 0

    def write(self, content: bytes) -> None:
        """Send whole events, while the outlet is free."""
        assert self.outlet is not None
        self.num_writes += 1
        self.outlet.write(content)
