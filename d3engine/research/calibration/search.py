"""How many problems each step of a calibration takes; what cannot prove anything is
refused before the hours of work."""

# The rule, with the tolerance the loss of exact match that is accepted:
#
# 1. Full depth answers the certificate's problems, of the test split. Unless the lower bound of its exact match is
#    above five tolerances and one constant answer to each task, the search ends: a model that knows nothing loses
#    nothing.
# 2. Candidates are all settings of the grid that skip something; those that run the same layers are one.
# 3. Screening takes three rounds on n, 2 n and 4 n problems of the validation split. After each, a candidate leaves if
#    the paired test says at 5 % that its loss is above the tolerance; after the first also if it saves too few layers.
#    A half of all stay for the second round and a quarter for the third, but four at least: first those within the
#    tolerance, the fastest and some of all other speeds; then those that were right most often.
# 4. Those within the tolerance that are not beaten by a faster one go on, four at most: of more the two fastest, the
#    fourth fastest and the slowest.
# 5. From the slowest to the fastest each answers the certificate's problems. It passes if the exact paired test says at
#    a one-sided 2.5 % that its loss is below the tolerance. The first that fails ends the sequence; the last that
#    passed is chosen. The order was fixed before, so at most 2.5 % of calibrations certify a setting that loses the
#    tolerance, however many were tried (fixed-sequence testing: Maurer, Hothorn and Lehmacher 1995).
#
# The fastest runs the fewest layers for a token, a bridge counted as the share of a layer that its map is.

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import count, product
from math import ceil
from statistics import NormalDist

import numpy as np

from d3engine.depth import D3, DepthPolicy, FixedSkip, FullDepth
from d3engine.errors import InvalidValueError, require, require_integer, require_number
from d3engine.research.calibration.scoring import Answers, Part, Scorer
from d3engine.research.calibration.statistics import (
    FLOOR,
    PASS_LEVEL,
    Pairs,
    Tolerance,
    check_tolerance,
    exact_p,
    fewest_to_know,
    needed,
    noninferiority_p,
)

ROUNDS = 3
PER_FIRST_ROUND = 1 << (ROUNDS - 1)  # problems of all rounds, for each of the first: every round doubles them
FINALISTS = 4
FEWEST_PROBLEMS = 8
"""Of the first round: with fewer it would sort by chance."""
LEAST_SCREENING = FEWEST_PROBLEMS * PER_FIRST_ROUND
USUAL_CERTIFICATION = 700


@dataclass(frozen=True)
class Has:
    """The different questions that a task has for each step."""

    screening: int
    certification: int


@dataclass(frozen=True)
class Budget:
    """How many problems each step takes, and all answers that this can come to; made by `plan_budget`."""

    first_round: int
    certification: int
    answers: int

    @property
    def screening(self) -> int:
        return self.first_round * PER_FIRST_ROUND


def plan_budget(
    num_candidates: int,
    answers: int,
    certification: int | None,
    tolerance: Tolerance,
    has: Has | None = None,
) -> Budget:
    """Share `answers` (problems x settings, full depth included) between the two steps.

    The certificate takes `certification` problems (None: `USUAL_CERTIFICATION`, or as many as the task has), of full
    depth and of up to `FINALISTS` settings; what is left goes to screening. Raises `InvalidValueError`, which names
    all least sizes with their reasons, where something is too small.
    """
    require_integer("candidates", num_candidates, 1)
    require_integer("--budget", answers, 1)
    most = has.certification if has else sys.maxsize
    asked = min(USUAL_CERTIFICATION, most) if certification is None else require_integer("--limit", certification, 1)
    fewest = fewest_problems(tolerance)
    finalists, per_problem = min(num_candidates, FINALISTS), _most_screened(num_candidates)
    proving = (finalists + 1) * max(fewest, min(asked, most))
    least = proving + FEWEST_PROBLEMS * per_problem
    if not fewest <= asked <= most or answers < least or (has is not None and has.screening < LEAST_SCREENING):
        allowed = (
            f"at least {fewest} and {least} for a tolerance of {tolerance} and {num_candidates} "
            f"setting{'s' * (num_candidates > 1)}: of fewer than {fewest} problems not even a setting without any loss "
            f"could be certified; {proving} answers are for the certificate, by full depth and {finalists} of the "
            f"settings, and {least - proving} for screening"
        )
        if has is not None:
            can_show = least_tolerance(has.certification)
            allowed += (
                f"; the task has {has.certification} questions for the certificate, enough for "
                f"{f'a tolerance of {can_show} or more' if can_show else 'no tolerance'}, and {has.screening} for "
                f"screening, which takes {LEAST_SCREENING}"
            )
        raise InvalidValueError("--limit and --budget", f"{asked} and {answers}", allowed)
    first_round = (answers - proving) // per_problem
    if has is not None:
        first_round = min(first_round, has.screening // PER_FIRST_ROUND)
    return Budget(first_round, asked, proving + first_round * per_problem)


def plan_check(certification: int | None, tolerance: Tolerance, has: Has | None = None) -> Budget:
    """The certificate of one given setting, without screening; raises `InvalidValueError` where it is too small."""
    most = has.certification if has else sys.maxsize
    asked = min(USUAL_CERTIFICATION, most) if certification is None else require_integer("--limit", certification, 1)
    fewest = fewest_problems(tolerance)
    allowed = f"at least {fewest} for a tolerance of {tolerance}" + (f", at most {most}" if has else "")
    require(fewest <= asked <= most, "--limit", asked, allowed)
    return Budget(0, asked, 2 * asked)


def least_tolerance(problems: int) -> Tolerance | None:
    """The least one, in tenths of a point, that `problems` problems could certify; None: not even the widest."""
    square = NormalDist().inv_cdf(1 - PASS_LEVEL) ** 2
    tenths = range(ceil(1000 * square / (problems + square)), 1000 // FLOOR)
    tolerances = (Tolerance(number / 1000) for number in tenths)
    return next((one for one in tolerances if fewest_problems(one) <= problems), None)


def fewest_problems(tolerance: Tolerance) -> int:
    """The problems without which no certificate can be had, even if every answer is right."""
    return max(fewest_to_certify(tolerance), fewest_to_know(tolerance))


def fewest_to_certify(tolerance: Tolerance) -> int:
    """The problems that a setting needs to be certified at this tolerance if it answers as full depth does.

    Those that count for the test: of a relative tolerance, those that full depth answers rightly.
    """
    quantile = NormalDist().inv_cdf(1 - PASS_LEVEL)
    normal = ceil(quantile**2 * (1 - tolerance.loss) / tolerance.loss)  # where the normal test reaches its level
    return next(fewest for fewest in count(normal) if exact_p(Pairs(fewest, 0, 0, 0), tolerance) <= PASS_LEVEL)


def most_kept(num_candidates: int, halvings: int) -> int:
    """Candidates that stay after `halvings` halvings of screening, at most."""
    return max(-(-num_candidates // (1 << halvings)), min(num_candidates, FINALISTS))


def _most_screened(num_candidates: int) -> int:
    """Answers of screening for each problem of its first round."""
    fresh = (1, *(1 << number for number in range(ROUNDS - 1)))
    return PER_FIRST_ROUND + sum(most_kept(num_candidates, number) * fresh[number] for number in range(ROUNDS))


STARTS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
ALPHAS = (0.8, 0.9, 0.99, 0.999, 0.9999)
"""The search space of the D3 paper's Table 5, and 0.99, which lies in the gap that the paper leaves."""

PAPER_ALPHAS = tuple(alpha for alpha in ALPHAS if alpha != 0.99)
"""Those of the paper alone."""


@dataclass(frozen=True)
class Candidate:
    """One setting; `alike` are those of the grid, itself included, that run the same layers."""

    policy: DepthPolicy
    alike: tuple[DepthPolicy, ...]


def make_candidates(
    num_layers: int,
    max_tokens: int,
    starts: Sequence[float] = STARTS,
    alphas: Sequence[float] = ALPHAS,
    tails: Sequence[int] = (0,),
    bridges: Mapping[str, AbstractSet[tuple[int, int]]] | None = None,
) -> list[Candidate]:
    """The different settings of a grid, for a model of `num_layers` layers and answers of `max_tokens` tokens at most.

    `bridges` are the windows that each file holds, by what it is called: every setting is also one with each that holds
    all of its windows.
    """
    require_integer("num_layers", num_layers, 1)
    require_integer("max_tokens", max_tokens, 1)
    by_effect: dict[tuple[str | None, bytes], list[D3]] = {}
    for tail, alpha, start in product(tails, alphas, starts):
        policy = D3(alpha=alpha, start=start, tail=tail)
        if policy.first_layer(num_layers) + tail > num_layers:
            continue  # the window would end below its first layer
        schedule = policy.schedule(num_layers)
        effect = np.minimum(schedule.cutoffs, np.int32(max_tokens))  # as far as an answer can see them
        if (effect < max_tokens).any():
            left_out = set(schedule.windows())
            for name in (None, *(name for name, windows in (bridges or {}).items() if left_out <= windows)):
                by_effect.setdefault((name, effect.tobytes()), []).append(replace(policy, bridges=name))
    return [Candidate(alike[0], tuple(alike)) for alike in by_effect.values()]


WIDTHS = (1, 2, 3, 4, 6)
"""Layers of the windows that are tried."""

WINDOWS_OF_A_WIDTH = 3


def window_candidates(
    num_layers: int,
    widths: Sequence[int],
    measured: Mapping[tuple[int, int], float],
    bridges: Mapping[str, AbstractSet[tuple[int, int]]],
) -> list[Candidate]:
    """Fixed windows of these widths, `WINDOWS_OF_A_WIDTH` of each, those that promise most first.

    That is by what `measured` says of a window, the KL divergence that it costs, where it knows some of the width; else
    those around a quarter of the depth, where untrained models lose least
    (docs/explanation/results.md). `bridges` are as `make_candidates` has them.
    """
    found = []
    for width in widths:
        require_integer("--window-width", width, 1, num_layers - 1)
        known = {first: kl for (first, stop), kl in measured.items() if stop - first == width}
        firsts = sorted(known, key=lambda first: known[first])
        if not known:
            middle, step = num_layers // 4, max(1, width // 2)
            near = [middle, middle - step, middle + step]
            firsts = [first for first in near if 1 <= first <= num_layers - width] or [num_layers - width]
        for first in firsts[:WINDOWS_OF_A_WIDTH]:
            window = (first, first + width)
            for name in (None, *(name for name, windows in bridges.items() if window in windows)):
                policy = FixedSkip(range(*window), bridges=name)
                found.append(Candidate(policy, (policy,)))
    return found


LEAVE_LEVEL = 0.05
FIRST_OF = 10
"""Full depth answers one problem in this number first: where it knows nothing, that shows at once."""


class Fate(StrEnum):
    """How far a candidate came."""

    SCREENING = "in screening"
    REFUTED = "loses too much"
    SLOW = "saves too little"
    BEATEN = "left in screening"
    NOT_REACHED = "not reached"
    FAILED = "not certified"
    CERTIFIED = "certified"
    CHOSEN = "chosen"


@dataclass
class Trial:
    """What is known of a candidate."""

    candidate: Candidate
    screened: Answers
    rounds: int = 1
    fate: Fate = Fate.SCREENING

    @property
    def policy(self) -> DepthPolicy:
        return self.candidate.policy


@dataclass(frozen=True)
class Check:
    """A setting and full depth on the same problems, and the p-value of "it loses the tolerance or more"."""

    policy: DepthPolicy
    full: Answers
    answers: Answers
    p_value: float

    @property
    def passed(self) -> bool:
        return self.p_value <= PASS_LEVEL

    @property
    def pairs(self) -> Pairs:
        return Pairs.of(self.full.right, self.answers.right)


@dataclass
class Calibration:
    """What was tried and what came out. `chosen` is None where no setting could be shown to be safe.

    `baseline` is full depth on the certificate's problems, `guess` what one constant answer to each task gets right of
    them, and `full` full depth on those of screening; it is None, and nothing was tried, where full depth knows too
    little.
    """

    num_layers: int
    tolerance: Tolerance
    budget: Budget
    baseline: Answers
    guess: float
    knows_enough: bool
    full: Answers | None = None
    trials: list[Trial] = field(default_factory=list)
    least_saving: float = 0.0
    certificates: list[Check] = field(default_factory=list)

    @property
    def certificate(self) -> Check | None:
        """That of the setting that is chosen."""
        return next((check for check in reversed(self.certificates) if check.passed), None)

    @property
    def chosen(self) -> DepthPolicy | None:
        return self.certificate.policy if self.certificate is not None else None


def calibrate(
    scorer: Scorer,
    candidates: Sequence[Candidate],
    budget: Budget,
    tolerance: Tolerance,
    progress: Callable[[str, int], None] = lambda step, answers: None,
    *,
    least_saving: float = 0.0,
) -> Calibration:
    """Search by the rule at the top of this file. `progress` hears of each step and of the answers it took.

    `least_saving` is the share of the layers that a setting must truly leave out to be worth a loss.
    """
    require(len(candidates) > 0, "candidates", len(candidates), "at least one setting that skips something")
    run = _Search(scorer, budget, tolerance, least_saving, progress)
    result = run.ask_full_depth()
    if result.knows_enough:
        result.full, result.trials = run.screen(candidates)
        finalists = run.finalists(result.full, result.trials)
        run.certify([trial.policy for trial in finalists], result)
        for trial, check in zip(finalists, result.certificates, strict=False):
            trial.fate = Fate.CERTIFIED if check.passed else Fate.FAILED
            if check.policy == result.chosen:
                trial.fate = Fate.CHOSEN
    return result


def check_setting(
    scorer: Scorer,
    policy: DepthPolicy,
    budget: Budget,
    tolerance: Tolerance,
    progress: Callable[[str, int], None] = lambda step, answers: None,
) -> Calibration:
    """Certify one given setting, and search for no other: steps 1 and 5 of the rule at the top of this file.

    A setting that was found elsewhere, as on a smaller model, was not chosen on these problems either; so the test
    holds its level.
    """
    run = _Search(scorer, budget, tolerance, 0.0, progress)
    result = run.ask_full_depth()
    if result.knows_enough:
        run.certify([policy], result)
    return result


def best_at_each_speed(trials: Sequence[Trial]) -> list[Trial]:
    """Those not beaten by one that ran no more layers and was right more often (in share); slowest first."""
    chain: list[Trial] = []
    best = 0.0
    for trial in sorted(trials, key=lambda trial: (trial.screened.mean_layers, -trial.screened.exact_match)):
        if trial.screened.exact_match >= best:
            best = trial.screened.exact_match
            chain.append(trial)
    return chain[::-1]


def grid_cells(result: Calibration, tail: int, bridges: str | None) -> dict[tuple[float, float], tuple[D3, Trial]]:
    """The settings of a grid with what is known of them, by alpha and start."""
    return {
        (policy.alpha, float(policy.start)): (policy, trial)
        for trial in result.trials
        for policy in trial.candidate.alike
        if isinstance(policy, D3) and (policy.tail, policy.bridges) == (tail, bridges)
    }


def grids(result: Calibration) -> list[tuple[int, str | None]]:
    """Tail and bridges of each grid of start and alpha that was tried, those without bridges first."""
    every = (policy for trial in result.trials for policy in trial.candidate.alike)
    found = {(policy.tail, policy.bridges) for policy in every if isinstance(policy, D3)}
    return sorted(found, key=lambda place: (place[1] is not None, place[1] or "", place[0]))


@dataclass(frozen=True)
class _Search:
    scorer: Scorer
    budget: Budget
    tolerance: Tolerance
    least_saving: float
    progress: Callable[[str, int], None]

    def __post_init__(self) -> None:
        require(
            isinstance(self.tolerance, Tolerance), "tolerance", self.tolerance, "a Tolerance such as Tolerance(0.02)"
        )
        check_tolerance(self.tolerance)
        require_number("least_saving", self.least_saving, 0, 1, open_high=True)

    def score(self, policy: DepthPolicy, part: Part, first: int, count: int) -> Answers:
        answers = self.scorer.score(policy, part, first, count)
        self.progress(part.value, count)
        return answers

    def ask_full_depth(self) -> Calibration:
        """Full depth on the certificate's problems, on a few of them first: whether a search means anything."""
        guess, most = self.scorer.guess, self.budget.certification
        baseline = self.score(FullDepth(), Part.CERTIFICATION, 0, -(-most // FIRST_OF))
        # Where even the upper bound of the first problems is not above what is needed, the others would hardly help.
        knows_enough = baseline.interval.high > needed(baseline.exact_match, self.tolerance, guess)
        if knows_enough and len(baseline.right) < most:
            first = len(baseline.right)
            baseline += self.score(FullDepth(), Part.CERTIFICATION, first, most - first)
        if knows_enough:
            same = exact_p(Pairs.of(baseline.right, baseline.right), self.tolerance)
            is_above = baseline.interval.low > needed(baseline.exact_match, self.tolerance, guess)
            knows_enough = is_above and same <= PASS_LEVEL
        given = self.scorer.num_layers, self.tolerance, self.budget
        return Calibration(*given, baseline, guess, knows_enough, least_saving=self.least_saving)

    def screen(self, candidates: Sequence[Candidate]) -> tuple[Answers, list[Trial]]:
        """Three rounds; those still in are `Fate.SCREENING`."""
        count = self.budget.first_round
        full = self.score(FullDepth(), Part.SCREENING, 0, count)
        trials = [Trial(one, self.score(one.policy, Part.SCREENING, 0, count)) for one in candidates]
        left = self._drop_slow(self._drop_refuted(full, trials))
        for number in range(2, ROUNDS + 1):
            left = self._halve(full, left, most=most_kept(len(candidates), number - 1))
            first, count = len(full.right), len(full.right)
            full += self.score(FullDepth(), Part.SCREENING, first, count)
            for trial in left:
                trial.screened += self.score(trial.policy, Part.SCREENING, first, count)
                trial.rounds = number
            left = self._drop_refuted(full, left)
        return full, trials

    def _drop_refuted(self, full: Answers, trials: Sequence[Trial]) -> list[Trial]:
        for trial in trials:
            pairs = Pairs.of(full.right, trial.screened.right)
            if 1 - noninferiority_p(pairs, self.tolerance) <= LEAVE_LEVEL:
                trial.fate = Fate.REFUTED
        return _still_in(trials)

    def _drop_slow(self, trials: Sequence[Trial]) -> list[Trial]:
        most_layers = (1 - self.least_saving) * self.scorer.num_layers
        for trial in trials:
            if trial.screened.mean_layers > most_layers:
                trial.fate = Fate.SLOW
        return _still_in(trials)

    def _halve(self, full: Answers, trials: Sequence[Trial], most: int) -> list[Trial]:
        """At most `most` of `trials` stay; the others' fate is `BEATEN`."""
        stay = sorted(self._within(full, trials), key=lambda trial: trial.screened.mean_layers)
        if len(stay) > most:
            stay = _fast_and_others(stay, most)
        others = [trial for trial in trials if trial not in stay]
        others.sort(key=lambda trial: (-trial.screened.correct, trial.screened.mean_layers))
        stay += others[: most - len(stay)]
        for trial in trials:
            if trial not in stay:
                trial.fate = Fate.BEATEN
        return stay

    def _within(self, full: Answers, trials: Sequence[Trial]) -> list[Trial]:
        allowed = full.exact_match - self.tolerance.of(full.exact_match)
        # A hair of room: 0.96 - 0.02 and 0.94 are the same number to people.
        return [trial for trial in trials if trial.screened.exact_match >= allowed - 1e-9]

    def finalists(self, full: Answers, trials: Sequence[Trial]) -> list[Trial]:
        """Those that go to certification, from the slowest to the fastest; the others have left."""
        left = _still_in(trials)
        chosen = self._within(full, best_at_each_speed(left))
        if len(chosen) > FINALISTS:
            chosen = [chosen[0], chosen[-4], chosen[-2], chosen[-1]]
        for trial in left:
            trial.fate = Fate.NOT_REACHED if trial in chosen else Fate.BEATEN
        return chosen

    def certify(self, policies: Sequence[DepthPolicy], result: Calibration) -> None:
        """The fixed sequence of tests, until one fails."""
        count = self.budget.certification
        for policy in policies:
            answers = self.score(policy, Part.CERTIFICATION, 0, count)
            p_value = exact_p(Pairs.of(result.baseline.right, answers.right), self.tolerance)
            result.certificates.append(Check(policy, result.baseline, answers, p_value))
            if not result.certificates[-1].passed:
                break


def _still_in(trials: Sequence[Trial]) -> list[Trial]:
    return [trial for trial in trials if trial.fate is Fate.SCREENING]


def _fast_and_others(fastest_first: Sequence[Trial], most: int) -> list[Trial]:
    """Half of `most` from the fast end, the others evenly from the rest, the slowest among them."""
    fast, rest = fastest_first[: most - most // 2], fastest_first[most - most // 2 :]
    places = [(nth + 1) * len(rest) // (most // 2) - 1 for nth in range(most // 2)]
    return [*fast, *(rest[place] for place in places)]
