"""What is lost when the last layers are copied from some step on (the D3 paper's Figure 2a).

The one idea: "copy the tail k layers from step t on" is a nested schedule like any other, so the engine itself runs
it: the last k layers have the cutoff t, and the hidden state passes them unchanged. An answer that is over before
step t cannot change, so the answers that reach t are counted beside the share that is right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from d3engine.analysis.report import Table, counted
from d3engine.depth import NEVER, DepthPolicy, Schedule
from d3engine.errors import require_integer
from d3engine.evaluation.accuracy import Interval, wilson_interval

AGREEMENT = "answers equal to full depth's"
"""The measure where the prompts bring no answers of their own."""


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
class Outcome:
    """Of `answers` under one policy: how many were right, and how many were cut off at the limit of tokens."""

    answers: int
    right: int
    cut_off: int

    @property
    def share(self) -> float:
        return self.right / self.answers

    @property
    def interval(self) -> Interval:
        """95 %, Wilson's."""
        return wilson_interval(self.right, self.answers)

    def as_dict(self) -> dict[str, Any]:
        return {
            "right": self.right,
            "share": self.share,
            "interval_95": asdict(self.interval),
            "cut_off": self.cut_off,
        }


@dataclass(frozen=True)
class Copying:
    """`outcomes[k][t]`: what came out with the tail `layers[k]` copied from step `steps[t]` on; `full` at full depth.

    `measure` says what counts as right, `lengths` has the tokens of each answer at full depth, `max_tokens` at most.
    """

    measure: str
    max_tokens: int
    lengths: tuple[int, ...]
    layers: tuple[int, ...]
    steps: tuple[int, ...]
    outcomes: list[list[Outcome]]
    full: Outcome

    def reaching(self, step: int) -> int:
        """How many answers reach a step. Up to it an answer is that of full depth, whatever is copied from it on."""
        return sum(length > step for length in self.lengths)

    def table(self) -> Table:
        """A row for full depth, then one for each number of layers and each step."""
        header = ("layers copied", "from step", "right", "95 % interval", "answers that reach the step", "cut off")
        rows = [_row("0 (full depth)", "-", self.full, "-")]
        for layers, outcomes in zip(self.layers, self.outcomes, strict=True):
            for step, outcome in zip(self.steps, outcomes, strict=True):
                rows.append(_row(f"{layers}", f"{step}", outcome, f"{self.reaching(step)}"))
        most = counted(self.max_tokens, "token")
        title = f"{self.measure}, {counted(len(self.lengths), 'answer')} of at most {most}"
        return Table(title, header, rows, self.notes)

    @property
    def notes(self) -> tuple[str, ...]:
        """What has to be said where full depth does not even agree with itself."""
        if self.measure != AGREEMENT or self.full.right == self.full.answers:
            return ()
        return (
            f"Full depth itself gave only {self.full.share:.1%} of its answers again, asked in another batch: with this"
            " dtype the other rows show that as well, and not only what is left out. In float32 it gives all.",
        )

    def as_dict(self) -> dict[str, Any]:
        """The grid; shares are from 0 to 1."""
        return {
            "measure": self.measure,
            "answers": len(self.lengths),
            "max_tokens": self.max_tokens,
            "full_depth": self.full.as_dict(),
            "grid": [
                {
                    "layers_copied": layers,
                    "from_step": step,
                    "answers_that_reach_step": self.reaching(step),
                    **outcome.as_dict(),
                }
                for layers, outcomes in zip(self.layers, self.outcomes, strict=True)
                for step, outcome in zip(self.steps, outcomes, strict=True)
            ],
        }


def _row(layers: str, step: str, outcome: Outcome, reaching: str) -> tuple[str, ...]:
    interval = f"{outcome.interval.low:.1%} to {outcome.interval.high:.1%}"
    return layers, step, f"{outcome.share:.1%}", interval, reaching, f"{outcome.cut_off}"


def measure_copying(
    outcome: Callable[[TailCopied], Outcome],
    measure: str,
    max_tokens: int,
    lengths: Sequence[int],
    layers: Sequence[int],
    steps: Sequence[int],
    progress: Callable[[], None] = lambda: None,
) -> Copying:
    """Ask for the `outcome` of every pair of layers and steps, and once of full depth; `progress` hears of each."""

    def ask(count: int, step: int) -> Outcome:
        found = outcome(TailCopied(count, step))
        progress()
        return found

    full = ask(0, 1)
    outcomes = [[ask(count, step) for step in steps] for count in layers]
    return Copying(measure, max_tokens, tuple(lengths), tuple(layers), tuple(steps), outcomes, full)
