"""What calibration asks of a model: answers under a policy, right or wrong, and their
cost. The search sees a `Scorer` alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from d3engine.depth import DepthPolicy
from d3engine.depth.policy import BRIDGES
from d3engine.research.evaluation.accuracy import Interval, measure, wilson_interval
from d3engine.research.evaluation.report import commonest, right_by_constant, told_answer

if TYPE_CHECKING:
    from d3engine.engine.engine import Engine
    from d3engine.request.params import SamplingParams
    from d3engine.research.calibration.bridge_choices import BridgeChoice
    from d3engine.research.evaluation.benchmark import Question
    from d3engine.research.evaluation.kept import KeptAnswers


class Part(StrEnum):
    """Two lists of problems without a question in common: choosing and proving have their own."""

    SCREENING = "screening"
    CERTIFICATION = "certification"


@dataclass(frozen=True)
class Answers:
    """Answers to some problems, in order. `layers` counts the layers run for all `tokens` together, and each bridge
    that was crossed as the share of a layer that its map is."""

    right: tuple[bool, ...]
    tokens: int
    layers: float
    seconds: float

    def __add__(self, more: Answers) -> Answers:
        """These answers, and then those."""
        return Answers(*(own + other for own, other in zip(astuple(self), astuple(more), strict=True)))

    @property
    def correct(self) -> int:
        return sum(self.right)

    @property
    def exact_match(self) -> float:
        return self.correct / len(self.right)

    @property
    def interval(self) -> Interval:
        """Of the exact match, 95 %."""
        return wilson_interval(self.correct, len(self.right))

    @property
    def mean_layers(self) -> float:
        """Layers truly run for a token truly generated, bridges counted."""
        return self.layers / self.tokens


class Scorer(Protocol):
    """A model at a task."""

    @property
    def num_layers(self) -> int: ...

    @property
    def guess(self) -> float:
        """The share that one and the same answer to each task surely gets right of such problems; 0 where unknown."""

    def score(self, policy: DepthPolicy, part: Part, first: int, count: int) -> Answers:
        """Answer problems [first, first + count) of a part; the same problems for every policy."""


class EngineScorer:
    """The engine at a task's questions; `bridges` are those that settings name, and what is in `kept` is not asked
    again."""

    def __init__(
        self,
        engine: Engine,
        params: SamplingParams,
        problems: Mapping[Part, Sequence[Question]],
        bridges: Mapping[str, BridgeChoice] | None = None,
        kept: KeptAnswers | None = None,
    ) -> None:
        self._engine = engine
        self._params = params
        self._problems = problems
        self._bridges = bridges or {}
        self._kept = kept

    @property
    def num_layers(self) -> int:
        return self._engine.config.num_layers

    @property
    def guess(self) -> float:
        return best_constant(self._problems[Part.CERTIFICATION])

    def score(self, policy: DepthPolicy, part: Part, first: int, count: int) -> Answers:
        """One batch through the engine."""
        choice = self._bridges.get(getattr(policy, BRIDGES, None) or "")
        run = policy if choice is None else choice.policy(policy)
        asked = self._problems[part][first : first + count]
        score = measure(self._engine, asked, run, self._params, kept=self._kept)
        layers: float = score.work.layers - score.work.narrower
        if choice is not None:
            layers += score.work.crossings * choice.share * score.shape.hidden_size**2 / score.shape.layer_parameters
        return Answers(score.right, score.tokens, layers, score.seconds)


def best_constant(questions: Sequence[Question]) -> float:
    """What the commonest answer to each task gets right of such questions: the lower end of its 95 % interval, as of
    few questions two are alike by chance. Those that do not tell their answer count as different.

    Of several tasks there are few questions each, so an answer that is commonest by chance would count for many: there
    it is the commonest among other questions of the task.
    """
    tasks: dict[str, list[Question]] = {}
    for question in questions:
        tasks.setdefault(getattr(question, "task", ""), []).append(question)
    if len(tasks) > 1:
        right = sum(sum(right_by_constant(asked)) for asked in tasks.values())
    else:
        told = [answer for answer in map(told_answer, questions) if answer is not None]
        right = told.count(commonest(told))
    return wilson_interval(right, len(questions)).low
