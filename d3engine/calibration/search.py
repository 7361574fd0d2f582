"""The search for the fastest setting that is safe: candidates, successive halving, one certificate.

The one idea: choosing and proving use different problems. Screening may look at everything, as often as it likes,
because nothing is concluded from it but an order; the certificate is then a fixed sequence of tests on problems that
nothing was chosen on, so that it holds although many settings were tried.

The rule, in full, with the tolerance the loss of exact match that is accepted:

1. Full depth answers the certificate's problems, all of the test split. Unless the lower bound of its exact match is
   above five tolerances and what one constant answer to each task gets right (`floor.py`), the search ends: where full
   depth knows next to nothing, no setting can lose anything.
2. Candidates are all start x alpha x tail, each without bridges and with each choice of them that holds its windows;
   those that skip nothing within `max_tokens` are left out, and those that run the same layers at every step of an
   answer, by the same bridges, are one.
3. Screening, three rounds on n, 2 n and 4 n problems of the validation split. After each round a candidate leaves if
   the paired test (`noninferiority.py`) says at 5 % that its loss is above the tolerance, and after the first if it
   ran more layers than `least_saving` allows. After the first two rounds at most half of all, then a quarter, but
   never fewer than four, stay: first those whose observed loss is within the tolerance (of too many the fastest, and
   some of all other speeds to fall back on), then those that were right most often.
4. Those whose observed loss is within the tolerance after screening, and that are not beaten by one that ran no more
   layers and was right more often, go on: four at most, in order from the slowest to the fastest. Of more, the two
   fastest, the fourth fastest and the slowest: if the boldest fail, the next to be believed is not far.
5. Certificate: in that order each answers the certificate's problems, and passes if the paired test says at a
   one-sided 2.5 %, exactly (`exact.py`), that its loss is below the tolerance. The first that fails ends the sequence,
   and the last that passed, which is the fastest, is chosen. Because the order was fixed before, at most 2.5 % of
   calibrations certify a setting that truly loses the tolerance or more, however many were tried (fixed-sequence
   testing: Maurer, Hothorn and Lehmacher 1995; for the calibration of predictors: Angelopoulos and others, "Learn
   then test", 2021), and no level has to be divided. There is no second look: it would only refuse more settings
   that are safe.

*Fastest* is fewest layers truly run for a token, a bridge counted as the share of a layer that its map is; that does
not depend on the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from d3engine.calibration import floor
from d3engine.calibration.budget import FINALISTS, ROUNDS, Budget, most_kept
from d3engine.calibration.candidates import Candidate
from d3engine.calibration.exact import PASS_LEVEL, exact_p
from d3engine.calibration.noninferiority import Pairs, Tolerance, noninferiority_p
from d3engine.calibration.scoring import Answers, Part, Scorer
from d3engine.depth import D3, FullDepth
from d3engine.errors import require, require_number

LEAVE_LEVEL = 0.05
FIRST_OF = 10
"""Full depth answers one problem of so many first: where it knows nothing, that shows at once."""


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
    def chosen(self) -> D3 | None:
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
    require(isinstance(tolerance, Tolerance), "tolerance", tolerance, "a Tolerance such as Tolerance(0.02)")
    floor.check_tolerance(tolerance)
    require_number("least_saving", least_saving, 0, 1, open_high=True)
    run = _Search(scorer, budget, tolerance, least_saving, progress)
    result = run.ask_full_depth()
    if result.knows_enough:
        result.full, result.trials = run.screen(candidates)
        finalists = run.finalists(result.full, result.trials)
        run.certify([trial.policy for trial in finalists], result)
        _tell_fates(finalists, result)
    return result


def check_setting(
    scorer: Scorer,
    policy: D3,
    budget: Budget,
    tolerance: Tolerance,
    progress: Callable[[str, int], None] = lambda step, answers: None,
) -> Calibration:
    """Certify one given setting, and search for no other: steps 1 and 5 of the rule at the top of this file.

    A setting that was found elsewhere, as on a smaller model, was not chosen on these problems either; so the test
    holds its level.
    """
    require(isinstance(tolerance, Tolerance), "tolerance", tolerance, "a Tolerance such as Tolerance(0.02)")
    floor.check_tolerance(tolerance)
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


def grids(result: Calibration) -> list[tuple[int, str | None]]:
    """Tail and bridges of each grid of start and alpha that was tried, those without bridges first."""
    found = {(policy.tail, policy.bridges) for trial in result.trials for policy in trial.candidate.alike}
    return sorted(found, key=lambda place: (place[1] is not None, place[1] or "", place[0]))


@dataclass(frozen=True)
class _Search:
    scorer: Scorer
    budget: Budget
    tolerance: Tolerance
    least_saving: float
    progress: Callable[[str, int], None]

    def score(self, policy: D3 | FullDepth, part: Part, first: int, count: int) -> Answers:
        answers = self.scorer.score(policy, part, first, count)
        self.progress(part.value, count)
        return answers

    def ask_full_depth(self) -> Calibration:
        """Full depth on the certificate's problems, on a few of them first: whether a search means anything."""
        guess, most = self.scorer.guess, self.budget.certification
        baseline = self.score(FullDepth(), Part.CERTIFICATION, 0, -(-most // FIRST_OF))
        knows_enough = not floor.is_out_of_reach(baseline.correct, len(baseline.right), self.tolerance, guess)
        if knows_enough and len(baseline.right) < most:
            first = len(baseline.right)
            baseline += self.score(FullDepth(), Part.CERTIFICATION, first, most - first)
        if knows_enough:
            knows_enough = floor.is_above(baseline.correct, most, self.tolerance, guess) and self._can_show(baseline)
        return Calibration(
            self.scorer.num_layers,
            self.tolerance,
            self.budget,
            baseline,
            guess,
            knows_enough,
            least_saving=self.least_saving,
        )

    def _can_show(self, baseline: Answers) -> bool:
        """Whether a setting that answers as full depth does would pass."""
        return exact_p(Pairs.of(baseline.right, baseline.right), self.tolerance) <= PASS_LEVEL

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
        left = []
        for trial in trials:
            pairs = Pairs.of(full.right, trial.screened.right)
            if 1 - noninferiority_p(pairs, self.tolerance) <= LEAVE_LEVEL:
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
        allowed = full.exact_match - self.tolerance.of(full.exact_match)
        # A hair of room: 0.96 - 0.02 and 0.94 are the same number to people.
        return [trial for trial in trials if trial.screened.exact_match >= allowed - 1e-9]

    def finalists(self, full: Answers, trials: Sequence[Trial]) -> list[Trial]:
        """Those that go to certification, from the slowest to the fastest; the others have left."""
        left = [trial for trial in trials if trial.fate is Fate.SCREENING]
        chosen = _spread(self._within(full, best_at_each_speed(left)))
        for trial in left:
            trial.fate = Fate.NOT_REACHED if trial in chosen else Fate.BEATEN
        return chosen

    def certify(self, policies: Sequence[D3], result: Calibration) -> None:
        """The fixed sequence of tests, until one fails."""
        count = self.budget.certification
        for policy in policies:
            answers = self.score(policy, Part.CERTIFICATION, 0, count)
            p_value = exact_p(Pairs.of(result.baseline.right, answers.right), self.tolerance)
            result.certificates.append(Check(policy, result.baseline, answers, p_value))
            if not result.certificates[-1].passed:
                break


def _tell_fates(finalists: Sequence[Trial], result: Calibration) -> None:
    """Note in the finalists' trials what came of their certificates."""
    for trial, check in zip(finalists, result.certificates, strict=False):
        trial.fate = Fate.CERTIFIED if check.passed else Fate.FAILED
        if check.policy == result.chosen:
            trial.fate = Fate.CHOSEN


def _spread(chain: Sequence[Trial]) -> list[Trial]:
    """`FINALISTS` of those at most: the first and slowest, and the fourth last, the second last and the last."""
    return list(chain) if len(chain) <= FINALISTS else [chain[0], chain[-4], chain[-2], chain[-1]]


def _fast_and_others(fastest_first: Sequence[Trial], most: int) -> list[Trial]:
    """Half of `most` from the fast end, the others evenly from the rest, the slowest among them."""
    fast, rest = fastest_first[: most - most // 2], fastest_first[most - most // 2 :]
    places = [(nth + 1) * len(rest) // (most // 2) - 1 for nth in range(most // 2)]
    return [*fast, *(rest[place] for place in places)]
