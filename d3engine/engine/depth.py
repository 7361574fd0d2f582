"""The depth policy of an engine, and what calibration has left beside the weights."""

from __future__ import annotations

import logging
from functools import cached_property
from pathlib import Path

from d3engine.depth import NEVER, DepthPolicy, Speculative
from d3engine.depth.labels import policy_in_words
from d3engine.depth.policy import (
    BRIDGES,
    POLICY_FILE,
    calibrated_file,
    calibrated_for,
    calibrated_task,
    named_students,
    policy_from_directory,
)
from d3engine.depth.schedule import AUTO_BRIDGES
from d3engine.errors import ModelFormatError, require
from d3engine.model.bridges import BRIDGES_FILE, most_bytes
from d3engine.model.config import ModelConfig
from d3engine.model.expected_tensors import fingerprint
from d3engine.model.fields import of_a_model
from d3engine.model.students import student_file, student_path
from d3engine.utils.files import beside, is_there, sha256_of

_log = logging.getLogger(__name__)

MOST_KNOWN = 64
"""Policies to remember, and to log: a client may bring a new one with each request."""


class Certification:
    """The certified depths of one model; the log names each other policy once."""

    def __init__(self, directory: Path, num_layers: int) -> None:
        self._directory = directory
        self._num_layers = num_layers
        self._logged: set[DepthPolicy] = set()
        self._known: dict[DepthPolicy, bool] = {}

    def covers(self, policy: DepthPolicy) -> bool:
        """Whether the policy is d3.json's for these very weights, or changes no token of full depth's answers."""
        if policy not in self._known:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            self._known[policy] = self._is_exact(policy) or self.is_calibrated(policy)
        return self._known[policy]

    def is_calibrated(self, policy: DepthPolicy) -> bool:
        """Whether the policy is d3.json's for these very weights."""
        return policy == self.certified

    def log(self, policy: DepthPolicy) -> None:
        """Warn once of a policy that is not certified."""
        if policy in self._logged or len(self._logged) >= MOST_KNOWN or self.covers(policy):
            return
        self._logged.add(policy)
        _log.warning(
            "%s was never certified for this model: answers may be far worse than at full depth "
            "(d3engine calibrate looks for a safe depth; full depth always is)",
            policy_in_words(policy),
        )

    def _is_exact(self, policy: DepthPolicy) -> bool:
        """Whether every token runs all of the model's own layers, or is verified by all."""
        if policy.draft_rule(self._num_layers) is not None:
            return True
        changes = policy.schedule(self._num_layers).same_layers_until(0) != NEVER
        return not changes and policy.exit_rule(self._num_layers) is None

    @cached_property
    def certified(self) -> DepthPolicy | None:
        """The policy in d3.json, where the file was written for these weights and bridges and can be read."""
        if not is_there(beside(self._directory, POLICY_FILE)):
            return None
        try:
            found = policy_from_directory(self._directory)
            students = named_students(found)
            for name in (BRIDGES, *filter(student_file, students)):
                check_calibrated_with(self._directory, name)
            is_own = calibrated_for(self._directory) == fingerprint(self._directory)
            return found if is_own and all(map(student_file, students)) else None
        except ModelFormatError:  # `depth="auto"` reports what is wrong with the file
            return None


def resolve_depth(depth: str | DepthPolicy, directory: Path) -> DepthPolicy:
    """The engine's depth policy; "auto" is what calibration has written beside the weights, full depth without, and
    the log says for which task that was found.

    Raises `ModelFormatError` where `d3.json` names the fingerprint of other weights, or other bridges than those beside
    it: what is safe for those says nothing of these, and a quiet fall to full depth would hide that the file is stale.
    So does one that names files elsewhere, such as a draft model.
    """
    if isinstance(depth, DepthPolicy):
        return depth
    require(depth == "auto", "depth", depth, 'a DepthPolicy such as FullDepth(), or "auto"')
    policy, path = policy_from_directory(directory), beside(directory, POLICY_FILE)
    own = {getattr(one, BRIDGES, None) for one in (policy, getattr(policy, "draft", None))}
    # The file may come from anywhere, and must not say which others are opened.
    if own - {None, AUTO_BRIDGES}:
        raise ModelFormatError(f'{path}: bridges must be "{AUTO_BRIDGES}" or absent there; got {policy.describe()}')
    if isinstance(policy, Speculative):
        allowed = "absent there, and given to the engine (--draft-model)"
        raise ModelFormatError(f"{path}: draft_model must be {allowed}; got {policy.describe()}")
    calibrated = calibrated_for(directory)
    if calibrated is not None and calibrated != fingerprint(directory):
        raise ModelFormatError(
            f"{beside(directory, POLICY_FILE)} was calibrated on other weights than those beside it; run d3engine "
            "calibrate on these, delete the file, or name a depth"
        )
    for student in sorted(named_students(policy)):
        if student_file(student) is None:
            raise ModelFormatError(f'{path}: student must be "{AUTO_BRIDGES}" there; got {policy.describe()}')
        check_calibrated_with(directory, student)
    if AUTO_BRIDGES in own:
        check_calibrated_with(directory, BRIDGES)
    if (found := own_setting(policy, directory)) is not None:
        _log.info(found)
    return policy


STUDENT_BYTES = 64 * 2**30
"""Of a student's file at most."""


def check_calibrated_with(directory: Path, name: str) -> None:
    """That the `BRIDGES`, or the student that a setting calls `name`, beside the weights are those that the setting was
    found with, where `d3.json` names them."""
    path = beside(directory, BRIDGES_FILE) if name == BRIDGES else student_path(directory, name)
    expected = calibrated_file(directory, path.stem)
    if expected is None or not is_there(path):  # loading them reports that they are missing
        return
    most, words = STUDENT_BYTES, ("another student than that", "this one", "that")
    if name == BRIDGES:
        config = ModelConfig.from_directory(directory)
        most = most_bytes(config.num_layers, config.hidden_size)
        words = ("other bridges than those", "these", "those")
    with of_a_model():
        found = sha256_of(path, most)
    if found != expected:
        others, here, there = words
        raise ModelFormatError(
            f"{beside(directory, POLICY_FILE)} was calibrated with {others} in {path}; run d3engine calibrate with "
            f"{here}, put {there} back, or name a depth"
        )


def own_setting(policy: DepthPolicy, directory: Path) -> str | None:
    """A sentence on the setting that "auto" has found in `d3.json`: for which task it is; None without that file, and
    for another policy, such as a draft model's."""
    if not is_there(beside(directory, POLICY_FILE)) or policy != policy_from_directory(directory):
        return None
    task = calibrated_task(directory)
    shown = f"found safe for {task}, for no other task" if task else "the file does not say for which task"
    return f"depth from {POLICY_FILE}: {policy_in_words(policy)} ({shown})"
