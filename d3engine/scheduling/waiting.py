"""The sequences that wait for their turn, those that have just come and those that were preempted alike."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as AnySequence
from typing import TypeAlias

from d3engine.request.engine_request import Flow
from d3engine.scheduling.sequence import Sequence


def in_turn(sequences: Iterable[Sequence]) -> list[Sequence]:
    """Sort sequences by `priority`, then fairly: the n-th of each flow before the (n + 1)-th of any, else by arrival.

    Sequences that are all of one flow, or each of a flow of its own, are in order of arrival.
    """
    found = sorted(sequences, key=lambda sequence: sequence.order)
    for level in (1, 0):  # the requests of each key take turns first, then the keys
        counted: Counter[str | Flow] = Counter()
        ranked = []
        for place, sequence in enumerate(found):
            name = _name(sequence, level)
            ranked.append((sequence.priority, counted[name], place))
            counted[name] += 1
        found = [found[place] for *_, place in sorted(ranked)]
    return found


def _name(sequence: Sequence, level: int) -> str | Flow:
    return sequence.flow if level else sequence.flow[0]


def giving_way(running: AnySequence[Sequence], waiting: Sequence) -> list[Sequence]:
    """The running sequences that may be preempted for one that waits, the last of them first.

    None are where its own flow runs already. They come after it in turn, and their flow, or their key where that is
    another, has a sequence before them: nothing that runs alone gives way.
    """
    flows, keys = (Counter(_name(sequence, level) for sequence in running) for level in (1, 0))
    own_key = waiting.flow[0]
    if flows[waiting.flow] or len(flows) == len(running) in (len(keys), keys[own_key]):
        return []
    order = in_turn([*running, waiting])
    found, seen, is_behind = list[Sequence](), set[str | Flow](), False
    for sequence in order:
        has_other = sequence.flow in seen or (sequence.flow[0] != own_key and sequence.flow[0] in seen)
        if is_behind and has_other:
            found.append(sequence)
        is_behind = is_behind or sequence is waiting
        seen |= {sequence.flow, sequence.flow[0]}
    return found[::-1]


_Rank: TypeAlias = tuple[int, int, int]
"""Of a flow's first sequence: its priority, how many sequences of the flow run, its arrival."""


class WaitingQueue:
    """A fair queue: among equal priorities the flow comes first that has the fewest sequences running.

    Its length is how many wait, and iterating goes in no order. `entered` and `left` tell it who runs.
    """

    def __init__(self) -> None:
        self._keys: dict[str, _KeyQueue] = {}
        self._running_of_keys: Counter[str] = Counter()

    def __len__(self) -> int:
        return sum(map(len, self._keys.values()))

    def __bool__(self) -> bool:
        return any(map(len, self._keys.values()))

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for queue in self._keys.values() for sequence in queue)

    @property
    def first(self) -> Sequence:
        """The sequence that comes next; at least one must be waiting."""
        waiting = [(queue, self._running_of_keys[key]) for key, queue in self._keys.items() if len(queue)]
        if len(waiting) == 1:
            return waiting[0][0].first
        ranked = ((queue.first, num_running, queue.rank_of_first) for queue, num_running in waiting)
        return min(ranked, key=lambda found: (found[0].priority, found[1], found[2]))[0]

    def push(self, sequence: Sequence) -> None:
        self._queue(sequence).push(sequence)

    def pop(self) -> Sequence:
        """Take out `first`."""
        sequence = self.first
        self._queue(sequence).pop()
        self._forget_idle(sequence)
        return sequence

    def remove(self, leaves: Callable[[Sequence], bool]) -> list[Sequence]:
        """Take out all sequences for which `leaves` is true, and return them."""
        found = [sequence for sequence in self if leaves(sequence)]
        if found:
            for queue in self._keys.values():
                queue.remove(leaves)
            for sequence in found:
                self._forget_idle(sequence)
        return found

    def entered(self, sequence: Sequence) -> None:
        """Count a sequence as running."""
        self._running_of_keys[sequence.flow[0]] += 1
        self._queue(sequence).count(sequence.flow, 1)

    def left(self, sequence: Sequence) -> None:
        """Count a sequence as running no more."""
        self._running_of_keys[sequence.flow[0]] -= 1
        self._queue(sequence).count(sequence.flow, -1)
        self._forget_idle(sequence)

    def is_running(self, flow: Flow) -> bool:
        """Whether a sequence of a flow runs."""
        queue = self._keys.get(flow[0])
        return queue is not None and queue.is_running(flow)

    def _queue(self, sequence: Sequence) -> _KeyQueue:
        key = sequence.flow[0]
        if key not in self._keys:
            self._keys[key] = _KeyQueue()
        return self._keys[key]

    def _forget_idle(self, sequence: Sequence) -> None:
        key = sequence.flow[0]
        if key in self._keys and not len(self._keys[key]) and not self._running_of_keys[key]:
            del self._keys[key], self._running_of_keys[key]


class _KeyQueue:
    """The waiting sequences of one API key, by request; `_ranked` may hold outdated ranks, which are passed over."""

    def __init__(self) -> None:
        self._flows: dict[Flow, list[tuple[tuple[int, int], Sequence]]] = {}
        self._running: Counter[Flow] = Counter()
        self._ranked: list[tuple[_Rank, Flow]] = []
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for heap in self._flows.values() for _, sequence in heap)

    @property
    def rank_of_first(self) -> _Rank:
        while True:
            rank, flow = self._ranked[0]
            if flow in self._flows and rank == self._rank(flow):
                return rank
            heapq.heappop(self._ranked)

    @property
    def first(self) -> Sequence:
        _ = self.rank_of_first
        return self._flows[self._ranked[0][1]][0][1]

    def push(self, sequence: Sequence) -> None:
        heapq.heappush(self._flows.setdefault(sequence.flow, []), (sequence.order, sequence))
        self._num_waiting += 1
        self._rerank(sequence.flow)

    def pop(self) -> None:
        """Take out `first`."""
        flow = self.first.flow
        heapq.heappop(self._flows[flow])
        self._num_waiting -= 1
        self._rerank(flow)

    def remove(self, leaves: Callable[[Sequence], bool]) -> None:
        """Take out all sequences for which `leaves` is true."""
        kept = [sequence for sequence in self if not leaves(sequence)]
        self._flows, self._ranked, self._num_waiting = {}, [], 0
        for sequence in kept:
            self.push(sequence)

    def is_running(self, flow: Flow) -> bool:
        """Whether a sequence of a flow runs."""
        return flow in self._running

    def count(self, flow: Flow, change: int) -> None:
        """`change` more sequences of a flow run."""
        self._running[flow] += change
        if not self._running[flow]:
            del self._running[flow]
        self._rerank(flow)

    def _rank(self, flow: Flow) -> _Rank:
        priority, arrival = self._flows[flow][0][0]
        return priority, self._running[flow], arrival

    def _rerank(self, flow: Flow) -> None:
        if flow not in self._flows:
            return
        if not self._flows[flow]:
            del self._flows[flow]
            return
        heapq.heappush(self._ranked, (self._rank(flow), flow))
        if len(self._ranked) > 64 + 4 * len(self._flows):
            self._ranked = [(self._rank(one), one) for one in self._flows]
            heapq.heapify(self._ranked)
