"""How much processor time the masks of expensive grammars may take from the other sequences of an engine."""

from __future__ import annotations

import time

FREE_SECONDS = 0.001
"""Of processor time for a mask or a move over one token; ordinary grammars take a tenth of it."""
BURST_SECONDS = 0.25
SHARE = 0.25
"""Of an engine's time that expensive masks may take in the long run."""


class MaskTime:
    """The time that all expensive masks of one engine share: a token bucket that fills with the wall clock."""

    def __init__(self) -> None:
        self._left = BURST_SECONDS
        self._filled = self.now()

    def is_spent(self) -> bool:
        """Whether no expensive mask may be computed now."""
        now = self.now()
        self._left = min(BURST_SECONDS, self._left + SHARE * (now - self._filled))
        self._filled = now
        return self._left <= 0

    def spend(self, seconds: float) -> None:
        """Take what a mask has used beyond its free time."""
        self._left -= seconds

    now = staticmethod(time.monotonic)
    used = staticmethod(time.thread_time)
    """Processor time of the calling thread, which is the one that computes its masks."""
