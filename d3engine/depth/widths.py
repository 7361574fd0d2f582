"""Width decay: narrower and narrower students as an answer grows, over every layer's attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from d3engine.depth.policy import DepthPolicy, option
from d3engine.depth.schedule import (
    NEVER,
    Level,
    OnSkip,
    Schedule,
    check_skips,
    check_student,
    checked_layers,
    cutoffs_without,
    first_step_below,
)
from d3engine.depth.skips import ON_SKIP
from d3engine.errors import InvalidValueError, require, require_integer, require_number

MAX_STUDENTS = 64
"""Students of a policy at most: requests may bring one."""


@dataclass(frozen=True)
class Width(DepthPolicy):
    """Width decay (ours, after D3): generated tokens run narrower and narrower students.

    Of the model's own weights (width 1) and the students, token i = 0, 1, 2 ... runs the widest whose width is at most
    `alpha**i` in float64, or the narrowest where none is. So widths are rounded down, as `floor(L * alpha**i)` of D3
    is: no token runs more than the formula says, until the narrowest is reached. Or a table says at which step each
    student begins. The prompt pass, which yields token 0, runs the model's own weights. Every layer's attention runs,
    so the KV cache has no holes, and a row may change its student at any step, whatever the order of widths.

    A step reads the weights of each student that one of its rows is at, one after the other. Students share no rows of
    the model or of each other: gate and up are one contiguous matrix for the kernels, and each down matrix is refitted.
    On a CPU each also has a decoder with scratch memory. Multi-step decoding ends where a row changes its student.

    Args:
        students: files of `d3engine depth train`, in the order in which they begin.
        alpha: the decay, in (0, 1]; 1 keeps the model's own weights.
        widths: beside alpha, the width of each student, falling: the part of the MLPs' neurons that it runs, on average
            over the layers that run (`d3engine depth inspect` shows it). A file of another width is refused.
        least: beside alpha, the least width; students below it never run.
        steps: in place of alpha, the step at which each student begins, from 1, rising.
        skip_layers: ids of the layers that every student leaves out, from the first student on.
        on_skip: what the cache holds at a skipped layer; "none" is enough, since nothing reads it.
    """

    students: Sequence[str] = field(metadata=option("files of `d3engine depth train` in their order, a.st,b.st"))
    alpha: float | None = field(default=None, metadata=option("the decay, in (0, 1]"))
    widths: Sequence[float] = field(default=(), metadata=option("width of each student beside alpha, such as 0.9,0.8"))
    least: float = field(default=0.0, metadata=option("width below which no student runs [default: 0]", "least-width"))
    steps: Sequence[int] = field(
        default=(), metadata=option("first step of each student in place of alpha, such as 1,64", "from-steps")
    )
    skip_layers: Sequence[int] = field(default=(), metadata=option("layers left out, such as 3,5,8-11"))
    on_skip: OnSkip = field(default="none", metadata=ON_SKIP)

    name: ClassVar[str] = "width"
    label: ClassVar[str] = "Width decay"

    def __post_init__(self) -> None:
        allowed = f"1 to {MAX_STUDENTS} files of students"
        students = _listed("students", self.students, allowed)
        require(0 < len(students) <= MAX_STUDENTS, "students", self.students, allowed)
        for student in students:
            check_student(student)
        object.__setattr__(self, "students", students)
        widths, steps = _listed("widths", self.widths, "numbers"), _listed("steps", self.steps, "integers")
        if self.alpha is None:
            for name, value in (("widths", widths), ("least", self.least)):
                require(not value, name, value, "absent without alpha")
            allowed = f"the first step of each of {len(students)} students, or alpha given in their place"
            steps = tuple(require_integer(f"steps[{nth}]", one, 1, NEVER - 1) for nth, one in enumerate(steps))
            require(len(steps) == len(students), "steps", self.steps, allowed)
            require(all(a < b for a, b in pairwise(steps)), "steps", self.steps, "rising")
        else:
            object.__setattr__(self, "alpha", require_number("alpha", self.alpha, 0, 1, open_low=True))
            require(not steps, "steps", self.steps, "absent beside alpha")
            bounds: dict[str, Any] = {"open_low": True, "open_high": True}
            widths = tuple(require_number(f"widths[{nth}]", one, 0, 1, **bounds) for nth, one in enumerate(widths))
            allowed = f"those of the {len(students)} students (d3engine depth inspect shows them)"
            require(len(widths) == len(students), "widths", self.widths, allowed)
            require(all(a > b for a, b in pairwise(widths)), "widths", self.widths, "falling, as those of students do")
            object.__setattr__(self, "least", require_number("least", self.least, 0, widths[0]))
        object.__setattr__(self, "widths", widths)
        object.__setattr__(self, "steps", steps)
        object.__setattr__(self, "skip_layers", checked_layers("skip_layers", self.skip_layers))
        check_skips(self)

    def levels(self) -> list[Level]:
        """Each student with the step at which it begins; those that no step runs are left out."""
        if self.alpha is None:
            return [Level(step, student) for step, student in zip(self.steps, self.students, strict=True)]
        alpha, found, wider = self.alpha, list[Level](), 1.0
        for student, width in zip(self.students, self.widths, strict=True):
            step = NEVER if width < self.least else first_step_below(lambda step: alpha**step, wider)
            wider = width
            if found and found[-1].step == step:  # the wider one's width lies between those of two steps
                found.pop()
            if step != NEVER:
                found.append(Level(step, student, width))
        return found

    def schedule(self, num_layers: int) -> Schedule:
        """The nested schedule, with its students; refuses a layer that the model has not."""
        require_integer("num_layers", num_layers, 1)
        cutoffs, levels = cutoffs_without("skip_layers", list(self.skip_layers), num_layers), self.levels()
        first = levels[0].step if levels else NEVER
        return Schedule.nested(np.where(cutoffs == NEVER, NEVER, first), self.on_skip, students=levels)


def _listed(field: str, values: Any, allowed: str) -> tuple[Any, ...]:
    """The values as a tuple; a text is no list of them."""
    if not isinstance(values, Sequence | np.ndarray) or isinstance(values, str | bytes):
        raise InvalidValueError(field, values, f"a list of {allowed}")
    return tuple(values)
