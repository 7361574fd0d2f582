"""Width decay gives each step the student that its formula or its table says."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from d3engine.cli.depth_options import parse_depth
from d3engine.depth import NEVER, Distilled, Level, Schedule, Width
from d3engine.depth.labels import policy_in_words
from d3engine.errors import InvalidValueError

widths = st.lists(st.floats(0.01, 0.99), min_size=1, max_size=5, unique=True)


@given(widths, st.floats(0.3, 1.0), st.data())
def test_width_at_a_step_is_rounded_down_to_the_ladder(found: list[float], alpha: float, data: st.DataObject) -> None:
    """Every step runs the widest of the ladder within alpha ** step, and at last the narrowest within `least`."""
    ladder = sorted(found, reverse=True)
    least = data.draw(st.sampled_from([0.0, *ladder]))
    names = [f"{width}" for width in ladder]
    schedule = Width(names, alpha, ladder, least).schedule(4)
    kept = [width for width in ladder if width >= least]
    for step in [*range(1, 30), 10_000]:
        fitting = [width for width in (1.0, *kept) if width <= alpha**step]
        width = max(fitting) if fitting else min(kept)
        assert schedule.student_at(step) == (None if width == 1.0 else f"{width}")
    assert schedule.student_at(0) is schedule.student_at(-1) is None
    assert schedule.depths(30).tolist() == [4] * 30


def test_width_of_the_documented_ladder_falls_at_its_steps() -> None:
    """At alpha 0.999 the width 0.8 begins where alpha ** step falls below 0.9, at step 106."""
    policy = Width(["w09", "w08"], alpha=0.999, widths=[0.9, 0.8])
    assert policy.levels() == [Level(1, "w09", 0.9), Level(106, "w08", 0.8)]
    assert Width(["w09", "w08"], alpha=0.85, widths=[0.9, 0.8]).levels() == [Level(1, "w08", 0.8)]
    assert Width(["w09", "w08"], alpha=1, widths=[0.9, 0.8]).levels() == []


def test_width_by_a_table_skips_layers_from_its_first_step_on() -> None:
    """A table of steps names each student, and layers are left out from the first of them on."""
    schedule = Width(["a", "b"], steps=[3, 9], skip_layers=[1]).schedule(3)
    assert [schedule.student_at(step) for step in (2, 3, 8, 9, 99)] == [None, "a", "a", "b", "b"]
    assert schedule.depths(5).tolist() == [3, 3, 3, 2, 2]
    assert [schedule.same_layers_until(step) for step in (-1, 2, 3, 9)] == [3, 3, 9, NEVER]
    assert schedule.runs(12) == [(0, 3), (3, 9), (9, 12)]
    assert schedule.first_skipping_step == 3


def test_schedule_of_a_student_skips_no_layer_but_changes_them() -> None:
    """A student's layers are other layers, which no cutoff tells."""
    schedule = Distilled().schedule(4)
    assert schedule.first_skipping_step == NEVER
    assert schedule.same_layers_until(0) == 1
    assert schedule != Schedule.nested([NEVER] * 4)


def test_words_of_a_width_policy_are_read_and_written() -> None:
    """The command line spells the policy, and titles leave out what stands at its default."""
    policy = Width(["w09.st", "w08.st"], alpha=0.999, widths=[0.9, 0.8])
    assert parse_depth("width alpha=0.999 students=w09.st,w08.st widths=0.9,0.8") == policy
    assert parse_depth("width students=a,b from-steps=1,400") == Width(["a", "b"], steps=[1, 400])
    assert policy_in_words(policy) == "Width decay, students ['w09.st', 'w08.st'], alpha 0.999, widths [0.9, 0.8]"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"students": [], "steps": []}, "students must be 1 to 64 files of students"),
        ({"students": ["a"] * 65, "steps": range(1, 66)}, "students must be 1 to 64 files of students"),
        ({"students": "a", "steps": [1]}, "students must be a list of 1 to 64 files"),
        ({"students": ["a", ""], "steps": [1, 2]}, "student must be a file of a student"),
        ({"students": ["a"]}, "steps must be the first step of each of 1 students, or alpha given"),
        ({"students": ["a"], "steps": [0]}, r"steps\[0\] must be an integer from 1 to"),
        ({"students": ["a", "b"], "steps": [4, 4]}, "steps must be rising"),
        ({"students": ["a"], "steps": [1], "widths": [0.5]}, "widths must be absent without alpha"),
        ({"students": ["a"], "steps": [1], "least": 0.5}, "least must be absent without alpha"),
        ({"students": ["a"], "alpha": 0.9, "steps": [1], "widths": [0.5]}, "steps must be absent beside alpha"),
        ({"students": ["a"], "alpha": 0.0, "widths": [0.5]}, "alpha must be a finite number in"),
        ({"students": ["a"], "alpha": 0.9}, "widths must be those of the 1 students"),
        ({"students": ["a"], "alpha": 0.9, "widths": [1.0]}, r"widths\[0\] must be a finite number in"),
        ({"students": ["a"], "alpha": 0.9, "widths": ["x"]}, r"widths\[0\] must be a finite number in"),
        ({"students": ["a", "b"], "alpha": 0.9, "widths": [0.5, 0.6]}, "widths must be falling"),
        ({"students": ["a"], "alpha": 0.9, "widths": [0.5], "least": 0.6}, "least must be a finite number in"),
    ],
)
def test_width_refuses_wrong_arguments_by_name(arguments: dict[str, Any], message: str) -> None:
    """What is no ladder is refused, and the message names the field."""
    with pytest.raises(InvalidValueError, match=message):
        Width(**arguments)


@pytest.mark.parametrize("levels", [[Level(0, "a")], [Level(2, "a"), Level(2, "b")], [Level(1, "")]])
def test_schedule_refuses_students_out_of_order(levels: list[Level]) -> None:
    """Students begin at rising steps behind the prompt, and have names."""
    with pytest.raises(InvalidValueError, match="student"):
        Schedule.nested([NEVER] * 2, students=levels)
