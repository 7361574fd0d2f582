"""A depth schedule: one vector of L integers, `layer l runs at step i <=> i < cutoffs[l]`;
or a table, where layers are reactivated and the entries they miss must be filled (`on_skip`)."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from d3engine.errors import InvalidValueError, require, require_integer


def exact_fraction(field: str, value: Any) -> Fraction:
    """The number a person wrote: the float 0.29 is 29/100 here, so that 0.29 of 100 layers is 29 and not 28.

    A float that a division by up to 10,000 gives is that fraction: 2/3 of 3 layers are 2.
    Takes an int, a float, a Fraction, a Decimal, or one of them as text ("0.29", "1/3"), as JSON holds it.
    """
    if isinstance(value, int | float | Fraction | Decimal | str) and not isinstance(value, bool):
        try:
            exact = _exact(str(value))
        except (ValueError, ZeroDivisionError):
            exact = None  # not a number, or not a finite one
        if exact is not None and abs(exact) <= 10**300:
            return exact
    raise InvalidValueError(field, value, "a finite number, or a fraction as text such as '1/3'")


def _exact(text: str) -> Fraction:
    if "/" not in text:
        rounded = float(text)
        if not math.isfinite(rounded):
            raise ValueError(text)
        if rounded == 0:
            return Fraction(0)  # "1e-999999999" as well: its exact value would take minutes and gigabytes
        # The float 16/11 is no decimal that a person wrote: 16 / 1.4545454545454546 is below 11.
        simple = Fraction(text).limit_denominator(10_000)
        if float(simple) == rounded:
            return simple
    return Fraction(text)


def plain_number(value: Fraction) -> float | Fraction:
    """`value` as a float where a float says the same (3/5 is 0.6), so that equal policies compare equal."""
    return float(value) if Fraction(str(float(value))) == value else value


def first_step_below(falling: Callable[[int], float], limit: float) -> int:
    """The first step >= 1 at which `falling`, which never rises, is below `limit`; `NEVER` if none is."""
    low, high = 1, NEVER
    while low < high:
        middle = (low + high) // 2
        if falling(middle) < limit:
            high = middle
        else:
            low = middle + 1
    return low


def window_cutoffs(num_layers: int, start: int, end: int, layers_wanted: Callable[[int], float]) -> Int32Array:
    """Int32 [L]: the cutoffs of the window [start, start + L - keep_i), never past `end`.

    `keep_i` is `floor(layers_wanted(i))`, which must not rise with the step i. Layer start + j is in the
    window once `keep_i < L - j`, and for a whole number on the right the floor makes no difference.
    """
    cutoffs = np.full(num_layers, NEVER, np.int32)
    for layer in range(start, end):
        cutoffs[layer] = first_step_below(layers_wanted, num_layers - (layer - start))
    return cutoffs


def checked_layers(field: str, layers: Any) -> tuple[int, ...]:
    """Layer ids in ascending order, without one twice."""
    allowed = "different layer ids, from 0"
    if not isinstance(layers, Sequence | np.ndarray) or isinstance(layers, str | bytes):
        raise InvalidValueError(field, layers, allowed)
    ids = sorted(require_integer(f"{field}[{place}]", layer, 0) for place, layer in enumerate(layers))
    require(len(set(ids)) == len(ids), field, layers, allowed)
    return tuple(ids)


def cutoffs_without(field: str, layers: Sequence[int], num_layers: int) -> Int32Array:
    """Int32 [L]: 1 for these layers, in ascending order, and `NEVER` for all others; refuses what the model has not."""
    require(not layers or layers[-1] < num_layers, field, list(layers), f"layer ids from 0 to {num_layers - 1}")
    cutoffs = np.full(num_layers, NEVER, np.int32)
    cutoffs[list(layers)] = 1
    return cutoffs


NEVER: int = 2**31 - 1
"""The cutoff of a layer that is never skipped, and the end of a run of steps without end; fits an int32."""

OnSkip: TypeAlias = Literal["none", "copy", "project"]
"""What the cache holds at a skipped layer: nothing, the entry of the nearest layer below that ran, or K and V
projected from the hidden state that passed through."""

ON_SKIP: tuple[str, ...] = ("none", "copy", "project")

Int32Array: TypeAlias = npt.NDArray[np.int32]
BoolArray: TypeAlias = npt.NDArray[np.bool_]


AUTO_BRIDGES = "auto"
"""The bridges beside the weights."""


def check_student(student: Any) -> None:
    """Refuse anything but text that names a student."""
    is_name = isinstance(student, str) and student != ""
    require(is_name, "student", student, f'a file of a student, or "{AUTO_BRIDGES}"')


def check_skips(of: Any) -> None:
    """Refuse in a policy or a schedule another rule for the entries of skipped layers than our three, and bridges that
    are neither None nor a name."""
    on_skip, bridges = of.on_skip, getattr(of, "bridges", None)
    require(isinstance(on_skip, str) and on_skip in ON_SKIP, "on_skip", on_skip, f"one of {', '.join(ON_SKIP)}")
    is_name = isinstance(bridges, str) and bridges != ""
    require(bridges is None or is_name, "bridges", bridges, f'a file of bridges, "{AUTO_BRIDGES}", or None')


class Level(NamedTuple):
    """The student that generated tokens run from a step on.

    `width`, where it is not None, is the part of the MLPs' neurons that the file must have: the policy counts on it.
    """

    step: int
    student: str
    width: float | None = None


@dataclass(frozen=True, eq=False)
class Schedule:
    """The layers of each generation step; made by `Schedule.nested` or `Schedule.from_table`.

    Step 0 is the first generated token, which the prompt pass yields, so it is always at full depth; prompt
    tokens are at step -1. Two schedules are equal when they have the same cutoffs, table and `on_skip`.

    Attributes:
        cutoffs: int32 [L], read-only: the first step that skips the layer, at least 1, `NEVER` for none. All
            `NEVER`, and not used, when `table` is given.
        table: None when nested; else bool [steps, L], read-only: row i is step i, the last row holds from
            there on.
        on_skip: what the cache holds at a skipped layer.
        bridges: the maps that stand in for each window of skipped layers: a file, or "auto" for the one beside the
            weights. None: a hidden state passes skipped layers as it is.
        students: the weights that generated tokens run, each from its own step on, in order: a file, or "auto" for the
            one beside the model's. Before the first of them, and where there is none: the model's own.
    """

    cutoffs: Int32Array
    table: BoolArray | None = None
    on_skip: OnSkip = "none"
    bridges: str | None = None
    students: tuple[Level, ...] = ()

    def __post_init__(self) -> None:
        check_skips(self)
        steps = [0, *(require_integer("step of a student", level.step, 1, NEVER - 1) for level in self.students)]
        require(all(a < b for a, b in pairwise(steps)), "students", self.students, "in the order of their steps")
        for level in self.students:
            check_student(level.student)
        projects = self.bridges is not None and self.on_skip == "project"
        require(
            not projects, "on_skip", "project", "'none' or 'copy' beside bridges, which change what would be projected"
        )
        _set(self, "cutoffs", _checked_cutoffs(self.cutoffs))
        if self.table is not None:
            _set(self, "table", _checked_table(self.table))
            self._check_table_fields()
        if self.on_skip == "copy":
            layer_0_sleeps = self.cutoffs[0] != NEVER if self.table is None else not self.table[:, 0].all()
            require(
                not layer_0_sleeps,
                "on_skip",
                "copy",
                "'none' or 'project' where layer 0 may be skipped, since it has no layer below to copy",
            )

    def _check_table_fields(self) -> None:
        assert self.table is not None
        require(
            self.table.shape[1] == self.num_layers,
            "table",
            self.table.shape,
            f"of shape [steps, {self.num_layers} layers]",
        )
        require(bool((self.cutoffs == NEVER).all()), "cutoffs", self.cutoffs.tolist(), "all NEVER beside a table")
        require(
            self.on_skip != "none",
            "on_skip",
            self.on_skip,
            "'copy' or 'project', since layers that run again after a skip would read entries nobody wrote",
        )

    @classmethod
    def nested(
        cls,
        cutoffs: Sequence[int] | npt.NDArray[Any],
        on_skip: OnSkip = "none",
        bridges: str | None = None,
        students: Sequence[Level] = (),
    ) -> Schedule:
        """The schedule in which layer l runs at step i while `i < cutoffs[l]`."""
        return cls(_as_array("cutoffs", cutoffs), None, on_skip, bridges, tuple(students))

    @classmethod
    def from_table(
        cls,
        table: Sequence[Sequence[bool]] | npt.NDArray[Any],
        on_skip: OnSkip = "copy",
        bridges: str | None = None,
    ) -> Schedule:
        """The schedule whose step i runs the layers of row i; the last row holds for all later steps.

        Row 0 must be all True, since the prompt pass runs everything. A nested table (a layer that is off
        stays off) becomes cutoffs.
        """
        rows = _checked_table(_as_array("table", table))
        num_layers = rows.shape[1]
        if bool((rows[1:] <= rows[:-1]).all()):
            running_steps = rows.sum(axis=0)
            return cls(np.where(rows[-1], NEVER, running_steps), None, on_skip, bridges)
        return cls(np.full(num_layers, NEVER), rows, on_skip, bridges)

    @property
    def num_layers(self) -> int:
        """L, the layers of the model."""
        return len(self.cutoffs)

    @property
    def is_nested(self) -> bool:
        """Whether a skipped layer stays skipped, so that `cutoffs` says everything."""
        return self.table is None

    @property
    def first_skipping_step(self) -> int:
        """The first step that runs fewer than L layers; `NEVER` when all run for ever."""
        return self._same_numbers_until(0)

    def student_at(self, step: int) -> str | None:
        """The student whose weights run at `step`; None where the model's own do."""
        found = None
        for level in self.students:
            if level.step > step:
                break
            found = level.student
        return found

    def same_student_until(self, step: int) -> int:
        """The largest end such that all of steps [step, end) run the same weights; `NEVER` if for ever."""
        return next((level.step for level in self.students if level.step > step), NEVER)

    def active(self, step: int) -> BoolArray:
        """Bool [L]: the layers that run at `step`; all of them for the prompt (step -1) and step 0."""
        if self.table is None:
            running: BoolArray = step < self.cutoffs
        else:
            running = self.table[self._row(step)].copy()
        return running

    def depth_at(self, step: int) -> int:
        """How many layers run at `step`."""
        if self.table is None:
            # Of so few numbers a list is looked through sooner than an array.
            return len(self._cutoffs_listed) - bisect_right(self._cutoffs_listed, step)
        return int(self._depth_of_row[self._row(step)])

    def depths_between(self, first: int, stop: int) -> list[int]:
        """How many layers run at each of the steps [first, stop)."""
        found: list[int] = []
        while first < stop:
            end = min(self._same_numbers_until(first), stop)
            found += [self.depth_at(first)] * (end - first)
            first = end
        return found

    def depths(self, num_steps: int) -> npt.NDArray[np.int64]:
        """Int64 [num_steps]: how many layers run at steps 0 .. num_steps - 1."""
        steps = np.arange(require_integer("num_steps", num_steps, 0))
        if self.table is None:
            return self.num_layers - self._cutoffs_in_order.searchsorted(steps, side="right")
        return self._depth_of_row[np.minimum(steps, len(self.table) - 1)]

    def same_layers_until(self, step: int) -> int:
        """The largest end such that all of steps [step, end) run the same layers; `NEVER` if for ever.

        A layer that a student has other weights for is another layer.
        """
        return min(self._same_numbers_until(step), self.same_student_until(step))

    def _same_numbers_until(self, step: int) -> int:
        """The same, whatever weights the layers have."""
        if self.table is None:
            later = bisect_right(self._cutoffs_listed, step)
            return NEVER if later == len(self._cutoffs_listed) else self._cutoffs_listed[later]
        row = self._row(step)
        differs = (self.table[row + 1 :] != self.table[row]).any(axis=1)
        return row + 1 + int(differs.argmax()) if differs.any() else NEVER

    def runs(self, num_steps: int) -> list[tuple[int, int]]:
        """The steps 0 .. num_steps - 1 cut where the layers change: (first step, end step) of each piece."""
        require_integer("num_steps", num_steps, 0)
        pieces, step = [], 0
        while step < num_steps:
            end = min(self.same_layers_until(step), num_steps)
            pieces.append((step, end))
            step = end
        return pieces

    def windows(self) -> list[tuple[int, int]]:
        """(first, stop) of every run of neighbouring layers that some step leaves out, in order."""
        if self.table is None:
            changes = [int(step) for step in np.unique(self.cutoffs) if step != NEVER]
            layers = [self.active(step) for step in changes]
        else:
            layers = list(self.table)
        return sorted({window for active in layers for window in windows_of(active)})

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        return self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def _identity(self) -> tuple[object, ...]:
        table = None if self.table is None else (self.table.shape, self.table.tobytes())
        return (self.on_skip, self.bridges, self.students, self.cutoffs.tobytes(), table)

    def _row(self, step: int) -> int:
        assert self.table is not None
        return min(max(step, 0), len(self.table) - 1)

    @cached_property
    def _cutoffs_in_order(self) -> Int32Array:
        return np.sort(self.cutoffs)

    @cached_property
    def _cutoffs_listed(self) -> list[int]:
        listed: list[int] = self._cutoffs_in_order.tolist()
        return listed

    @cached_property
    def _depth_of_row(self) -> npt.NDArray[np.int64]:
        assert self.table is not None
        depths: npt.NDArray[np.int64] = self.table.sum(axis=1, dtype=np.int64)
        return depths


def windows_of(active: BoolArray) -> list[tuple[int, int]]:
    """(first, stop) of every run of layers that do not run, of bool [L]."""
    edges = np.flatnonzero(np.diff(np.concatenate(([True], active, [True])).astype(np.int8)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _set(schedule: Schedule, field: str, array: npt.NDArray[Any]) -> None:
    """Store a read-only array in a frozen schedule."""
    array.flags.writeable = False
    object.__setattr__(schedule, field, array)


def _as_array(field: str, value: Any) -> npt.NDArray[Any]:
    try:
        return np.asarray(value)
    except ValueError as error:  # rows of different lengths
        raise InvalidValueError(field, value, "an array") from error


def _checked_cutoffs(cutoffs: npt.NDArray[Any]) -> Int32Array:
    """A copy of `cutoffs` as int32 [L], every one in [1, NEVER]."""
    given = _as_array("cutoffs", cutoffs)
    require(
        given.ndim == 1 and given.size > 0 and given.dtype.kind in "iu",
        "cutoffs",
        cutoffs,
        "one integer for each layer",
    )
    require(
        bool((given >= 1).all() and (given <= NEVER).all()),
        "cutoffs",
        given.tolist(),
        f"from 1 (the prompt pass yields step 0 at full depth) to {NEVER} (never)",
    )
    return given.astype(np.int32)  # always a copy: the caller's array stays the caller's


def _checked_table(table: npt.NDArray[Any]) -> BoolArray:
    """A copy of `table`, bool [steps, L] with a full row 0, without repeats of its last row."""
    given = _as_array("table", table)
    require(
        given.ndim == 2 and given.size > 0 and given.dtype.kind == "b",
        "table",
        table,
        "a boolean array [steps, layers]",
    )
    require(
        bool(given[0].all()),
        "table[0]",
        given[0].tolist(),
        "all True, since the prompt pass yields step 0 at full depth",
    )
    changes = np.flatnonzero((given[1:] != given[:-1]).any(axis=1))
    num_rows = int(changes[-1]) + 2 if len(changes) else 1
    return given[:num_rows].copy()
