"""What one perturbed step costs an answer: the D3 paper's Figure 2a and section 3.2.

The one idea: at a single generation step the last k layers are copied, which means that the hidden state passes them
unchanged; every step after it is whole again. What those layers hold of that token is then either copied from the layer
below or recomputed from the state that passed, and later tokens read it. Both are tables that the engine runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from d3engine.analysis.copying import Copying, Outcome
from d3engine.analysis.report import Table, counted
from d3engine.depth import DepthPolicy, FullDepth, Schedule
from d3engine.depth.schedule import OnSkip
from d3engine.errors import require, require_integer

ENTRIES: dict[str, OnSkip] = {"copied": "copy", "recomputed": "project"}
"""What the layers left out hold of the token, in the paper's words, and the engine's name for it."""


@dataclass(frozen=True)
class OneStepCopied(DepthPolicy):
    """Full depth, but for step `at_step`, which leaves out the last `layers` layers. 0 layers: full depth."""

    layers: int
    at_step: int
    entries: str = "copied"

    name: ClassVar[str] = "one-step-copied"

    def __post_init__(self) -> None:
        require_integer("layers", self.layers, 0)
        require_integer("at_step", self.at_step, 1)
        require(self.entries in ENTRIES, "entries", self.entries, f"one of {', '.join(ENTRIES)}")

    def schedule(self, num_layers: int) -> Schedule:
        """The schedule; raises `InvalidValueError` where fewer than one layer would be left."""
        require_integer("layers", self.layers, 0, num_layers - 1)
        table = np.ones((self.at_step + 2, num_layers), dtype=bool)
        table[self.at_step, num_layers - self.layers :] = False
        return Schedule.from_table(table, ENTRIES[self.entries])


@dataclass(frozen=True)
class Perturbing:
    """The same grid of layers and steps for both kinds of entries, by name (`ENTRIES`)."""

    grids: dict[str, Copying]

    def table(self) -> Table:
        """A row for full depth, then one for each number of layers and each step."""
        one = next(iter(self.grids.values()))
        columns = [column for entries in self.grids for column in (f"right, {entries}", "95 % interval")]
        header = ("layers copied", "at step", *columns, "answers that reach the step")
        rows = [("0 (full depth)", "-", *_cells(one.full) * len(self.grids), "-")]
        for nth, layers in enumerate(one.layers):
            for place, step in enumerate(one.steps):
                cells = [cell for grid in self.grids.values() for cell in _cells(grid.outcomes[nth][place])]
                rows.append((f"{layers}", f"{step}", *cells, f"{one.reaching(step)}"))
        most = counted(one.max_tokens, "token")
        title = f"One step perturbed: {one.measure}, {counted(len(one.lengths), 'answer')} of at most {most}"
        return Table(title, header, rows, one.notes)

    def as_dict(self) -> dict[str, Any]:
        """Each grid under its name; shares are from 0 to 1."""
        return {"entries": {name: grid.as_dict() for name, grid in self.grids.items()}}


def _cells(outcome: Outcome) -> tuple[str, str]:
    return f"{outcome.share:.1%}", f"{outcome.interval.low:.1%} to {outcome.interval.high:.1%}"


def measure_perturbing(
    outcome: Callable[[DepthPolicy], Outcome],
    measure: str,
    max_tokens: int,
    lengths: Sequence[int],
    layers: Sequence[int],
    steps: Sequence[int],
    progress: Callable[[], None] = lambda: None,
) -> Perturbing:
    """Ask for the `outcome` of every pair of layers and steps, with copied and with recomputed entries, and once of
    full depth; `progress` hears of each."""

    def ask(policy: DepthPolicy) -> Outcome:
        found = outcome(policy)
        progress()
        return found

    full = ask(FullDepth())
    grids = {}
    for entries in ENTRIES:
        outcomes = [[ask(OneStepCopied(count, step, entries)) for step in steps] for count in layers]
        grids[entries] = Copying(measure, max_tokens, tuple(lengths), tuple(layers), tuple(steps), outcomes, full)
    return Perturbing(grids)
