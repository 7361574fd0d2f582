"""The files of bridges that the policies of an evaluation name.

The one idea: a request may come from anywhere and opens no file, but the policies of an evaluation are written by the
one who runs it. So an engine that answers nobody else may open what they name.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from d3engine.depth import D3, DepthPolicy
from d3engine.depth.policy import named_bridges
from d3engine.depth.statistics import mean_depth
from d3engine.evaluation.baselines import nested_for_mean
from d3engine.files import sha256_of

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


def bridged_rivals(engine: Engine, policy: D3, max_tokens: int) -> list[DepthPolicy]:
    """What a D3 with bridges stands beside: itself without them, and bridged windows of the same nominal mean depth.

    The windows are those whose order `d3engine bridge nest` has written into the file. Nothing for a D3 without
    bridges; raises as `open_bridges`.
    """
    if policy.bridges is None:
        return []
    from d3engine.model.bridges import read_bridges  # loads torch, which the help of a command goes without

    open_bridges(engine, [policy])
    order = read_bridges(engine.bridges.path(policy.bridges)).about.get("nested", {}).get("windows", [])
    given = {"num_layers": engine.config.num_layers, "max_tokens": max_tokens}
    mean = mean_depth(policy.schedule(engine.config.num_layers), max_tokens)
    return [replace(policy, bridges=None), *nested_for_mean(order, policy, mean, **given)]


def bridge_hashes(engine: Engine, policies: Iterable[DepthPolicy]) -> dict[str, str]:
    """The SHA-256 of each file of bridges that policies name, by its name there; all of them have been opened."""
    names = frozenset[str]().union(*map(named_bridges, policies))
    from d3engine.model.bridges import most_bytes

    most = most_bytes(engine.config.num_layers, engine.config.hidden_size)
    return {name: sha256_of(engine.bridges.path(name), most) for name in sorted(names)}
