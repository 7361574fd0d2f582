"""Calibration chooses by its stated rule: on scorers whose truth is known, and on the bundled model."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from math import comb, log, sqrt
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.calibrations import simulate
from d3engine import Engine
from d3engine.calibration.budget import (
    FINALISTS,
    Has,
    fewest_problems,
    fewest_to_certify,
    least_tolerance,
    plan_budget,
)
from d3engine.calibration.candidates import Candidate, make_candidates
from d3engine.calibration.exact import PASS_LEVEL, exact_p, power
from d3engine.calibration.noninferiority import Pairs, Tolerance, noninferiority_p
from d3engine.calibration.outcome import Outcome, outcome, problems_for, reason
from d3engine.calibration.report import as_dict, policy_file, write_policy_file
from d3engine.calibration.scoring import Answers, Part, best_constant
from d3engine.calibration.search import Calibration, Fate, calibrate
from d3engine.calibration.tasks import calibration_task
from d3engine.cli import app
from d3engine.depth import D3, DepthPolicy, FullDepth
from d3engine.depth.policy import POLICY_FILE, calibrated_for, calibrated_task, policy_from_directory
from d3engine.errors import InvalidValueError, ModelFormatError
from d3engine.loading import model_directory, resolve_depth
from d3engine.model.fingerprint import fingerprint

# -- the paired test ---------------------------------------------------------------------------------------------------


def normal_p(only_full: int, only_setting: int, problems: int, tolerance: Tolerance) -> float:
    """Of problems that all count: none that neither answers."""
    return noninferiority_p(Pairs(problems - only_full - only_setting, only_full, only_setting, 0), tolerance)


def slow_p(only_full: int, only_setting: int, problems: int, tolerance: Tolerance) -> float:
    """The score test straight from its definition: the restricted likelihood maximised by narrowing down."""
    loss, kept = tolerance.loss, 1 - tolerance.loss if tolerance.relative else 1.0

    def likelihood(gain: float) -> float:
        rest = problems - only_full - only_setting
        terms = ((only_full, kept * gain + loss), (only_setting, gain), (rest, 1 - (1 + kept) * gain - loss))
        return sum(count * log(chance) for count, chance in terms if count)

    low, high = 1e-12, (1 - loss) / (1 + kept) - 1e-12
    for _ in range(200):  # it has one peak
        left, right = low + (high - low) / 3, high - (high - low) / 3
        low, high = (left, high) if likelihood(left) < likelihood(right) else (low, right)
    gain = (low + high) / 2
    lost = loss + kept * gain
    variance = problems * (lost + kept**2 * gain - (lost - kept * gain) ** 2)
    return NormalDist().cdf((only_full - kept * only_setting - problems * loss) / sqrt(variance))


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize(
    ("only_full", "only_setting", "problems"), [(9, 4, 120), (0, 3, 60), (2, 0, 200), (30, 31, 90)]
)
def test_the_p_value_is_that_of_the_score_test(
    only_full: int, only_setting: int, problems: int, relative: bool
) -> None:
    tolerance = Tolerance(0.05, relative)
    expected = slow_p(only_full, only_setting, problems, tolerance)
    assert normal_p(only_full, only_setting, problems, tolerance) == pytest.approx(expected, rel=1e-3)


def test_more_losses_are_less_safe_and_more_problems_or_tolerance_safer() -> None:
    two, three = Tolerance(0.02), Tolerance(0.03)
    for p_value in (normal_p, exact_of):
        p = p_value(3, 1, 500, two)
        assert p_value(4, 1, 500, two) > p > p_value(2, 1, 500, two)
        assert p_value(3, 2, 500, two) < p
        assert p_value(3, 1, 800, two) < p
        assert p_value(3, 1, 500, three) < p


def exact_of(only_full: int, only_setting: int, problems: int, tolerance: Tolerance) -> float:
    return exact_p(Pairs(problems - only_full - only_setting, only_full, only_setting, 0), tolerance)


def chance_to_pass(problems: int, gain: float, tolerance: Tolerance, passes: Callable[[int, int], bool]) -> float:
    """Over every outcome, where the loss is the tolerance exactly: an oracle of the vectorised sums."""
    loss = tolerance.loss + (1 - tolerance.loss if tolerance.relative else 1) * gain
    passed = 0.0
    for lost in range(problems + 1):
        for won in range(problems - lost + 1 if gain else 1):
            weight = comb(problems, lost) * comb(problems - lost, won)
            chance = weight * (loss**lost * gain**won * (1 - loss - gain) ** (problems - lost - won))
            if chance > 1e-9 and passes(lost, won):
                passed += chance
    return passed


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize(("problems", "gain"), [(34, 0.1), (35, 0.0), (45, 0.05), (45, 0.2)])
def test_a_setting_that_loses_the_tolerance_passes_with_the_level_at_most(
    problems: int, gain: float, relative: bool
) -> None:
    tolerance = Tolerance(0.11, relative)
    exact = chance_to_pass(
        problems, gain, tolerance, lambda lost, won: exact_of(lost, won, problems, tolerance) <= PASS_LEVEL
    )
    assert 0.002 < exact <= PASS_LEVEL


def test_the_normal_p_value_alone_would_not_hold_the_level() -> None:
    """Which is why there is an exact one."""
    tolerance = Tolerance(0.1)
    passed = chance_to_pass(45, 0.2, tolerance, lambda lost, won: normal_p(lost, won, 45, tolerance) <= PASS_LEVEL)
    assert passed > 1.08 * PASS_LEVEL


@pytest.mark.parametrize(("only_full", "only_setting"), [(0, 0), (1, 3)])
def test_problems_that_neither_answers_say_nothing_of_a_ratio(only_full: int, only_setting: int) -> None:
    few, many = Pairs(90, only_full, only_setting, 10), Pairs(90, only_full, only_setting, 1000)
    assert exact_p(few, Tolerance(0.05, relative=True)) == exact_p(many, Tolerance(0.05, relative=True))
    assert exact_p(few, Tolerance(0.05)) > exact_p(many, Tolerance(0.05))
    assert exact_p(Pairs(0, 0, 0, 100), Tolerance(0.05, relative=True)) == 1


@pytest.mark.parametrize("differing", [0.0, 0.04])
def test_the_power_is_how_often_a_setting_without_loss_passes(differing: float) -> None:
    problems, passed, generator = 300, 0, np.random.default_rng(7)
    tolerance = Tolerance(0.03)
    for lost, won, _ in generator.multinomial(problems, [differing / 2, differing / 2, 1 - differing], size=2000):
        passed += exact_of(int(lost), int(won), problems, tolerance) <= PASS_LEVEL
    assert power(problems, tolerance, differing) == pytest.approx(passed / 2000, abs=0.04)


def test_the_power_grows_with_problems_and_a_relative_one_with_right_answers() -> None:
    assert power(500, Tolerance(0.02), 0.05) < power(700, Tolerance(0.02), 0.05) < power(1400, Tolerance(0.02), 0.05)
    relative = Tolerance(0.05, relative=True)
    assert power(500, relative, 0.01, exact_match=0.2) < power(500, relative, 0.01, exact_match=0.6)
    assert power(500, relative, 0.0, exact_match=0.0) == 0
    more = problems_for(0.9, Tolerance(0.02), 0.05, 1.0)
    assert more is not None
    assert power(more, Tolerance(0.02), 0.05) == pytest.approx(0.9, abs=0.05)


@pytest.mark.parametrize("loss", [0.01, 0.02, 0.1])
def test_the_fewest_problems_are_those_that_certify_a_setting_that_answers_as_full_depth(loss: float) -> None:
    tolerance = Tolerance(loss)
    fewest = fewest_to_certify(tolerance)
    assert exact_of(0, 0, fewest, tolerance) <= PASS_LEVEL < exact_of(0, 0, fewest - 1, tolerance)
    assert all(exact_of(0, 0, more, tolerance) <= PASS_LEVEL for more in range(fewest, fewest + 30))


def test_the_least_tolerance_is_what_so_many_problems_could_certify() -> None:
    found = least_tolerance(125)
    assert found == Tolerance(0.031)
    assert fewest_problems(Tolerance(0.031)) <= 125 < fewest_problems(Tolerance(0.03))
    assert least_tolerance(5) is None


@pytest.mark.parametrize("counts", [(0, 0, 0, 0), (4, -1, 0, 0), (1.5, 0, 0, 0)])
def test_counts_that_cannot_be_are_refused(counts: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidValueError):
        Pairs(*counts)


@pytest.mark.parametrize("loss", [0.0, 1.0, float("nan"), "2"])
def test_a_tolerance_that_cannot_be_is_refused(loss: Any) -> None:
    with pytest.raises(InvalidValueError, match="tolerance"):
        Tolerance(loss)


# -- the search, on scorers whose truth is known -----------------------------------------------------------------------


class KnownScorer:
    """A model that is right with `base`, and under a policy loses an answer with `loss(policy)`, at random."""

    num_layers = 16
    max_tokens = 64

    def __init__(self, loss: Callable[[D3, Part], float], base: float = 0.9, seed: int = 0, guess: float = 0.0) -> None:
        self._loss, self._base, self._seed, self.guess = loss, base, seed, guess
        self.calls: list[tuple[DepthPolicy, Part, int, int]] = []

    def score(self, policy: DepthPolicy, part: Part, first: int, count: int) -> Answers:
        self.calls.append((policy, part, first, count))
        schedule = policy.schedule(self.num_layers)
        layers = int(schedule.depths(self.max_tokens).sum())
        full = [random.Random(f"{self._seed}{part}{i}").random() < self._base for i in range(first, first + count)]
        if isinstance(policy, D3):
            numbers = random.Random(f"{self._seed}{policy}{part}{first}")
            loss = self._loss(policy, part)
            full = [right and numbers.random() >= loss for right in full]
        return Answers(tuple(full), count * self.max_tokens, count * layers, seconds=0.0)


def search(
    scorer: KnownScorer, *, answers: int = 7000, certification: int = 500, loss: float = 0.03, relative: bool = False
) -> Calibration:
    candidates, tolerance = make_candidates(scorer.num_layers, scorer.max_tokens), Tolerance(loss, relative)
    return calibrate(scorer, candidates, plan_budget(len(candidates), answers, certification, tolerance), tolerance)


def late_is_safe(policy: D3, part: Part) -> float:
    """Nothing is lost from start 0.7 on, everything below."""
    return 0.0 if policy.start >= 0.7 else 0.8


def test_the_fastest_safe_setting_is_chosen() -> None:
    scorer = KnownScorer(late_is_safe)
    result = search(scorer)
    assert result.chosen == D3(alpha=0.8, start=0.7)
    assert outcome(result) is Outcome.CHOSEN
    assert result.certificate is not None
    assert result.certificate.p_value <= PASS_LEVEL
    assert [trial.fate for trial in result.trials].count(Fate.CHOSEN) == 1
    fates = {(trial.policy.alpha, trial.policy.start): trial.fate for trial in result.trials}
    assert all(fate is Fate.REFUTED for (_, start), fate in fates.items() if start < 0.7)


@pytest.mark.parametrize(
    ("starts", "alphas"), [((0.7,), (0.8, 0.9999)), ((0.7, 0.8), (0.8, 0.9999)), ((0.5, 0.6, 0.7), (0.8, 0.9))]
)
def test_of_few_settings_that_all_lose_nothing_the_fastest_is_chosen(
    starts: tuple[float, ...], alphas: tuple[float, ...]
) -> None:
    scorer = KnownScorer(lambda policy, part: 0.0, base=1.0)
    candidates = make_candidates(scorer.num_layers, scorer.max_tokens, starts, alphas)
    result = calibrate(scorer, candidates, plan_budget(len(candidates), 7000, 500, Tolerance(0.03)), Tolerance(0.03))
    fastest = min(result.trials, key=lambda trial: trial.screened.mean_layers)
    assert result.chosen == fastest.policy


def test_where_the_boldest_fail_the_next_one_is_taken_and_not_the_slowest() -> None:
    """Six settings look harmless in screening; the three fastest of them lose much elsewhere."""

    def shown_late(policy: D3, part: Part) -> float:
        return 0.3 if part is not Part.SCREENING and policy.start < 0.5 else 0.0

    scorer = KnownScorer(shown_late, base=1.0)
    starts = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
    candidates = make_candidates(scorer.num_layers, scorer.max_tokens, starts, (0.9,))
    result = calibrate(scorer, candidates, plan_budget(len(candidates), 7000, 500, Tolerance(0.03)), Tolerance(0.03))
    assert [float(check.policy.start) for check in result.certificates] == [0.7, 0.5, 0.3]
    assert result.chosen == D3(0.9, 0.5)


def test_a_setting_that_saves_too_little_is_not_worth_a_loss() -> None:
    scorer = KnownScorer(late_is_safe)
    candidates = make_candidates(scorer.num_layers, scorer.max_tokens, (0.6, 0.7), (0.8, 0.9999))
    tolerance = Tolerance(0.03)
    budget = plan_budget(len(candidates), 7000, 500, tolerance)
    result = calibrate(scorer, candidates, budget, tolerance, least_saving=0.25)
    assert result.chosen == D3(0.8, 0.7)
    assert [trial.fate for trial in result.trials].count(Fate.SLOW) >= 1
    result = calibrate(scorer, candidates, budget, tolerance, least_saving=0.4)
    assert result.chosen is None
    assert "40 % of the layers saved" in reason(result)


def test_none_is_shown_to_be_safe_where_every_one_loses_much() -> None:
    scorer = KnownScorer(lambda policy, part: 0.3)
    result = search(scorer)
    assert result.chosen is None
    assert outcome(result) is Outcome.NOT_SHOWN
    assert reason(result).startswith("None could be shown to be safe: on 75 problems, no setting got through screening")
    asked = {policy for policy, part, _, _ in scorer.calls if part is Part.CERTIFICATION}
    assert asked == {FullDepth()}


def test_a_setting_that_cannot_be_certified_is_told_with_the_problems_that_might_be_enough() -> None:
    """Nothing is lost, but a tenth of the answers differ: too many for a tolerance of two points and 300 problems."""
    lucky = KnownScorer(lambda policy, part: 0.0 if part is Part.SCREENING else 0.02, base=1.0)
    result = search(lucky, certification=300, loss=0.02)
    assert outcome(result) is Outcome.NOT_SHOWN
    (check,) = result.certificates
    words = reason(result)
    assert "None could be shown to be safe with 300 problems" in words
    assert f"p {check.p_value:.2g}" in words
    assert "with a chance of" in words
    assert result.chosen is None
    assert [trial.fate for trial in result.trials].count(Fate.FAILED) == 1


# -- a task of which full depth knows nothing --------------------------------------------------------------------------


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("base", [0.0, 0.04])
def test_where_full_depth_knows_next_to_nothing_no_setting_is_tried(base: float, relative: bool) -> None:
    scorer = KnownScorer(lambda policy, part: 0.5, base=base)
    result = search(scorer, relative=relative)
    assert outcome(result) is Outcome.TOO_LITTLE_KNOWN
    assert (result.chosen, result.full, result.trials) == (None, None, [])
    assert {policy for policy, _, _, _ in scorer.calls} == {FullDepth()}
    assert "Full depth itself knows too little of this task" in reason(result)


def test_where_full_depth_knows_nothing_a_tenth_of_the_problems_shows_it() -> None:
    scorer = KnownScorer(late_is_safe, base=0.0)
    result = search(scorer)
    assert [call[2:] for call in scorer.calls] == [(0, 50)]
    assert "right on 0 of 50 problems" in reason(result)


def test_what_one_constant_answer_gets_right_is_not_known() -> None:
    """Yes or no: a model that says yes to all is right half of the time, and so is any setting of it."""
    known = search(KnownScorer(late_is_safe, base=0.9, guess=0.5))
    assert known.chosen == D3(alpha=0.8, start=0.7)
    guessed = search(KnownScorer(late_is_safe, base=0.55, guess=0.5))
    assert outcome(guessed) is Outcome.TOO_LITTLE_KNOWN
    assert "beyond the 50.0 % that one constant answer gets right" in reason(guessed)
    assert search(KnownScorer(late_is_safe, base=0.55)).chosen is not None


def test_a_relative_tolerance_is_of_what_full_depth_knows() -> None:
    """Half of what is known is lost: 3 of 6 points. Three points may be lost of 60, but not of 6."""

    def half(policy: D3, part: Part) -> float:
        return 0.5

    sizes: dict[str, Any] = {"answers": 30000, "certification": 3000}
    assert search(KnownScorer(half, base=0.06), loss=0.1, relative=True, **sizes).chosen is None
    kept = search(KnownScorer(late_is_safe, base=0.06), loss=0.1, relative=True, **sizes)
    assert kept.chosen == D3(alpha=0.8, start=0.7)
    assert outcome(search(KnownScorer(late_is_safe, base=0.06), loss=0.03, **sizes)) is Outcome.TOO_LITTLE_KNOWN


def test_too_few_right_answers_for_a_relative_tolerance_are_told_by_their_number() -> None:
    result = search(KnownScorer(late_is_safe, base=0.1), loss=0.05, relative=True)
    assert outcome(result) is Outcome.TOO_LITTLE_KNOWN
    assert "takes 75 right answers at least" in reason(result)


def test_the_best_constant_answer_is_the_commonest_one() -> None:
    booleans = calibration_task("boolean-expressions", None, seed=1, shots=2).load("test", 60)
    assert 0.38 <= best_constant(booleans) < 0.8
    assert best_constant(calibration_task("word-problems", None, seed=1, shots=None).load("test", 60)) < 0.1

    class Silent:
        prompt = "?"

        def is_right(self, answer: str) -> bool:
            return True

    assert best_constant([Silent(), Silent()]) == 0


# -- the sequence of certificates, and what it costs -------------------------------------------------------------------


def test_certification_ends_at_the_first_failure() -> None:
    def hidden(policy: D3, part: Part) -> float:
        return 0.5 if part is Part.CERTIFICATION and policy.start == 0.7 else late_is_safe(policy, part)

    scorer = KnownScorer(hidden)
    result = search(scorer)
    outcome = [check.passed for check in result.certificates]
    assert False in outcome
    assert outcome.index(False) == len(outcome) - 1
    passed = [check.policy for check in result.certificates if check.passed]
    assert result.chosen == (passed[-1] if passed else None)
    layers = [check.answers.mean_layers for check in result.certificates]
    assert layers == sorted(layers, reverse=True)


def test_each_part_answers_its_own_problems_and_the_budget_holds() -> None:
    scorer = KnownScorer(lambda policy, part: 0.01)
    result = search(scorer, answers=6000)
    assert sum(count for _, _, _, count in scorer.calls) <= 6000
    seen: dict[tuple[DepthPolicy, Part], int] = {}
    for policy, part, first, count in scorer.calls:  # no problem twice, none left out
        assert first == seen.get((policy, part), 0)
        seen[policy, part] = first + count
    certified = [policy for (policy, part) in seen if part is Part.CERTIFICATION]
    assert 2 <= len(certified) <= FINALISTS + 1
    assert all(count == 500 for (_, part), count in seen.items() if part is not Part.SCREENING)
    assert max(count for (_, part), count in seen.items() if part is Part.SCREENING) == result.budget.screening
    half = -(-len(result.trials) // 2)
    assert sum(trial.rounds >= 2 for trial in result.trials) <= half
    assert sum(trial.rounds >= 3 for trial in result.trials) <= -(-half // 2)


def test_settings_that_lose_the_tolerance_are_seldom_chosen_however_many_are_tried() -> None:
    """The whole search, selection included; many more runs: `python -m benchmarks.calibrations`."""
    found = simulate(
        lambda policy: 0.1, Tolerance(0.1), differing=0.2, runs=200, limit=60, budget=1000, candidates=small_grid()
    )
    assert found.wrong == found.chosen
    assert 1 <= found.wrong <= 10  # of 200, at 2.5 % at most each


def test_settings_without_any_loss_are_seldom_refused() -> None:
    """Two looks at the level, on 500 problems each, cost as many answers and refused a third."""
    found = simulate(lambda policy: 0.0, Tolerance(0.02), differing=0.02, runs=40, candidates=small_grid())
    assert found.wrong == 0
    assert found.chosen >= 35


def small_grid() -> list[Candidate]:
    return make_candidates(16, 64, starts=(0.4, 0.6, 0.8), alphas=(0.8, 0.99, 0.9999))


def test_settings_that_run_the_same_layers_are_one() -> None:
    candidates = make_candidates(3, 8, starts=(0.2, 0.3, 0.7), alphas=(0.6,), tails=(0, 1, 3))
    assert [candidate.alike for candidate in candidates] == [
        (D3(0.6, 0.2), D3(0.6, 0.3)),
        (D3(0.6, 0.7),),
        (D3(0.6, 0.2, tail=1), D3(0.6, 0.3, tail=1)),
    ]  # start 0.7 with tail 1, and any with tail 3, would skip nothing
    assert len(make_candidates(16, 64)) < len(make_candidates(16, 1024)) == 35


def test_a_budget_or_limit_that_can_prove_nothing_is_refused_with_both_least_sizes_and_their_reasons() -> None:
    two = Tolerance(0.02)
    for limit, answers in ((188, 7000), (190, 1000), (20, 30)):
        with pytest.raises(InvalidValueError) as caught:
            plan_budget(35, answers, limit, two)
        words = str(caught.value)
        assert words.startswith("--limit and --budget must be at least 190 and 1550 for a tolerance of 2 points")
        assert "not even a setting without any loss could be certified" in words
        assert words.endswith(f"got '{limit} and {answers}'")
    plan = plan_budget(35, 1550, 190, two)
    assert (plan.first_round, plan.certification) == (8, 190)
    assert plan_budget(35, 7000, None, two).certification == 700
    assert plan_budget(35, 7000, None, two).first_round == 46


def test_a_task_with_few_questions_sets_the_sizes_or_says_what_it_is_enough_for() -> None:
    has = Has(screening=125, certification=125)
    plan = plan_budget(35, 7000, None, Tolerance(0.05), has)
    assert (plan.certification, plan.screening) == (125, 124)
    with pytest.raises(InvalidValueError, match=r"125 questions .* a tolerance of 3\.1 points or more"):
        plan_budget(35, 7000, None, Tolerance(0.02), has)
    with pytest.raises(InvalidValueError, match="125 questions"):
        plan_budget(35, 7000, 126, Tolerance(0.05), has)
    with pytest.raises(InvalidValueError, match="20 for screening, which takes 32"):
        plan_budget(35, 7000, None, Tolerance(0.05), Has(20, 125))
    with pytest.raises(InvalidValueError, match=r"tolerance must be .*0\.2"):
        plan_budget(35, 7000, 500, Tolerance(0.2))


# -- what is written, and what is read back ----------------------------------------------------------------------------


def test_the_file_holds_setting_evidence_and_fingerprint(tmp_path: Path) -> None:
    result = search(KnownScorer(late_is_safe))
    content = policy_file(result, {"task": "a task", "seed": 3}, "sha256:00")
    write_policy_file(content, tmp_path / POLICY_FILE)
    assert json.loads((tmp_path / POLICY_FILE).read_text()) == content
    assert policy_from_directory(tmp_path) == result.chosen
    assert calibrated_for(tmp_path) == "sha256:00"
    assert calibrated_task(tmp_path) == "a task"
    evidence = content["evidence"]
    assert (evidence["task"], evidence["seed"], evidence["tolerance"], evidence["settings_tried"]) == (
        "a task",
        3,
        0.03,
        len(result.trials),
    )
    found = evidence["test"]
    assert found["problems"] == 500
    assert found["difference"] == pytest.approx(found["exact_match"] - found["exact_match_full_depth"], abs=2e-6)
    assert found["difference_interval_95"]["low"] <= found["difference"] <= found["difference_interval_95"]["high"]
    assert list(tmp_path.iterdir()) == [tmp_path / POLICY_FILE]


def test_json_holds_everything_that_was_tried() -> None:
    result = search(KnownScorer(lambda policy, part: 0.3))
    report = json.loads(json.dumps(as_dict(result, {"model": "m"})))
    assert (report["safe"], report["depth"], report["outcome"]) == (False, None, "none shown to be safe")
    assert (report["tolerance"], report["tolerance_is_relative"]) == (0.03, False)
    assert report["power"][0] == {"differing": 0.0, "certified": 1.0}
    assert len(report["settings"]) == len(result.trials)
    assert {"fate", "problems", "exact_match", "realised_mean_layers", "depth"} <= set(report["settings"][0])


def tiny_with_depth(tiny_llama: Callable[..., Any], directory: Path, name: str | None) -> Path:
    for file in tiny_llama().directory.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    content = {"depth": D3(alpha=0.9, start=0.5).describe()} | ({} if name is None else {"fingerprint": name})
    (directory / POLICY_FILE).write_text(json.dumps(content))
    return directory


def test_a_setting_for_other_weights_is_refused_by_its_file(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    own = fingerprint(tiny_llama().directory)
    small: dict[str, Any] = {"skip_tokenizer_init": True, "device": "cpu", "kv_cache_memory_bytes": 2**22}
    directory = tiny_with_depth(tiny_llama, tmp_path, own)
    with Engine(directory, **small) as engine:
        assert engine.depth == D3(alpha=0.9, start=0.5)
    tiny_with_depth(tiny_llama, tmp_path, "sha256:" + "0" * 64)
    with pytest.raises(ValueError, match=r"d3\.json was calibrated on other weights"):
        Engine(directory, **small)
    Engine(directory, depth=FullDepth(), **small).close()  # who names a depth needs no file
    tiny_with_depth(tiny_llama, tmp_path, None)
    Engine(directory, **small).close()  # written by hand, and claims nothing
    (directory / POLICY_FILE).write_text('{"depth": {"policy": "full"}, "fingerprint": 7}')
    with pytest.raises(ValueError, match=r'd3\.json has no text under "fingerprint"'):
        Engine(directory, **small)


@pytest.mark.parametrize(
    ("content", "task"),
    [
        ({"task": "gsm8k"}, "gsm8k"),
        ({"evidence": {"task": "word-problems"}}, "word-problems"),  # as files were written at first
        ({"evidence": {}}, None),
        ({}, None),
    ],
)
def test_the_file_names_the_task_that_its_setting_was_found_for(
    content: dict[str, Any], task: str | None, tmp_path: Path
) -> None:
    (tmp_path / POLICY_FILE).write_text(json.dumps({"depth": {"policy": "full"}, **content}))
    assert calibrated_task(tmp_path) == task


@pytest.mark.parametrize("content", [{"task": 7}, {"evidence": {"task": ["a"]}}, {"evidence": 3}, []])
def test_a_task_that_is_no_text_is_refused_by_its_file(content: Any, tmp_path: Path) -> None:
    (tmp_path / POLICY_FILE).write_text(json.dumps(content))
    with pytest.raises(ModelFormatError, match=r'd3\.json has no text under "task"'):
        calibrated_task(tmp_path)


def test_auto_says_for_which_task_its_setting_was_found(
    tiny_llama: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert calibrated_task(tmp_path) is None
    directory = tiny_with_depth(tiny_llama, tmp_path, None)
    with caplog.at_level("INFO", logger="d3engine"):
        resolve_depth("auto", directory)
        content = json.loads((directory / POLICY_FILE).read_text())
        (directory / POLICY_FILE).write_text(json.dumps({**content, "task": "gsm8k"}))
        resolve_depth("auto", directory)
        resolve_depth(FullDepth(), directory)
        resolve_depth("auto", tiny_llama().directory)
    assert [record.getMessage() for record in caplog.records] == [
        "depth from d3.json: D3, alpha 0.9, start 0.5 (the file does not say for which task)",
        "depth from d3.json: D3, alpha 0.9, start 0.5 (found safe for gsm8k, for no other task)",
    ]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["generate", "demo", "Question: 1 + 1?\nAnswer:"], True),
        (["generate", "demo", "Question: 1 + 1?\nAnswer:", "--depth", "full"], False),
        (["eval", "demo", "--limit", "1"], True),
        (["eval", "demo", "--limit", "1", "--policy", "full"], False),
    ],
)
def test_the_commands_say_on_stderr_for_which_task_auto_was_found(arguments: list[str], told: bool) -> None:
    result = invoke(*arguments, "--max-tokens", "2", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert ("(found safe for word-problems, for no other task)" in result.stderr) == told
    assert "found safe" not in result.stdout


def test_a_fingerprint_is_of_the_weights_and_what_they_compute(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    own = fingerprint(tiny_llama().directory)
    assert fingerprint(tiny_llama(max_shard_size="40KB").directory) == own  # shards do not matter
    assert fingerprint(tiny_llama(seed=1).directory) != own
    config = json.loads((tiny_with_depth(tiny_llama, tmp_path, None) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "eos_token_id": 5}))
    assert fingerprint(tmp_path) == own  # the same layers compute the same
    (tmp_path / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    assert fingerprint(tmp_path) != own


def test_one_changed_matrix_of_one_layer_changes_the_fingerprint(
    tiny_llama: Callable[..., Any], tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    directory = tiny_with_depth(tiny_llama, tmp_path, None)
    own = fingerprint(directory)
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"] *= 1.001
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    assert fingerprint(directory) != own


def test_the_bundled_setting_is_for_the_bundled_weights() -> None:
    directory = model_directory("demo")
    assert calibrated_for(directory) == fingerprint(directory)
    content = json.loads((directory / POLICY_FILE).read_text())
    evidence = content["evidence"]
    assert content["task"] == evidence["task"] == "word-problems"
    assert evidence["test"]["p_value_of_losing_the_tolerance"] <= PASS_LEVEL


@pytest.mark.parametrize("name", ["word-problems", "word-sorting", "multistep-arithmetic"])
def test_the_parts_share_no_question(name: str) -> None:
    parts = calibration_task(name, None, seed=2, shots=None).parts(screening=30, certification=20)
    questions = [question.prompt for part in Part for question in parts[part]]
    assert [len(parts[part]) for part in Part] == [30, 20]
    assert len(set(questions)) == 50


def data_folder(folder: Path, questions: int) -> Path:
    """A small one of the published layout: GSM8K lines, and a task of BBH, in which one input stands twice."""
    (folder / "gsm8k").mkdir()
    for split, count in (("train", 10 * questions), ("test", questions)):
        lines = [{"question": f"{split} {i}?", "answer": f"So #### {i}"} for i in range(count)]
        (folder / "gsm8k" / f"{split}.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    (folder / "bbh" / "cot-prompts").mkdir(parents=True)
    examples = [{"input": f"{i}?", "target": str(i)} for i in [0, *range(questions)]]
    (folder / "bbh" / "counting.json").write_text(json.dumps({"examples": examples}))
    example = "Q: 1?\nA: Let's think step by step.\nOne. So the answer is 1."
    (folder / "bbh" / "cot-prompts" / "counting.txt").write_text("-----\nCount.\n\n" + "\n\n".join([example] * 3))
    return folder


@pytest.mark.parametrize(("name", "shots"), [("gsm8k", 2), ("bbh", None), ("bbh/counting", 1)])
def test_parts_from_files_share_no_question(name: str, shots: int | None, tmp_path: Path) -> None:
    task = calibration_task(name, data_folder(tmp_path, 40), seed=1, shots=shots)
    parts = task.parts(screening=12, certification=8)
    asked = [question.prompt.rpartition("Q")[2] for part in Part for question in parts[part]]
    assert [len(parts[part]) for part in Part] == [12, 8]
    assert len(set(asked)) == 20
    assert task.max_tokens > 100
    assert task.stop
    if name == "gsm8k":
        assert all(("test" in question.prompt.rpartition("Q")[2]) for question in parts[Part.CERTIFICATION])
        assert all(("train" in question.prompt.rpartition("Q")[2]) for question in parts[Part.SCREENING])
    other = calibration_task(name, tmp_path, seed=2, shots=shots).parts(screening=12, certification=8)
    both = [{question.prompt.rpartition("Q")[2] for question in found[Part.CERTIFICATION]} for found in (parts, other)]
    search = {question.prompt.rpartition("Q")[2] for question in parts[Part.SCREENING] + other[Part.SCREENING]}
    assert not search & (both[0] | both[1]), "another seed certifies on what this one has searched on"
    with pytest.raises(InvalidValueError, match=r"--budget, --limit must be .*; got '41 to search, 8 to certify'"):
        task.parts(screening=41, certification=8)


# -- the command -------------------------------------------------------------------------------------------------------

# Few problems prove little, so the tolerance is wide: 16 points.
SMALL = ("--tolerance", "16", "--limit", "23", "--budget", "165", "--max-tokens", "64", "--device", "cpu")


def run(*arguments: str) -> Any:
    return invoke("calibrate", *arguments)


def invoke(*arguments: str) -> Any:
    try:
        runner = CliRunner(mix_stderr=False)  # type: ignore[call-arg]  # before click 8.2
    except TypeError:
        runner = CliRunner()
    return runner.invoke(app, [*arguments])


def test_the_command_writes_what_it_chose_on_the_bundled_model(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out, plot = tmp_path / "d3.json", tmp_path / "grid.png"
    settings = ("--alpha", "0.9", "--start", "0.2", "--start", "0.7")
    result = run("demo", *SMALL, *settings, "--out", str(out), "--plot", str(plot))
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    assert written["depth"] == D3(alpha=0.9, start=0.7).describe()
    assert written["task"] == "word-problems"
    assert written["fingerprint"] == fingerprint(model_directory("demo"))
    assert 11 < written["evidence"]["test"]["realised_mean_layers"] < 12
    assert plot.read_bytes().startswith(b"\x89PNG")
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["alpha", "\\", "start", "0.2", "0.7"] in rows
    assert any(
        line.startswith("alpha 0.9, start 0.7") and line.endswith("passed") for line in result.stdout.splitlines()
    )
    assert f"written to {out}" in result.stdout
    assert result.stdout.isascii()


def test_the_command_refuses_with_its_own_exit_code_and_writes_nothing(tmp_path: Path) -> None:
    out = tmp_path / "d3.json"
    result = run("demo", *SMALL, "--alpha", "0.9", "--start", "0.2", "--out", str(out), "--json")
    assert result.exit_code == 3, result.output
    report = json.loads(result.stdout)
    assert (report["safe"], report["depth"], report["written"]) == (False, None, None)
    assert "None could be shown to be safe" in report["reason"]
    assert not list(tmp_path.iterdir())


def test_the_command_tells_a_task_that_the_model_cannot_do_by_its_exit_code_after_a_few_answers(tmp_path: Path) -> None:
    """It passed there with any setting: who gets nothing right can lose nothing."""
    any_setting = ("--alpha", "0.8", "--start", "0.2")
    result = run("demo", *SMALL, *any_setting, "--task", "word-sorting", "--out", str(tmp_path / "d3.json"))
    assert result.exit_code == 4, result.output
    assert "Full depth itself knows too little of this task" in result.stdout
    assert "right on 0 of 3 problems" in result.stdout
    assert "at most 165 answers" in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo"], "--out"),
        (["demo", "--out", "no-such-directory/d3.json"], "--out"),
        (["demo", "--out", "d3.json", "--tolerance", "0"], "--tolerance"),
        (["demo", "--out", "d3.json", "--limit", "100"], "--limit"),
        (["demo", "--out", "d3.json", "--least-saving", "100"], "--least-saving"),
        (["demo", "--out", "d3.json", "--budget", "3000"], "--budget"),
        (["demo", "--out", "d3.json", "--alpha", "1.5"], "alpha"),
        (["demo", "--out", "d3.json", "--alpha", "1"], "skips something"),
        (["demo", "--out", "d3.json", "--plot", "no-such-directory/a.png"], "--plot"),
        (["demo", "--out", "d3.json", "--plot", "a.foo"], "--plot"),
        (["no-such-model"], "model"),
        (["demo", "--out", "d3.json", "--task", "gsm8k"], "got 'gsm8k'"),
        (["demo", "--out", "d3.json", "--task", "gsm8k", "--data", "nowhere"], "--data"),
        (["demo", "--out", "d3.json", "--num-fewshot", "-1"], "--num-fewshot"),
    ],
)
def test_what_cannot_work_is_refused_before_it_begins(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert message in result.stderr.splitlines()[-1]
    assert not list(tmp_path.iterdir())


def test_a_candidate_is_named_by_the_first_of_its_kind() -> None:
    assert Candidate(D3(0.9, 0.2), (D3(0.9, 0.2), D3(0.9, 0.3))) in make_candidates(3, 8, (0.2, 0.3), (0.9,))
