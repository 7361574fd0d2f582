"""The paired test holds its level, and says beforehand what it can show."""

from collections.abc import Callable
from math import comb, log, sqrt
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest

from d3engine.errors import InvalidValueError
from d3engine.research.calibration.outcome import problems_for
from d3engine.research.calibration.search import fewest_problems, fewest_to_certify, least_tolerance
from d3engine.research.calibration.statistics import PASS_LEVEL, Pairs, Tolerance, exact_p, noninferiority_p, power


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
def test_p_value_is_that_of_the_score_test(only_full: int, only_setting: int, problems: int, relative: bool) -> None:
    tolerance = Tolerance(0.05, relative)
    expected = slow_p(only_full, only_setting, problems, tolerance)
    assert normal_p(only_full, only_setting, problems, tolerance) == pytest.approx(expected, rel=1e-3)


def test_losses_lower_safety_and_problems_or_tolerance_raise_it() -> None:
    """More losses are less safe, and more problems or tolerance safer."""
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
def test_setting_that_loses_the_tolerance_passes_at_the_level(problems: int, gain: float, relative: bool) -> None:
    """A setting that loses the tolerance passes with the level at most."""
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


def test_power_grows_with_problems_and_with_right_answers() -> None:
    """The power grows with problems, and a relative one with right answers."""
    assert power(500, Tolerance(0.02), 0.05) < power(700, Tolerance(0.02), 0.05) < power(1400, Tolerance(0.02), 0.05)
    relative = Tolerance(0.05, relative=True)
    assert power(500, relative, 0.01, exact_match=0.2) < power(500, relative, 0.01, exact_match=0.6)
    assert power(500, relative, 0.0, exact_match=0.0) == 0
    more = problems_for(0.9, Tolerance(0.02), 0.05, 1.0)
    assert more is not None
    assert power(more, Tolerance(0.02), 0.05) == pytest.approx(0.9, abs=0.05)


@pytest.mark.parametrize("loss", [0.01, 0.02, 0.1])
def test_fewest_problems_certify_a_setting_equal_to_full_depth(loss: float) -> None:
    """The fewest problems are those that certify a setting that answers as full depth."""
    tolerance = Tolerance(loss)
    fewest = fewest_to_certify(tolerance)
    assert exact_of(0, 0, fewest, tolerance) <= PASS_LEVEL < exact_of(0, 0, fewest - 1, tolerance)
    assert all(exact_of(0, 0, more, tolerance) <= PASS_LEVEL for more in range(fewest, fewest + 30))


def test_least_tolerance_is_what_the_problems_could_certify() -> None:
    """The least tolerance is what this number of problems could certify."""
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
