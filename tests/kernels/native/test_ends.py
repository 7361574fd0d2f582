"""A run ends with the last of its answers."""

import numpy as np
import pytest
from native_models import Case, Shape, at_places

STEPS = 8


@pytest.fixture(scope="module")
def case() -> Case:
    return Case(Shape(layers=2, rows=5, vocab=500))


def test_the_last_row_that_comes_to_its_end_ends_the_run(case: Case) -> None:
    wanted, scores, _ = case.decode(STEPS)
    decoder = case.decoder()
    for last in range(1, STEPS):
        places = np.minimum(np.arange(5) + 1, last)  # of each row's end in the run
        ends = np.stack((np.full(5, -1), wanted[places, np.arange(5)]), axis=1)
        first = [int((wanted[:, row] == ends[row, 1]).argmax()) for row in range(5)]
        found, found_scores = decoder.run(case.rows, STEPS, ends=ends)
        assert len(found) == max(first) + 1 < STEPS
        np.testing.assert_array_equal(found, wanted[: len(found)])
        np.testing.assert_array_equal(found_scores, scores[: len(found)])


def test_a_row_without_an_end_goes_on_and_so_does_the_run(case: Case) -> None:
    wanted, _, _ = case.decode(STEPS)
    ends = wanted[:1].T.copy()
    ends[3] = -1
    assert len(case.decoder().run(case.rows, STEPS, ends=ends)[0]) == STEPS


def test_a_row_whose_numbers_are_not_finite_has_ended() -> None:
    broken = Case(Shape(layers=2, rows=5, vocab=500))
    broken.model.embedding[int(broken.rows.tokens[0])] = float("nan")
    ends = np.full((1, 1), -1)
    assert len(broken.decoder().run(at_places(broken.rows, [0]), STEPS, ends=ends)[0]) == 1
