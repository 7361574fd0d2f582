"""A schedule answers the same questions from cutoffs as from a table, and refuses what cannot run."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from d3engine.depth import NEVER, Schedule
from d3engine.errors import InvalidValueError

cutoff_lists = st.lists(st.one_of(st.integers(1, 12), st.just(NEVER)), min_size=1, max_size=8)
tables = st.integers(1, 5).flatmap(
    lambda layers: st.lists(st.lists(st.booleans(), min_size=layers, max_size=layers), max_size=7).map(
        lambda rows: np.array([[True] * layers, *rows])
    )
)


def row_at(table: np.ndarray, step: int) -> np.ndarray:
    return table[min(max(step, 0), len(table) - 1)]


def schedule_of(table: np.ndarray) -> Schedule:
    return Schedule.from_table(table, on_skip="project")


def test_cutoffs_say_which_layers_run_at_which_step() -> None:
    schedule = Schedule.nested([NEVER, 1, 3, NEVER])
    assert schedule.num_layers == 4
    assert schedule.is_nested
    assert schedule.table is None
    assert schedule.first_skipping_step == 1
    assert schedule.active(-1).tolist() == [True, True, True, True]
    assert schedule.active(0).tolist() == [True, True, True, True]
    assert schedule.active(1).tolist() == [True, False, True, True]
    assert schedule.active(2).tolist() == [True, False, True, True]
    assert schedule.active(3).tolist() == [True, False, False, True]
    assert schedule.depths(5).tolist() == [4, 3, 3, 2, 2]
    assert [schedule.same_layers_until(step) for step in (-1, 0, 1, 2, 3, 999)] == [1, 1, 3, 3, NEVER, NEVER]


def test_a_schedule_that_never_skips_has_no_first_skipping_step() -> None:
    schedule = Schedule.nested([NEVER, NEVER])
    assert schedule.first_skipping_step == NEVER
    assert schedule.same_layers_until(-1) == NEVER
    assert schedule.depth_at(NEVER - 1) == 2


def test_a_table_that_wakes_layers_up_stays_a_table() -> None:
    schedule = Schedule.from_table(np.array([[1, 1, 1], [1, 0, 1], [1, 0, 1], [1, 1, 0]], dtype=bool))
    assert not schedule.is_nested
    assert schedule.on_skip == "copy"
    assert (schedule.cutoffs == NEVER).all()
    assert schedule.depths(6).tolist() == [3, 2, 2, 2, 2, 2]
    assert schedule.active(2).tolist() == [True, False, True]
    assert schedule.active(3).tolist() == schedule.active(10**6).tolist() == [True, True, False]
    assert [schedule.same_layers_until(step) for step in (-1, 0, 1, 2, 3, 50)] == [1, 1, 3, 3, NEVER, NEVER]
    assert schedule.first_skipping_step == 1


def test_a_nested_table_becomes_cutoffs_and_keeps_its_on_skip() -> None:
    table = np.array([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 0, 0]], dtype=bool)
    assert Schedule.from_table(table, "none") == Schedule.nested([NEVER, 2, 1])
    assert Schedule.from_table(table).on_skip == "copy"


@given(tables)
def test_a_schedule_made_from_a_table_runs_the_rows_of_the_table(table: np.ndarray) -> None:
    schedule = schedule_of(table)
    steps = range(-2, len(table) + 3)
    for step in steps:
        assert schedule.active(step).tolist() == row_at(table, step).tolist()
        assert schedule.depth_at(step) == row_at(table, step).sum()
    assert schedule.depths(len(table) + 3).tolist() == [schedule.depth_at(i) for i in range(len(table) + 3)]


@given(tables)
def test_a_run_of_steps_ends_where_the_layers_first_change(table: np.ndarray) -> None:
    schedule = schedule_of(table)
    for step in range(-1, len(table) + 2):
        until = schedule.same_layers_until(step)
        for later in range(step, min(until, len(table) + 2)):
            assert (row_at(table, later) == row_at(table, step)).all()
        assert until == NEVER or (row_at(table, until) != row_at(table, step)).any()


@given(tables, st.integers(0, 9))
def test_runs_cut_the_steps_exactly_where_the_layers_change(table: np.ndarray, num_steps: int) -> None:
    runs = schedule_of(table).runs(num_steps)
    assert [step for start, end in runs for step in range(start, end)] == list(range(num_steps))
    starts = [start for start, _ in runs[1:]]
    assert starts == [i for i in range(1, num_steps) if (row_at(table, i) != row_at(table, i - 1)).any()]


@given(tables)
def test_a_table_is_nested_exactly_when_no_layer_wakes_up(table: np.ndarray) -> None:
    wakes = any((table[i + 1] & ~table[i]).any() for i in range(len(table) - 1))
    assert schedule_of(table).is_nested == (not wakes)


@given(cutoff_lists)
def test_the_table_of_a_nested_schedule_gives_the_schedule_back(cutoffs: list[int]) -> None:
    schedule = Schedule.nested(cutoffs)
    table = np.stack([schedule.active(step) for step in range(14)])
    assert Schedule.from_table(table, "none") == schedule


@given(tables)
def test_repeating_the_last_row_changes_nothing(table: np.ndarray) -> None:
    longer = np.concatenate([table, table[-1:], table[-1:]])
    assert schedule_of(table) == schedule_of(longer)
    assert hash(schedule_of(table)) == hash(schedule_of(longer))


def test_schedules_are_equal_by_value_and_serve_as_keys() -> None:
    one, same = Schedule.nested([NEVER, 2]), Schedule.nested(np.array([NEVER, 2]))
    assert one == same
    assert len({one, same}) == 1
    assert one != Schedule.nested([NEVER, 3])
    assert one != Schedule.nested([NEVER, 2], "copy")
    assert one != Schedule.nested([NEVER, 2, NEVER])
    assert one != "a schedule"
    waking = np.array([[1, 1], [1, 0], [1, 1]], dtype=bool)
    assert Schedule.from_table(waking) != Schedule.nested([NEVER, NEVER], "copy")
    assert Schedule.from_table(waking) != Schedule.from_table(waking, "project")


def test_schedule_is_frozen_and_keeps_its_own_array() -> None:
    """A schedule is frozen and does not follow the caller's array."""
    cutoffs = np.array([NEVER, 5], dtype=np.int32)
    schedule = Schedule.nested(cutoffs)
    cutoffs[1] = 1
    assert schedule.cutoffs.tolist() == [NEVER, 5]
    assert schedule.cutoffs.dtype == np.int32
    with pytest.raises(ValueError, match="read-only"):
        schedule.cutoffs[1] = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        schedule.on_skip = "copy"  # type: ignore[misc]
    table = np.array([[1, 1], [1, 0], [1, 1]], dtype=bool)
    waking = Schedule.from_table(table)
    table[1, 1] = True
    waking.active(1)[:] = True  # a copy: the schedule must not change through what it hands out
    assert waking.active(1).tolist() == [True, False]


@pytest.mark.parametrize("cutoffs", [[0, 5], [-1], [NEVER + 1], [], [1.5], [[1]], ["1"], [True], [[1, 2], [3]]])
def test_cutoffs_that_make_no_sense_are_refused_by_name(cutoffs: list[object]) -> None:
    with pytest.raises(InvalidValueError, match="cutoffs"):
        Schedule.nested(cutoffs)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "table", [[], [[]], [True], [[1, 1]], [[True, False]], [[False], [True]], [[True, True], [True]]]
)
def test_tables_that_make_no_sense_are_refused_by_name(table: list[object]) -> None:
    with pytest.raises(InvalidValueError, match="table"):
        Schedule.from_table(table)  # type: ignore[arg-type]


def test_a_waking_table_without_entries_is_refused_by_name() -> None:
    with pytest.raises(InvalidValueError, match=r"on_skip must be .*; got 'none'"):
        Schedule.from_table(np.array([[1, 1], [1, 0], [1, 1]], dtype=bool), on_skip="none")


def test_copy_with_layer_0_skipped_is_refused() -> None:
    """Copy is refused where layer 0 is skipped, since nothing is below it."""
    with pytest.raises(InvalidValueError, match="layer 0"):
        Schedule.nested([1, NEVER], on_skip="copy")
    with pytest.raises(InvalidValueError, match="layer 0"):
        Schedule.from_table(np.array([[1, 1], [0, 1], [1, 1]], dtype=bool))
    assert Schedule.nested([1, NEVER], on_skip="none").depth_at(1) == 1


@pytest.mark.parametrize("on_skip", ["Copy", "", None, 0])
def test_an_unknown_on_skip_is_refused_by_name(on_skip: object) -> None:
    with pytest.raises(InvalidValueError, match="on_skip"):
        Schedule.nested([NEVER], on_skip)  # type: ignore[arg-type]


def test_a_table_beside_cutoffs_must_fit_them() -> None:
    waking = np.array([[1, 1], [1, 0], [1, 1]], dtype=bool)
    with pytest.raises(InvalidValueError, match="cutoffs"):
        Schedule(np.array([NEVER, 3]), waking, "copy")
    with pytest.raises(InvalidValueError, match="table"):
        Schedule(np.array([NEVER] * 3), waking, "copy")


def test_a_negative_number_of_steps_is_refused_by_name() -> None:
    with pytest.raises(InvalidValueError, match=r"num_steps must be .*; got -1"):
        Schedule.nested([NEVER]).depths(-1)
