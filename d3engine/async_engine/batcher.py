"""When replies leave an engine's loop: each hand-over wakes their readers, and a stream's reader writes to a socket.

The one idea: how often that happens follows from how much work it is. What begins or ends an answer goes at once, and
so does everything before a step that may take long; what comes in the middle of answers, while a device is at the next
step already, goes once in a quarter of a millisecond for each answer that has some, or once in a display's frame if
that is less. Each output remains one of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from d3engine.request.outputs import RequestOutput

Reply: TypeAlias = "tuple[int, Any]"
"""A key, and for it an output, what a method returned, or the exception that ended it."""

SECONDS_PER_ANSWER: Final = 0.25e-3
"""Several times as long as to wake a reader, to write to his socket and to wake his client takes."""
FRAME_SECONDS: Final = 1 / 60
"""Nobody sees text come more often."""


class OutputBatcher:
    """The replies of one loop that have not been handed over.

    Args:
        hand_over: gets replies, those of one key in order; must not raise.
        clock: tells seconds.
    """

    def __init__(self, hand_over: Callable[[list[Reply]], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._hand_over = hand_over
        self._clock = clock
        self._waiting: dict[int, list[Reply]] = {}
        self._urgent: set[int] = set()
        self._last = clock()

    def put(self, key: int, reply: Any) -> None:
        """Take in a reply, to be sent."""
        self._waiting.setdefault(key, []).append((key, reply))
        if not isinstance(reply, RequestOutput) or _begins_or_ends(reply):
            self._urgent.add(key)

    def send(self, *, more_is_soon: bool = False) -> None:
        """Hand over what is due: everything, unless the next step's outputs are to come soon."""
        if not self._waiting:
            return
        now = self._clock()
        if more_is_soon and now - self._last < min(FRAME_SECONDS, SECONDS_PER_ANSWER * len(self._waiting)):
            due = {key: self._waiting.pop(key) for key in self._urgent}
        else:
            due, self._waiting = self._waiting, {}
            self._last = now
        self._urgent.clear()
        if due:
            self._hand_over([reply for replies in due.values() for reply in replies])


def _begins_or_ends(output: RequestOutput) -> bool:
    """Whether this has an end, or what came when the request's first token did."""
    times = output.metrics
    if output.finished or times.last_token_time == times.first_token_time:
        return True
    return any(answer.finish_reason is not None for answer in output.outputs)
