"""A pulse that one process writes and another reads, whatever either is doing: eight bytes of a file in memory."""

from __future__ import annotations

import mmap
import struct
import time
from pathlib import Path

_FORM = struct.Struct("=d")


class SharedHeartbeatClock:
    """When a loop last began to wait or to step, in seconds of `time.monotonic()`, which all processes share."""

    def __init__(self, path: Path) -> None:
        """Open the pulse at `path`, or begin it there."""
        if not path.exists():
            path.write_bytes(_FORM.pack(time.monotonic()))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _FORM.size)

    @property
    def last_turn(self) -> float:
        seconds: float = _FORM.unpack_from(self._memory)[0]
        return seconds

    @last_turn.setter
    def last_turn(self, seconds: float) -> None:
        _FORM.pack_into(self._memory, 0, seconds)
