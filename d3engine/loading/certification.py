"""Which depths calibration has certified for a model."""

from __future__ import annotations

import logging
from functools import cached_property
from pathlib import Path

from d3engine.depth import NEVER, DepthPolicy
from d3engine.depth.policy import POLICY_FILE, calibrated_for, policy_from_directory
from d3engine.depth.words import policy_in_words
from d3engine.errors import ModelFormatError
from d3engine.files import beside, is_there
from d3engine.loading.depth import check_bridges
from d3engine.model.fingerprint import fingerprint

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
        return policy == self._certified

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
        """Whether every token runs all layers, or is verified by all."""
        if policy.draft_rule(self._num_layers) is not None:
            return True
        skips = policy.schedule(self._num_layers).first_skipping_step != NEVER
        return not skips and policy.exit_rule(self._num_layers) is None

    @cached_property
    def _certified(self) -> DepthPolicy | None:
        """The policy in d3.json, where the file was written for these weights and bridges and can be read."""
        if not is_there(beside(self._directory, POLICY_FILE)):
            return None
        try:
            found = policy_from_directory(self._directory)
            check_bridges(self._directory)
            return found if calibrated_for(self._directory) == fingerprint(self._directory) else None
        except ModelFormatError:  # `depth="auto"` reports what is wrong with the file
            return None
