"""Exact match under a depth policy, with intervals; two policies answer the same problems,
so they are compared in pairs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial, reduce
from math import comb, sqrt
from operator import add
from statistics import NormalDist
from typing import TYPE_CHECKING, cast

from d3engine.depth import DepthPolicy, FullDepth
from d3engine.depth.statistics import ModelShape, mean_depth
from d3engine.errors import InvalidValueError, require, require_integer, require_number
from d3engine.research.evaluation.benchmark import Benchmark, Question, Verdict, verdict_of
from d3engine.research.evaluation.chat_form import prompt_of
from d3engine.research.evaluation.kept import Answer, KeptAnswers, Prompt
from d3engine.research.evaluation.procedural import WORD_PROBLEMS, different_problems
from d3engine.research.evaluation.word_problems import Problem, Split
from d3engine.research.evaluation.work import Cost, Work, is_known_beforehand, work_of

if TYPE_CHECKING:
    from d3engine.engine.engine import Engine
    from d3engine.model.config import ModelConfig
    from d3engine.request.params import SamplingParams


SHARING = 32
"""Questions whose prompts are kept for the next policy, where policies share them."""


@dataclass(frozen=True)
class Interval:
    """A confidence interval of a proportion, or of a difference of two."""

    low: float
    high: float


@dataclass(frozen=True)
class Score(Cost):
    """How a policy did on some problems, and at what cost; `right[i]` says whether problem i was answered exactly;
    of answers that were measured `texts[i]` is the answer and `verdicts[i]` what became of it.

    Of the `prompt_tokens` of all prompts `cached_tokens` came from the prefix cache, the rest was computed.
    """

    right: tuple[bool, ...]
    prompt_tokens: int = 0
    cached_tokens: int = 0
    verdicts: tuple[Verdict, ...] = ()
    texts: tuple[str, ...] = ()

    @property
    def correct(self) -> int:
        return sum(self.right)

    @property
    def accuracy(self) -> float:
        return self.correct / len(self.right)

    @property
    def interval(self) -> Interval:
        """95 %, Wilson's."""
        return wilson_interval(self.correct, len(self.right))


@dataclass(frozen=True)
class Comparison:
    """Two scores on the same problems, the second minus the first."""

    only_first: int
    only_second: int
    difference: float
    interval: Interval
    p_value: float


def take_problems(split: Split, seed: int, limit: int) -> list[Problem]:
    """The first `limit` different problems of a split."""
    return cast(list[Problem], different_problems(WORD_PROBLEMS, split, seed, limit))


def measure(
    engine: Engine,
    given: Sequence[Question],
    policy: DepthPolicy,
    params: SamplingParams,
    *,
    progress: bool = False,
    shares_prompts: bool = False,
    kept: KeptAnswers | None = None,
) -> Score:
    """Answer the questions in one batch and score them; what is in `kept` is not asked again.

    The prefix cache is emptied first, so that a second policy does not find the prompts computed by the first. With
    `shares_prompts` it is not, and the first prompt is computed before the others, which find what they share with it.
    """
    require(len(given) > 0, "problems", given, "at least one problem")
    require(params.n == 1, "n", params.n, "1, since each problem has one answer")
    max_tokens = params.max_tokens
    if max_tokens is None:
        raise InvalidValueError("max_tokens", None, "a number, since the promised depth is a mean over them")
    params = replace(params, depth=policy)
    num_layers = engine.config.num_layers
    if not shares_prompts:
        engine.reset_prefix_cache()
    ask = partial(_ask, engine, params=params, first_alone=shares_prompts, progress=progress)
    prompts = [prompt_of(engine, question) for question in given]
    answers = ask(prompts) if kept is None else _complete(kept, prompts, params, ask)
    nominal = None
    if is_known_beforehand(policy, num_layers):  # a narrower layer counts as the part of a layer that it is
        mean = mean_depth(policy.schedule(num_layers), max_tokens)
        nominal = mean - engine.bridges.students_save(policy, max_tokens) / max_tokens
    verdicts = tuple(verdict_of(question, answer.text) for answer, question in zip(answers, given, strict=True))
    return Score(
        policy=policy,
        shape=shape_of(engine.config),
        work=sum((answer.work for answer in answers), Work()),
        unfinished=sum(answer.cut_off for answer in answers),
        nominal_mean_layers=nominal,
        seconds=sum(answer.seconds for answer in answers),
        right=tuple(verdict is Verdict.RIGHT for verdict in verdicts),
        prompt_tokens=sum(answer.prompt_tokens for answer in answers),
        cached_tokens=sum(answer.cached_tokens for answer in answers),
        verdicts=verdicts,
        texts=tuple(answer.text for answer in answers),
    )


def _ask(
    engine: Engine, prompts: Sequence[Prompt], params: SamplingParams, first_alone: bool, progress: bool
) -> list[Answer]:
    """The answers to all prompts as one batch; with `first_alone` the first prompt is in the cache before it runs."""
    assert params.depth is not None
    began = time.perf_counter()
    found = None
    if first_alone and len(prompts) > 1:
        one = replace(params, max_tokens=1, min_tokens=0, depth=FullDepth())
        found = engine.generate(prompts[:1], one, use_tqdm=False)[0].num_cached_tokens or 0
    outputs = engine.generate(list(prompts), params, use_tqdm=progress)
    seconds = time.perf_counter() - began
    answers = [
        Answer(
            text=output.outputs[0].text,
            work=_narrower(engine, params.depth, work_of(output, params.depth, engine.config.num_layers)),
            cut_off=output.outputs[0].finish_reason == "length",
            prompt_tokens=len(output.prompt_token_ids),
            cached_tokens=output.num_cached_tokens or 0,
            seconds=seconds / len(outputs),
        )
        for output in outputs
    ]
    return answers if found is None else [replace(answers[0], cached_tokens=found), *answers[1:]]


def _narrower(engine: Engine, policy: DepthPolicy, work: Work) -> Work:
    """The work of one answer, with what the students of its steps saved."""
    return replace(work, narrower=engine.bridges.students_save(policy, work.tokens))


def _complete(
    kept: KeptAnswers,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    ask: Callable[[Sequence[Prompt]], list[Answer]],
) -> list[Answer]:
    """The answers that are kept, and those that have to be asked for, kept after each few."""
    different = {repr(prompt): prompt for prompt in prompts}.values()
    missing = [prompt for prompt in different if kept.find(prompt, params) is None]
    for first in range(0, len(missing), SHARING):
        asked = missing[first : first + SHARING]
        kept.keep(asked, params, ask(asked))
    answers = [kept.find(prompt, params) for prompt in prompts]
    return [answer for answer in answers if answer is not None]


def measure_with_shared_prompts(
    engine: Engine,
    benchmark: Benchmark,
    policies: Sequence[DepthPolicy],
    params: SamplingParams,
    *,
    done: Callable[[], None] = lambda: None,
    kept: KeptAnswers | None = None,
) -> list[Score]:
    """As `measure` for each policy, with every prompt computed once for all of them; `done` hears of every question.

    Prompts run at full depth under every policy, so answers do not change. The examples before a task's questions are
    computed once for all of these. All policies answer a few questions of a
    task before the next ones come, since the cache may not hold more; seconds are therefore no comparison of policies.
    """
    parts: list[list[Score]] = [[] for _ in policies]
    for questions in benchmark.tasks.values():
        for first in range(0, len(questions), SHARING):
            group = questions[first : first + SHARING]
            engine.reset_prefix_cache()
            for policy, scores in zip(policies, parts, strict=True):
                scores.append(measure(engine, group, policy, params, shares_prompts=True, kept=kept))
            for _ in group:
                done()
    return [_joined(scores) for scores in parts]


def _joined(scores: Sequence[Score]) -> Score:
    names = ("work", "unfinished", "seconds", "right", "prompt_tokens", "cached_tokens", "verdicts", "texts")
    return replace(scores[0], **{name: reduce(add, [getattr(score, name) for score in scores]) for name in names})


def shape_of(config: ModelConfig) -> ModelShape:
    """The sizes of a model that its cost depends on."""
    return ModelShape(**{field.name: getattr(config, field.name) for field in fields(ModelShape)})


def compare(first: Score, second: Score) -> Comparison:
    """The paired difference `second - first` with its 95 % interval and the p-value of McNemar's exact test."""
    return paired(first.right, second.right)


def paired(first: Sequence[bool], second: Sequence[bool]) -> Comparison:
    """As `compare`, of which answers were right."""
    require(len(first) == len(second), "scores", (len(first), len(second)), "of one problem set")
    pairs = list(zip(first, second, strict=True))
    kinds = ((True, True), (True, False), (False, True), (False, False))
    both, only_first, only_second, neither = (pairs.count(kind) for kind in kinds)
    interval = paired_difference_interval(both, only_second, only_first, neither)
    difference = (only_second - only_first) / len(pairs)
    return Comparison(only_first, only_second, difference, interval, mcnemar_p(only_first, only_second))


def wilson_interval(successes: int, trials: int, confidence: float = 0.95) -> Interval:
    """Wilson's score interval of a proportion (1927): sound near 0 and 1, where the usual one is not."""
    require_integer("trials", trials, 1)
    require_integer("successes", successes, 0, trials)
    require_number("confidence", confidence, 0.0, 1.0, open_low=True, open_high=True)
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share = successes / trials
    centre = share + z * z / (2 * trials)
    spread = z * sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    low = 0.0 if successes == 0 else (centre - spread) / scale
    high = 1.0 if successes == trials else (centre + spread) / scale
    return Interval(low, high)


def paired_difference_interval(
    both: int, only_first: int, only_second: int, neither: int, confidence: float = 0.95
) -> Interval:
    """The interval of the difference of two proportions on the same trials, first minus second.

    Newcombe's method 10 (Statistics in Medicine 17, 1998): Wilson's two intervals, combined with the correlation of
    the pairs. It has a width even where no pair differs, as a bootstrap does not.
    """
    trials = both + only_first + only_second + neither
    first, second = both + only_first, both + only_second
    low_1, high_1 = _wilson_arms(first, trials, confidence)
    low_2, high_2 = _wilson_arms(second, trials, confidence)
    phi = _pair_correlation(both, only_first, only_second, neither)
    difference = (only_first - only_second) / trials
    below = sqrt(max(low_1 * low_1 - 2 * phi * low_1 * high_2 + high_2 * high_2, 0.0))
    above = sqrt(max(high_1 * high_1 - 2 * phi * high_1 * low_2 + low_2 * low_2, 0.0))
    return Interval(difference - below, difference + above)


def _wilson_arms(successes: int, trials: int, confidence: float) -> tuple[float, float]:
    """How far Wilson's interval reaches below and above the proportion."""
    interval, share = wilson_interval(successes, trials, confidence), successes / trials
    return share - interval.low, interval.high - share


def _pair_correlation(both: int, only_first: int, only_second: int, neither: int) -> float:
    trials = both + only_first + only_second + neither
    margins = (both + only_first) * (only_second + neither) * (both + only_second) * (only_first + neither)
    if margins == 0:
        return 0.0
    agreement: float = both * neither - only_first * only_second
    if agreement > 0:  # corrected for continuity
        agreement = max(agreement - trials / 2, 0.0)
    return agreement / sqrt(margins)


def mcnemar_p(only_first: int, only_second: int) -> float:
    """Two-sided exact p-value of McNemar's test: whether the pairs that differ favour one side."""
    differing = require_integer("only_first", only_first, 0) + require_integer("only_second", only_second, 0)
    tail = sum(comb(differing, k) for k in range(min(only_first, only_second) + 1))
    return min(1.0, float(2 * tail / (1 << differing)))
