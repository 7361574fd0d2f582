"""What is lost when the last layers are copied from some step on (the D3 paper's Figure 2a).

The one idea: "copy the tail k layers from step t on" is a nested schedule like any other, so the engine itself runs
it: the last k layers have the cutoff t, and the hidden state passes them unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from d3engine.analysis.report import Table
from d3engine.depth import NEVER, DepthPolicy, Schedule
from d3engine.errors import require_integer


@dataclass(frozen=True)
class TailCopied(DepthPolicy):
    """Full depth before step `from_step`; from there on the last `layers` layers are skipped. 0 layers: full depth."""

    layers: int
    from_step: int

    name: ClassVar[str] = "tail-copied"

    def __post_init__(self) -> None:
        require_integer("layers", self.layers, 0)
        require_integer("from_step", self.from_step, 1)

    def schedule(self, num_layers: int) -> Schedule:
        """The schedule; raises `InvalidValueError` for more layers than the model has."""
        require_integer("layers", self.layers, 0, num_layers)
        return Schedule.nested([NEVER] * (num_layers - self.layers) + [self.from_step] * self.layers)


@dataclass(frozen=True)
class Copying:
    """`scores[k][t]`: the share of right answers with the tail `layers[k]` copied from step `steps[t]` on.

    `measure` says what counts as right. `full` is the share at full depth.
    """

    measure: str
    answers: int
    layers: tuple[int, ...]
    steps: tuple[int, ...]
    scores: list[list[float]]
    full: float

    def table(self) -> Table:
        """A row for each number of layers, a column for each step."""
        header = ("layers copied", *(f"from step {step}" for step in self.steps))
        rows = [
            (f"{layers}", *(f"{score:.1%}" for score in scores))
            for layers, scores in zip(self.layers, self.scores, strict=True)
        ]
        rows.insert(0, ("0 (full depth)", *(f"{self.full:.1%}" for _ in self.steps)))
        return Table(f"{self.measure}, {self.answers} answers", header, rows)

    def as_dict(self) -> dict[str, Any]:
        """The grid."""
        return {
            "measure": self.measure,
            "answers": self.answers,
            "full_depth": self.full,
            "grid": [
                {"layers_copied": layers, "from_step": step, "share": score}
                for layers, scores in zip(self.layers, self.scores, strict=True)
                for step, score in zip(self.steps, scores, strict=True)
            ],
        }


def measure_copying(
    share: Callable[[TailCopied], float],
    measure: str,
    answers: int,
    layers: Sequence[int],
    steps: Sequence[int],
    progress: Callable[[], None] = lambda: None,
) -> Copying:
    """Ask `share` for every pair of layers and steps, and once for full depth; `progress` hears of each."""

    def ask(count: int, step: int) -> float:
        found = share(TailCopied(count, step))
        progress()
        return found

    full = ask(0, 1)
    scores = [[ask(count, step) for step in steps] for count in layers]
    return Copying(measure, answers, tuple(layers), tuple(steps), scores, full)
