"""A run whose tokens someone reads along: its plan is given out once for every step, as the device is at later ones.

The run ends early where a sequence leaves the batch or another wants to join it: then no step begins any more, and
those that have begun are still taken, so that nothing computed for the others is lost. Blocks for steps that did not
come stay with their sequences, which will need them.
"""

from __future__ import annotations

from d3engine.plan import Course, Plan
from d3engine.request.sequence import NO_SLOT


class UnderWay:
    """The run that is under way, if there is one."""

    def __init__(self) -> None:
        self._course: Course | None = None

    def begin(self, plan: Plan) -> None:
        """Take in a new plan; its run is under way if the steps are to be taken one by one."""
        if plan.ahead is not None and plan.ahead.course is not None:
            self._course, self._plan, self._num_left = plan.ahead.course, plan, plan.ahead.num_steps - 1

    def took(self, plan: Plan) -> None:
        """Count the steps that were taken at once, beyond the one for which `next_step` has given the plan."""
        if self._course is not None and plan.ahead is not None and plan.ahead.course is self._course:
            self._num_left -= plan.ahead.num_taken - 1

    def end(self) -> None:
        """Let no further step begin."""
        if self._course is not None:
            self._course.end()

    @property
    def goes_on(self) -> bool:
        """Whether a run is under way that has steps left."""
        return self._course is not None and self._num_left > 0 and not self._course.is_ended

    def next_step(self) -> Plan | None:
        """The plan of the run, for its next step; None where no run is under way, or not any more."""
        if self._course is None:
            return None
        if self._num_left and (not self._course.is_ended or self._has_begun(self._course)):
            self._num_left -= 1
            return self._plan
        self._course = None
        return None

    def _has_begun(self, course: Course) -> bool:
        """Whether the next step has begun, and for anybody who is still there."""
        ahead = self._plan.ahead
        assert ahead is not None
        given = ahead.num_steps - self._num_left
        return course.num_begun > given and any(sequence.slot != NO_SLOT for sequence in self._plan.sequences)
