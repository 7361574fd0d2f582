"""Fair order of sequences: API keys take turns, and within a key its requests do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as AnySequence

from d3engine.request.sequence import Flow, Sequence


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
