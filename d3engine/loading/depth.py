"""The depth policy of an engine, and what calibration has left beside the weights."""

from __future__ import annotations

import logging
from pathlib import Path

from d3engine.depth import DepthPolicy
from d3engine.depth.policy import (
    BRIDGES,
    POLICY_FILE,
    calibrated_bridges,
    calibrated_for,
    calibrated_task,
    policy_from_directory,
)
from d3engine.depth.schedule import AUTO_BRIDGES
from d3engine.depth.words import policy_in_words
from d3engine.errors import ModelFormatError, require
from d3engine.files import beside, is_there, sha256_of
from d3engine.model.bridges import BRIDGES_FILE, most_bytes
from d3engine.model.config import ModelConfig
from d3engine.model.fields import of_a_model
from d3engine.model.fingerprint import fingerprint

_log = logging.getLogger(__name__)


def resolve_depth(depth: str | DepthPolicy, directory: Path) -> DepthPolicy:
    """The engine's depth policy; "auto" is what calibration has written beside the weights, full depth without, and
    the log says for which task that was found.

    Raises `ModelFormatError` where `d3.json` names the fingerprint of other weights, or other bridges than those beside
    it: what is safe for those says nothing of these, and a quiet fall to full depth would hide that the file is stale.
    """
    if isinstance(depth, DepthPolicy):
        return depth
    require(depth == "auto", "depth", depth, 'a DepthPolicy such as FullDepth(), or "auto"')
    policy = policy_from_directory(directory)
    own = {getattr(one, BRIDGES, None) for one in (policy, getattr(policy, "draft", None))}
    if own - {None, AUTO_BRIDGES}:  # the file may come from anywhere, and must not say which others are opened
        path = beside(directory, POLICY_FILE)
        raise ModelFormatError(f'{path}: bridges must be "{AUTO_BRIDGES}" or absent there; got {policy.describe()}')
    calibrated = calibrated_for(directory)
    if calibrated is not None and calibrated != fingerprint(directory):
        raise ModelFormatError(
            f"{beside(directory, POLICY_FILE)} was calibrated on other weights than those beside it; run d3engine "
            "calibrate on these, delete the file, or name a depth"
        )
    if AUTO_BRIDGES in own:
        check_bridges(directory)
    if (found := own_setting(policy, directory)) is not None:
        _log.info(found)
    return policy


def check_bridges(directory: Path) -> None:
    """That the bridges beside the weights are those that the setting was found with, where `d3.json` names them."""
    path, expected = beside(directory, BRIDGES_FILE), calibrated_bridges(directory)
    if expected is None or not is_there(path):  # whoever loads them says that they are missing
        return
    config = ModelConfig.from_directory(directory)
    with of_a_model():
        found = sha256_of(path, most_bytes(config.num_layers, config.hidden_size))
    if found != expected:
        raise ModelFormatError(
            f"{beside(directory, POLICY_FILE)} was calibrated with other bridges than those in {path}; run d3engine "
            "calibrate with these, put those back, or name a depth"
        )


def own_setting(policy: DepthPolicy, directory: Path) -> str | None:
    """A sentence on the setting that "auto" has found in `d3.json`: for which task it is; None without that file."""
    if not is_there(beside(directory, POLICY_FILE)):
        return None
    task = calibrated_task(directory)
    shown = f"found safe for {task}, for no other task" if task else "the file does not say for which task"
    return f"depth from {POLICY_FILE}: {policy_in_words(policy)} ({shown})"
