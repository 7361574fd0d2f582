"""The files of bridges that the policies of an evaluation name.

The one idea: a request may come from anywhere and opens no file, but the policies of an evaluation are written by the
one who runs it. So an engine that answers nobody else may open what they name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from d3engine.depth import DepthPolicy
from d3engine.depth.policy import named_bridges

if TYPE_CHECKING:
    from d3engine.engine import Engine


def open_bridges(engine: Engine, policies: Iterable[DepthPolicy]) -> None:
    """Load the files of bridges that policies name, and let the engine's requests use them.

    Raises `InvalidValueError` for a file that is not there, belongs to other weights, or lacks a window that is needed.
    """
    for policy in policies:
        engine.bridges.allow(named_bridges(policy))
        rule = policy.draft_rule(engine.config.num_layers)
        for schedule in (policy.schedule(engine.config.num_layers), None if rule is None else rule.schedule):
            if schedule is not None:
                engine.bridges.check(schedule)


def bridge_hashes(engine: Engine, policies: Iterable[DepthPolicy]) -> dict[str, str]:
    """The SHA-256 of each file of bridges that policies name, by its name there; all of them have been opened."""
    names = frozenset[str]().union(*map(named_bridges, policies))
    return {name: hashlib.sha256(engine.bridges.path(name).read_bytes()).hexdigest() for name in sorted(names)}
