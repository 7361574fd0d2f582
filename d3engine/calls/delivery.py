"""Outputs on their way to who asked for them: whoever steps the engine computes for all callers."""

from __future__ import annotations

from collections.abc import Iterable

from d3engine.request.outputs import RequestOutput


class OutputQueue:
    """Outputs that have not been handed out, in their order.

    Those of a claimed request (of `generate` or `stream`) wait for its owner; all others are for `step()`.
    """

    def __init__(self) -> None:
        self._for_step: list[RequestOutput] = []
        self._claimed: dict[str, list[RequestOutput]] = {}

    def __len__(self) -> int:
        """How many wait for `step()`."""
        return len(self._for_step)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._claimed or any(output.request_id == request_id for output in self._for_step)

    def claim(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """The list in which from now on the outputs of these requests wait, for its owner to take them out."""
        waiting: list[RequestOutput] = []
        self._claimed |= dict.fromkeys(request_ids, waiting)
        return waiting

    def drop(self, request_ids: Iterable[str]) -> None:
        """Nobody waits for the outputs of these claimed requests any more."""
        for request_id in request_ids:
            self._claimed.pop(request_id, None)

    def put(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            self._claimed.get(output.request_id, self._for_step).append(output)

    def take(self) -> list[RequestOutput]:
        """Hand out what waits for `step()`."""
        taken, self._for_step = self._for_step, []
        return taken
