"""The search for the fastest setting that is safe: candidates, successive halving, a certificate, one check.

The one idea: choosing and proving use different problems. Screening may look at everything, as often as it likes,
because nothing is concluded from it but an order; the certificate is then a fixed sequence of tests on problems that
the order does not depend on, so that it holds although many settings were tried.

The rule, in full, with `tolerance` the loss of exact match that is accepted:

1. Candidates are all start x alpha x tail; those that skip nothing within `max_tokens` are left out, and those that
   run the same layers at every step of an answer are one.
2. Screening, three rounds on n, 2 n and 4 n problems of the validation split. After each round a candidate leaves if
   the paired test (`noninferiority.py`) says at 5 % that its loss is above the tolerance, and after the first if it
   ran more layers than `least_saving` allows. After the first two rounds at most half of all, then a quarter, but
   never fewer than four, stay: first those whose observed loss is within the tolerance (of too many the fastest, and
   some of all other speeds to fall back on), then those that were right most often.
3. Those whose observed loss is within the tolerance after screening, and that are not beaten by one that ran no more
   layers and was right more often, go on: four at most, in order from the slowest to the fastest. Of more, the two
   fastest, the fourth fastest and the slowest: if the boldest fail, the next to be believed is not far.
4. Certificate: in that order each answers other problems of the validation split, and passes if the paired test says
   at a one-sided 2.5 % that its loss is below the tolerance. The first that fails ends the sequence. Because the
   order was fixed before, at most about 2.5 % of calibrations certify a setting that truly loses the tolerance or
   more, however many were tried (fixed-sequence testing: Maurer, Hothorn and Lehmacher 1995; for the calibration of
   predictors: Angelopoulos and others, "Learn then test", 2021), and no level has to be divided.
5. The last one that passed, which is the fastest, is checked once on the test split, by the same test at the same
   level. If it fails there, no setting is safe: a second try on the same test problems would not be a check.

*Fastest* is fewest layers truly run for a token, which does not depend on the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import ceil
from statistics import NormalDist

import numpy as np

from d3engine.calibration.noninferiority import noninferiority_p
from d3engine.calibration.scoring import Answers, Part, Scorer
from d3engine.depth import D3, FullDepth, Schedule
from d3engine.errors import require, require_integer, require_number

STARTS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
ALPHAS = (0.8, 0.9, 0.99, 0.999, 0.9999)
"""The search space of the D3 paper (Table 5 and Table 9)."""

ROUNDS = 3
PER_FIRST_ROUND = 1 << (ROUNDS - 1)  # problems of all rounds, for each of the first: every round doubles them
FINALISTS = 4
LEAVE_LEVEL = 0.05
PASS_LEVEL = 0.025
FEWEST_PROBLEMS = 8
"""Of the first round: with fewer it would sort by chance."""


@dataclass(frozen=True)
class Candidate:
    """One setting; `alike` are those of the grid, itself included, that run the same layers."""

    policy: D3
    alike: tuple[D3, ...]


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
    def policy(self) -> D3:
        return self.candidate.policy


@dataclass(frozen=True)
class Check:
    """A setting and full depth on the same problems, and the p-value of "it loses the tolerance or more"."""

    policy: D3
    full: Answers
    answers: Answers
    p_value: float

    @property
    def passed(self) -> bool:
        return self.p_value <= PASS_LEVEL


@dataclass(frozen=True)
class Budget:
    """How many problems each step takes; made by `plan_budget`."""

    first_round: int
    certification: int
    answers: int

    @property
    def screening(self) -> int:
        """Problems of all rounds together."""
        return self.first_round * PER_FIRST_ROUND


@dataclass
class Calibration:
    """What was tried and what came out. `chosen` is None where no setting is safe."""

    num_layers: int
    tolerance: float
    budget: Budget
    full: Answers
    trials: list[Trial]
    least_saving: float = 0.0
    certificates: list[Check] = field(default_factory=list)
    test: Check | None = None

    @property
    def chosen(self) -> D3 | None:
        return self.test.policy if self.test is not None and self.test.passed else None

    @property
    def reason(self) -> str:
        """The outcome in a sentence."""
        if self.chosen is not None:
            return "The fastest setting that was certified has passed its check on the test split."
        if self.test is not None:
            return "No setting is safe: the one that was certified has failed its only check on the test split."
        if self.certificates:
            return "No setting is safe: the most careful one that was left could not be certified."
        saving = f" and {100 * self.least_saving:g} % of the layers saved" if self.least_saving else ""
        return f"No setting is safe: none got through screening with a loss within the tolerance{saving}."


def make_candidates(
    num_layers: int,
    max_tokens: int,
    starts: Sequence[float] = STARTS,
    alphas: Sequence[float] = ALPHAS,
    tails: Sequence[int] = (0,),
) -> list[Candidate]:
    """The different settings of a grid, for a model of so many layers and answers of so many tokens at most."""
    require_integer("num_layers", num_layers, 1)
    require_integer("max_tokens", max_tokens, 1)
    by_effect: dict[bytes, list[D3]] = {}
    for tail in tails:
        for alpha in alphas:
            for start in starts:
                policy = D3(alpha=alpha, start=start, tail=tail)
                if policy.first_layer(num_layers) + tail > num_layers:
                    continue  # the window would end below its first layer
                effect = _effect(policy.schedule(num_layers), max_tokens)
                if (effect < max_tokens).any():
                    by_effect.setdefault(effect.tobytes(), []).append(policy)
    return [Candidate(alike[0], tuple(alike)) for alike in by_effect.values()]


def _effect(schedule: Schedule, max_tokens: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    """Int32 [L]: the cutoffs as far as an answer can see them."""
    return np.minimum(schedule.cutoffs, np.int32(max_tokens))


def plan_budget(num_candidates: int, answers: int, certification: int, tolerance: float) -> Budget:
    """Share `answers` (problems x settings, full depth included) among the steps.

    Certification and test take `certification` problems each, of up to `FINALISTS` settings and of one; what is left
    goes to screening. Raises `InvalidValueError` for a budget that leaves less than `FEWEST_PROBLEMS` for the first
    round, and for so few problems that not even a setting without any loss could be certified.
    """
    require_integer("candidates", num_candidates, 1)
    require_integer("--limit", certification, fewest_to_certify(tolerance))
    proving = (FINALISTS + 1) * certification + 2 * certification
    per_problem = _most_screened(num_candidates)
    least = proving + FEWEST_PROBLEMS * per_problem
    require_integer("--budget", answers, least)
    return Budget((answers - proving) // per_problem, certification, answers)


def fewest_to_certify(tolerance: float) -> int:
    """The problems that a setting needs to be certified at this tolerance if it loses none."""
    require_number("tolerance", tolerance, 0, 1, open_low=True, open_high=True)
    quantile = NormalDist().inv_cdf(1 - PASS_LEVEL)
    return ceil(quantile**2 * (1 - tolerance) / tolerance)  # where the test statistic reaches the quantile


def _most_screened(num_candidates: int) -> int:
    """Answers of screening for each problem of its first round."""
    fresh = (1, *(1 << number for number in range(ROUNDS - 1)))
    return PER_FIRST_ROUND + sum(_most_kept(num_candidates, number) * fresh[number] for number in range(ROUNDS))


def _most_kept(num_candidates: int, halvings: int) -> int:
    """Candidates that stay after so many halvings, at most."""
    return max(-(-num_candidates // (1 << halvings)), min(num_candidates, FINALISTS))


def calibrate(
    scorer: Scorer,
    candidates: Sequence[Candidate],
    budget: Budget,
    tolerance: float,
    progress: Callable[[str, int], None] = lambda step, answers: None,
    *,
    least_saving: float = 0.0,
) -> Calibration:
    """Search by the rule at the top of this file. `progress` hears of each step and of the answers it took.

    `least_saving` is the share of the layers that a setting must truly leave out to be worth a loss.
    """
    require(len(candidates) > 0, "candidates", len(candidates), "at least one setting that skips something")
    require_number("tolerance", tolerance, 0, 1, open_low=True, open_high=True)
    require_number("least_saving", least_saving, 0, 1, open_high=True)
    run = _Search(scorer, budget, tolerance, least_saving, progress)
    full, trials = run.screen(candidates)
    result = Calibration(scorer.num_layers, tolerance, budget, full, trials, least_saving)
    finalists = run.finalists(full, trials)
    run.certify(finalists, result)
    if result.certificates and result.certificates[0].passed:
        run.check_once(result)
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


@dataclass(frozen=True)
class _Search:
    scorer: Scorer
    budget: Budget
    tolerance: float
    least_saving: float
    progress: Callable[[str, int], None]

    def score(self, policy: D3 | FullDepth, part: Part, first: int, count: int) -> Answers:
        answers = self.scorer.score(policy, part, first, count)
        self.progress(part.value, count)
        return answers

    def screen(self, candidates: Sequence[Candidate]) -> tuple[Answers, list[Trial]]:
        """Three rounds; those still in are `Fate.SCREENING`."""
        count = self.budget.first_round
        full = self.score(FullDepth(), Part.SCREENING, 0, count)
        trials = [Trial(one, self.score(one.policy, Part.SCREENING, 0, count)) for one in candidates]
        left = self._drop_slow(self._drop_refuted(full, trials))
        for number in range(2, ROUNDS + 1):
            left = self._halve(full, left, most=_most_kept(len(candidates), number - 1))
            first, count = len(full.right), len(full.right)
            full += self.score(FullDepth(), Part.SCREENING, first, count)
            for trial in left:
                trial.screened += self.score(trial.policy, Part.SCREENING, first, count)
                trial.rounds = number
            left = self._drop_refuted(full, left)
        return full, trials

    def _drop_refuted(self, full: Answers, trials: Sequence[Trial]) -> list[Trial]:
        left = []
        for trial in trials:
            if 1 - self.p_value(full, trial.screened) <= LEAVE_LEVEL:
                trial.fate = Fate.REFUTED
            else:
                left.append(trial)
        return left

    def _drop_slow(self, trials: Sequence[Trial]) -> list[Trial]:
        most_layers = (1 - self.least_saving) * self.scorer.num_layers
        for trial in trials:
            if trial.screened.mean_layers > most_layers:
                trial.fate = Fate.SLOW
        return [trial for trial in trials if trial.fate is Fate.SCREENING]

    def _halve(self, full: Answers, trials: Sequence[Trial], most: int) -> list[Trial]:
        """At most so many of `trials` stay; the others' fate is `BEATEN`."""
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
        """Those whose observed loss is within the tolerance."""
        allowed = full.exact_match - self.tolerance
        # A hair of room: 0.96 - 0.02 and 0.94 are the same number to people.
        return [trial for trial in trials if trial.screened.exact_match >= allowed - 1e-9]

    def finalists(self, full: Answers, trials: Sequence[Trial]) -> list[Trial]:
        """Those that go to certification, from the slowest to the fastest; the others have left."""
        left = [trial for trial in trials if trial.fate is Fate.SCREENING]
        chosen = _spread(self._within(full, best_at_each_speed(left)))
        for trial in left:
            trial.fate = Fate.NOT_REACHED if trial in chosen else Fate.BEATEN
        return chosen

    def certify(self, finalists: Sequence[Trial], result: Calibration) -> None:
        """The fixed sequence of tests, until one fails."""
        if not finalists:
            return
        count = self.budget.certification
        full = self.score(FullDepth(), Part.CERTIFICATION, 0, count)
        for trial in finalists:
            answers = self.score(trial.policy, Part.CERTIFICATION, 0, count)
            check = Check(trial.policy, full, answers, self.p_value(full, answers))
            result.certificates.append(check)
            trial.fate = Fate.CERTIFIED if check.passed else Fate.FAILED
            if not check.passed:
                break

    def check_once(self, result: Calibration) -> None:
        """The last that was certified, on the test split."""
        policy = [check.policy for check in result.certificates if check.passed][-1]
        count = self.budget.certification
        full = self.score(FullDepth(), Part.TEST, 0, count)
        answers = self.score(policy, Part.TEST, 0, count)
        result.test = Check(policy, full, answers, self.p_value(full, answers))
        if result.test.passed:
            next(trial for trial in result.trials if trial.policy == policy).fate = Fate.CHOSEN

    def p_value(self, full: Answers, answers: Answers) -> float:
        pairs = list(zip(full.right, answers.right, strict=True))
        return noninferiority_p(pairs.count((True, False)), pairs.count((False, True)), len(pairs), self.tolerance)


def _spread(chain: Sequence[Trial]) -> list[Trial]:
    """`FINALISTS` of those at most: the first and slowest, and the fourth last, the second last and the last."""
    return list(chain) if len(chain) <= FINALISTS else [chain[0], chain[-4], chain[-2], chain[-1]]


def _fast_and_others(fastest_first: Sequence[Trial], most: int) -> list[Trial]:
    """Half of `most` from the fast end, the others evenly from the rest, the slowest among them."""
    fast, rest = fastest_first[: most - most // 2], fastest_first[most - most // 2 :]
    places = [(nth + 1) * len(rest) // (most // 2) - 1 for nth in range(most // 2)]
    return [*fast, *(rest[place] for place in places)]
