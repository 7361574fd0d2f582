"""The sequences that wait for their turn, those that have just come and those that were sent back alike."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from d3engine.request.sequence import Sequence


class WaitingQueue:
    """A priority queue by `Sequence.order`; its length is how many wait, and iterating goes in no order."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Sequence]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for _, sequence in self._heap)

    @property
    def first(self) -> Sequence:
        """Whose turn it is next; somebody must be waiting."""
        return self._heap[0][1]

    def push(self, sequence: Sequence) -> None:
        heapq.heappush(self._heap, (sequence.order, sequence))

    def pop(self) -> Sequence:
        """Take out `first`."""
        return heapq.heappop(self._heap)[1]

    def remove(self, leaves: Callable[[Sequence], bool]) -> list[Sequence]:
        """Take out all sequences for which `leaves` is true, and return them."""
        found = [sequence for sequence in self if leaves(sequence)]
        if found:
            self._heap = [item for item in self._heap if not leaves(item[1])]
            heapq.heapify(self._heap)
        return found
