"""What graphs are captured for: their sizes, and those that an engine's own policy will ask for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from d3engine.depth import NEVER
from d3engine.depth.schedule import Schedule
from d3engine.request.choice import Choice


@dataclass(frozen=True, slots=True)
class GraphShape:
    """A graph's rows, its layers, and how it chooses its tokens."""

    rows: int
    layers: tuple[int, ...]
    choice: Choice


def expected_shapes(schedule: Schedule, sizes: list[int], max_model_len: int) -> Iterator[GraphShape]:
    """The shapes that answers of this schedule need: the largest first, then from few rows to many.

    Penalties are rare, and need memory of their own: their graphs are captured when somebody asks for them.
    """
    if not schedule.is_nested or schedule.on_skip != "none" or schedule.bridges is not None:
        return  # what fills the layers that it skips runs no graph
    ends = {int(end) for end in schedule.cutoffs if end < min(max_model_len, NEVER)}
    steps = sorted({1, *ends} - {0})  # step 0 is the prompt's
    layers = list(dict.fromkeys(tuple((schedule.cutoffs > step).nonzero()[0].tolist()) for step in steps))
    yield GraphShape(sizes[-1], layers[0], Choice.CUT)
    for size, choice, those in product(sizes, (Choice.GREEDY, Choice.CUT, Choice.DRAW), layers):
        yield GraphShape(size, those, choice)


def batch_sizes(most: int) -> list[int]:
    """Rows that graphs are captured for: few sizes, each at most twice what is needed, and the last at least `most`.

    1, 2, 4, then multiples of 8 to 64, then of 32: beyond that, products go to the matrix library, whose tiles are
    large.
    """
    sizes = [1, 2, 4, *range(8, 65, 8)]
    while sizes[-1] < most:
        sizes.append(sizes[-1] + 32)
    return sizes[: next(place for place, size in enumerate(sizes) if size >= most) + 1]
