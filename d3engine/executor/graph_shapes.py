"""What graphs are captured for: their sizes, and those that an engine's own policy will ask for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np

from d3engine.depth import NEVER
from d3engine.depth.schedule import Schedule, windows_of
from d3engine.plan import BoolArray, MultiStep
from d3engine.request.choice import SamplingMode


class Crossed(NamedTuple):
    """A window that rows of a graph may cross, by the bridges of this name; in order of the layers."""

    first: int
    stop: int
    bridges: str


@dataclass(frozen=True, slots=True)
class GraphShape:
    """A graph's rows, its layers, how it chooses its tokens, and the windows that its rows may cross."""

    rows: int
    layers: tuple[int, ...]
    choice: SamplingMode
    crossed: tuple[Crossed, ...] = ()


def crossed_at(multi_step: MultiStep, taken: int) -> tuple[Crossed, ...]:
    """The windows that a graph must hold for a step of a run.

    Where all rows leave out the same ones it is these. Otherwise all that they come to from here on: mixtures of ages
    are many, and what nobody crosses costs little.
    """
    if not multi_step.bridges:
        return ()
    now: set[tuple[Crossed, ...]] = {()} if None in multi_step.bridges else set()
    later: set[Crossed] = set()
    for name in {name for name in multi_step.bridges if name is not None}:
        own = np.array([one == name for one in multi_step.bridges])
        for row in np.unique(np.column_stack((multi_step.steps[own] + taken, multi_step.cutoffs[own])), axis=0):
            step, cutoffs = row[0], row[1:]
            now.add(_crossed(cutoffs > step, name))
            least = int(multi_step.steps.min()) + taken
            for change in {least, *(int(end) for end in cutoffs if least < end < NEVER)}:
                later.update(_crossed(cutoffs > change, name))
    return now.pop() if len(now) == 1 else tuple(sorted(later))


def _crossed(active: BoolArray, name: str) -> tuple[Crossed, ...]:
    return tuple(Crossed(first, stop, name) for first, stop in windows_of(active))


def expected_shapes(schedule: Schedule, sizes: list[int], max_model_len: int) -> Iterator[GraphShape]:
    """The shapes that answers of this schedule need: the largest first, then from few rows to many.

    Penalties are rare, and need memory of their own: their graphs are captured when somebody asks for them.
    """
    if not schedule.is_nested or schedule.on_skip != "none":
        return  # what fills the layers that it skips runs no graph
    ends = {int(end) for end in schedule.cutoffs if end < min(max_model_len, NEVER)}
    steps = sorted({1, *ends} - {0})  # step 0 is the prompt's
    name = schedule.bridges
    found = {}
    for active in (schedule.cutoffs > step for step in steps):
        found[tuple(active.nonzero()[0].tolist())] = () if name is None else _crossed(active, name)
    deepest, beside = next(iter(found.items()))
    yield GraphShape(sizes[-1], deepest, SamplingMode.CUT, beside)
    for size, choice, (those, crossed) in product(
        sizes, (SamplingMode.GREEDY, SamplingMode.CUT, SamplingMode.DRAW), found.items()
    ):
        yield GraphShape(size, those, choice, crossed)


def batch_sizes(most: int) -> list[int]:
    """Rows that graphs are captured for: few sizes, each at most twice what is needed, and the last at least `most`.

    1, 2, 4, then multiples of 8 to 64, then of 32: beyond that, products go to the matrix library, whose tiles are
    large.
    """
    sizes = [1, 2, 4, *range(8, 65, 8)]
    while sizes[-1] < most:
        sizes.append(sizes[-1] + 32)
    return sizes[: next(place for place, size in enumerate(sizes) if size >= most) + 1]
