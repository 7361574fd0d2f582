"""What is lost when the last layers are copied from some step on (the D3 paper's Figure
2a): a nested schedule in which they have that cutoff."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch

from d3engine.depth import NEVER, DepthPolicy, FullDepth, Schedule
from d3engine.depth.schedule import OnSkip
from d3engine.errors import require, require_integer
from d3engine.research.analysis.answers import Answered
from d3engine.research.analysis.observer import CachedPass, Observer
from d3engine.research.analysis.report import Table, counted
from d3engine.research.analysis.saturation import saturation
from d3engine.research.evaluation.accuracy import Interval, wilson_interval
from d3engine.research.evaluation.benchmark import Question
from d3engine.text.tokenizer import Tokenizer

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
class Grid:
    """What is tried: each number of last layers with each step, on the same answers.

    `measure` says what counts as right, `lengths` has the tokens of each answer at full depth, `max_tokens` at most.
    """

    measure: str
    max_tokens: int
    lengths: Sequence[int]
    layers: Sequence[int]
    steps: Sequence[int]

    def reaching(self, step: int) -> int:
        """How many answers reach a step. Up to it an answer is that of full depth, whatever is copied from it on."""
        return sum(length > step for length in self.lengths)


@dataclass(frozen=True)
class Copying(Grid):
    """`outcomes[k][t]`: what came out with the tail `layers[k]` copied from `steps[t]` on; `full` at full depth."""

    outcomes: list[list[Outcome]]
    full: Outcome

    def table(self) -> Table:
        header = ("layers copied", "from step", "right", "95 % interval", "answers that reach the step", "cut off")
        rows = [("0 (full depth)", "-", *_cells(self.full), "-", f"{self.full.cut_off}")]
        for layers, outcomes in zip(self.layers, self.outcomes, strict=True):
            for step, outcome in zip(self.steps, outcomes, strict=True):
                reaching = f"{self.reaching(step)}"
                rows.append((f"{layers}", f"{step}", *_cells(outcome), reaching, f"{outcome.cut_off}"))
        return Table(self.title, header, rows, self.notes)

    @property
    def title(self) -> str:
        most = counted(self.max_tokens, "token")
        return f"{self.measure}, {counted(len(self.lengths), 'answer')} of at most {most}"

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


def _cells(outcome: Outcome) -> tuple[str, str]:
    return f"{outcome.share:.1%}", f"{outcome.interval.low:.1%} to {outcome.interval.high:.1%}"


def _measure(
    outcome: Callable[[Any], Outcome],
    full_depth: DepthPolicy,
    kinds: Sequence[Callable[[int, int], DepthPolicy]],
    grid: Grid,
    progress: Callable[[], None],
) -> list[Copying]:
    """For each kind of policy the `outcome` of every pair of layers and steps; that of full depth is asked for once."""

    def ask(policy: DepthPolicy) -> Outcome:
        found = outcome(policy)
        progress()
        return found

    full = ask(full_depth)
    outcomes = [[[ask(kind(count, step)) for step in grid.steps] for count in grid.layers] for kind in kinds]
    return [Copying(**vars(grid), outcomes=found, full=full) for found in outcomes]


def measure_copying(
    outcome: Callable[[TailCopied], Outcome], grid: Grid, progress: Callable[[], None] = lambda: None
) -> Copying:
    """Ask for the `outcome` of every pair of layers and steps, and once of full depth; `progress` hears of each."""
    return _measure(outcome, TailCopied(0, 1), [TailCopied], grid, progress)[0]


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
        one = next(iter(self.grids.values()))
        columns = [column for entries in self.grids for column in (f"right, {entries}", "95 % interval")]
        header = ("layers copied", "at step", *columns, "answers that reach the step")
        rows = [("0 (full depth)", "-", *_cells(one.full) * len(self.grids), "-")]
        for nth, layers in enumerate(one.layers):
            for place, step in enumerate(one.steps):
                cells = [cell for grid in self.grids.values() for cell in _cells(grid.outcomes[nth][place])]
                rows.append((f"{layers}", f"{step}", *cells, f"{one.reaching(step)}"))
        return Table(f"One step perturbed: {one.title}", header, rows, one.notes)

    def as_dict(self) -> dict[str, Any]:
        """Each grid under its name; shares are from 0 to 1."""
        return {"entries": {name: grid.as_dict() for name, grid in self.grids.items()}}


def measure_perturbing(
    outcome: Callable[[DepthPolicy], Outcome], grid: Grid, progress: Callable[[], None] = lambda: None
) -> Perturbing:
    """As `measure_copying`, of single steps, with copied and with recomputed entries."""
    kinds = [partial(OneStepCopied, entries=entries) for entries in ENTRIES]
    return Perturbing(dict(zip(ENTRIES, _measure(outcome, FullDepth(), kinds, grid, progress), strict=True)))


KEPT = "kept"
"""Entries of all layers, as full depth writes them: then nothing is changed, and the answer is full depth's."""


@dataclass(frozen=True)
class OracleAnswer:
    """Tokens, the layers after which each was settled and left, and the probability that the LM head gave it there.

    The first token, which the prompt pass yields, is settled like the others, but the prompt keeps all its entries.
    """

    token_ids: list[int]
    depths: list[int]
    confidence: list[float]


@torch.inference_mode()
def oracle_answer(
    observer: Observer,
    prompt_ids: Sequence[int],
    max_tokens: int,
    entries: str,
    is_over: Callable[[list[int]], bool] = lambda tokens: False,
) -> OracleAnswer:
    """A greedy answer whose tokens leave where they are settled; `entries` is "copied", "recomputed" or "kept".

    Ends after `max_tokens` tokens, or once `is_over` says so of the tokens so far.
    """
    require(entries in (KEPT, *ENTRIES), "entries", entries, f"one of {', '.join((KEPT, *ENTRIES))}")
    require_integer("max_tokens", max_tokens, 1)
    run = CachedPass(observer, len(prompt_ids), len(prompt_ids) + max_tokens)
    found = OracleAnswer([], [], [])
    fed = list(prompt_ids)
    while True:
        states = [state[-1:] for state in run.feed(fed)]
        best = [observer.logits(state).softmax(dim=-1).max(dim=-1) for state in states]
        choices = np.array([[int(one.indices)] for one in best])
        settled = saturation(choices, np.array([[float(one.values)] for one in best]))
        depth = int(settled.layers[0])
        if found.token_ids:  # the prompt's own entries stay
            _fill(run, depth, states[depth - 1], entries)
        found.token_ids.append(int(choices[-1, 0]))
        found.depths.append(depth)
        found.confidence.append(float(settled.confidence[0]))
        if len(found.token_ids) == max_tokens or is_over(found.token_ids):
            return found
        fed = found.token_ids[-1:]


def _fill(run: CachedPass, depth: int, state: torch.Tensor, entries: str) -> None:
    """What the layers from `depth` on hold of the newest token, as if it had run the layers below alone."""
    for layer in range(depth, run.num_layers):
        if entries == "copied":
            run.copy_newest(depth - 1, layer)
        elif entries == "recomputed":
            run.project_newest(layer, state)


def ask_oracle(
    observer: Observer,
    tokenizer: Tokenizer,
    answered: Iterable[Answered],
    max_tokens: int,
    stop: Sequence[str],
    questions: Sequence[Question] | None,
) -> Oracle:
    """The oracle's answers to the prompts of `answered`, for each kind of entries.

    Right is what `questions` say; without them, an answer that is full depth's.
    """

    def is_over(tokens: list[int]) -> bool:
        return tokens[-1] in observer.config.eos_token_ids or any(one in tokenizer.decode(tokens) for one in stop)

    answers: dict[str, list[OracleAnswer]] = {entries: [] for entries in (KEPT, *ENTRIES)}
    right: dict[str, list[bool]] = {entries: [] for entries in answers}
    for number, one in enumerate(answered):
        for entries, found in answers.items():
            found.append(oracle_answer(observer, one.prompt_ids, max_tokens, entries, is_over))
            if questions is None:
                is_right = found[-1].token_ids == one.token_ids
            else:
                is_right = questions[number].is_right(_cut(tokenizer.decode(found[-1].token_ids), stop))
            right[entries].append(is_right)
    measure = AGREEMENT if questions is None else "exact match"
    return Oracle(measure, observer.config.num_layers, answers, right)


def _cut(text: str, stop: Sequence[str]) -> str:
    """The text before the first of the stop texts in it."""
    return text[: min((place for one in stop if (place := text.find(one)) >= 0), default=len(text))]


@dataclass(frozen=True)
class Oracle:
    """For each kind of entries, the answers and whether each was right."""

    measure: str
    num_layers: int
    answers: Mapping[str, Sequence[OracleAnswer]]
    right: Mapping[str, Sequence[bool]]

    def table(self) -> Table:
        """A row for each kind of entries; `kept` is full depth."""
        header = ("entries above", "right", "95 % interval", "layers, mean", "of all", "confidence", "tokens")
        rows = [self._row(name) for name in self.answers]
        count = len(next(iter(self.right.values())))
        title = f"Every token leaves where it is settled: {self.measure}, {counted(count, 'answer')}"
        return Table(title, header, rows)

    def _row(self, name: str) -> tuple[str, ...]:
        outcome, depths = self._outcome(name), self._later(name, "depths")
        share, interval = _cells(outcome)
        mean = float(np.mean(depths)) if depths else float("nan")
        return (
            f"{name} (full depth)" if name == KEPT else name,
            f"{share} ({outcome.right})",
            interval,
            f"{mean:.2f}",
            f"{mean / self.num_layers:.0%}",
            f"{np.mean(self._later(name, 'confidence')):.2f}" if depths else "-",
            f"{len(depths)}",
        )

    def _outcome(self, name: str) -> Outcome:
        return Outcome(len(self.right[name]), sum(self.right[name]), 0)

    def _later(self, name: str, field: str) -> list[float]:
        """Of the tokens after the first of each answer: it is the prompt pass's, and full depth."""
        return [value for answer in self.answers[name] for value in getattr(answer, field)[1:]]

    def as_dict(self) -> dict[str, Any]:
        return {
            "measure": self.measure,
            "num_layers": self.num_layers,
            "entries": {
                name: {
                    "right": sum(self.right[name]),
                    "answers": [asdict(answer) for answer in answers],
                    "interval_95": asdict(self._outcome(name).interval),
                }
                for name, answers in self.answers.items()
            },
        }
