"""A run whose tokens someone reads along: its plan is given out once for every step, as the device is at later ones.

The run ends early where a sequence leaves the batch or another wants to join it: then no step begins any more, and
those that have begun are still taken, so that nothing computed for the others is lost. Blocks for steps that did not
come stay with their sequences, which will need them.
"""

from __future__ import annotations

from d3engine.plan import Plan, RunControl
from d3engine.request.sequence import NO_SLOT


class ActiveRun:
    """The run that is under way, if there is one."""

    def __init__(self) -> None:
        self._control: RunControl | None = None

    def begin(self, plan: Plan) -> None:
        """Take in a new plan; its run is under way if the steps are to be taken one by one."""
        if plan.multi_step is not None and plan.multi_step.control is not None:
            self._control, self._plan, self._num_left = plan.multi_step.control, plan, plan.multi_step.num_steps - 1

    def took(self, plan: Plan) -> None:
        """Count the steps that were taken at once, beyond the one for which `next_step` has given the plan."""
        if self._control is not None and plan.multi_step is not None and plan.multi_step.control is self._control:
            self._num_left -= plan.multi_step.num_taken - 1

    def end(self) -> None:
        """Let no further step begin."""
        if self._control is not None:
            self._control.end()

    @property
    def goes_on(self) -> bool:
        """Whether a run is under way that has steps left."""
        return self._control is not None and self._num_left > 0 and not self._control.is_ended

    def next_step(self) -> Plan | None:
        """The plan of the run, for its next step; None where no run is under way, or not any more."""
        if self._control is None:
            return None
        if self._num_left and (not self._control.is_ended or self._has_begun(self._control)):
            self._num_left -= 1
            return self._plan
        self._control = None
        return None

    def _has_begun(self, control: RunControl) -> bool:
        """Whether the next step has begun, and for anybody who is still there."""
        multi_step = self._plan.multi_step
        assert multi_step is not None
        given = multi_step.num_steps - self._num_left
        return control.num_begun > given and any(sequence.slot != NO_SLOT for sequence in self._plan.sequences)
