"""Files of bridges that the policies of an evaluation name; requests open no file, but an
engine without other callers may."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

from d3engine.depth import D3, DepthPolicy, EarlyExit, FixedSkip, Nested, SkipDecode, TailSkip, UnifiedSkip
from d3engine.depth.policy import named_bridges, named_students
from d3engine.depth.statistics import LLAMA2_BY_LAYERS, SHORTGPT_ORDER, ModelShape, mean_depth
from d3engine.errors import require_integer
from d3engine.utils.files import sha256_of

if TYPE_CHECKING:
    from d3engine.engine.engine import Engine


def open_bridges(engine: Engine, policies: Iterable[DepthPolicy]) -> None:
    """Load the files of bridges that policies name, and let the engine's requests use them.

    Raises `InvalidValueError` for a file that is not there, belongs to other weights, or lacks a window that is needed.
    """
    for policy in policies:
        engine.bridges.allow(named_bridges(policy) | named_students(policy))
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


def bridge_hashes(engine: Engine, policies: Sequence[DepthPolicy]) -> dict[str, str]:
    """The SHA-256 of each file that policies name, by its name there, of a student behind "student"; all of them have
    been opened."""
    names = frozenset[str]().union(*map(named_bridges, policies))
    from d3engine.engine.depth import STUDENT_BYTES
    from d3engine.model.bridges import most_bytes

    most = most_bytes(engine.config.num_layers, engine.config.hidden_size)
    found = {name: sha256_of(engine.bridges.path(name), most) for name in sorted(names)}
    for student in sorted(frozenset[str]().union(*map(named_students, policies))):
        found[f"student {student}"] = sha256_of(engine.bridges.student_path(student), STUDENT_BYTES)
    return found


BISECTIONS = 8
"""Thresholds that are tried: the nearest is then within 1/256 of the best one, if depth grows with the threshold."""


def at_equal_depth(
    policy: DepthPolicy, *, num_layers: int, max_tokens: int, removal_order: Sequence[int] = ()
) -> list[DepthPolicy]:
    """SkipDecode, unified and tail skipping whose nominal mean depth over `max_tokens` is nearest to the policy's.

    Where an order is given in which layers may go, such as `published_order` finds, the same number of these as well.
    """
    require_integer("max_tokens", max_tokens, 2)
    mean = mean_depth(policy.schedule(num_layers), max_tokens)
    given = {"num_layers": num_layers, "max_tokens": max_tokens}
    return [
        skip_decode_for_mean(mean, **given),
        unified_for_mean(mean, **given),
        tail_skip_for_mean(mean, **given),
        *fixed_for_mean(removal_order, mean, **given),
    ]


def nested_for_mean(
    windows: Sequence[Sequence[int]], policy: D3, mean_layers: float, *, num_layers: int, max_tokens: int
) -> list[Nested]:
    """Nested windows with D3's alpha and bridges, as many of these as bring the nominal mean nearest; none of none."""
    found = [Nested(policy.alpha, windows[:count], bridges=policy.bridges) for count in range(1, len(windows) + 1)]
    return sorted(found, key=lambda one: abs(mean_depth(one.schedule(num_layers), max_tokens) - mean_layers))[:1]


def published_order(shape: ModelShape) -> tuple[int, ...]:
    """In which order ShortGPT removes layers from the Llama-2 of this shape; empty for any other model.

    A model of another shape may have as many layers, but not the same ones to spare.
    """
    known = SHORTGPT_ORDER["shortgpt"].get(shape.num_layers, ())
    return known if LLAMA2_BY_LAYERS.get(shape.num_layers) == shape else ()


def fixed_for_mean(order: Sequence[int], mean_layers: float, *, num_layers: int, max_tokens: int) -> list[FixedSkip]:
    """Without the first layers of the order, as many as bring the nominal mean nearest; nothing without an order."""
    means = {count: num_layers - count * (max_tokens - 1) / max_tokens for count in range(1, len(order) + 1)}
    nearest = sorted(means, key=lambda count: abs(means[count] - mean_layers))
    return [FixedSkip(order[:count]) for count in nearest[:1]]


def skip_decode_for_mean(mean_layers: float, *, num_layers: int, max_tokens: int) -> SkipDecode:
    """SkipDecode whose nominal mean is nearest: from full depth, or from less where one layer at the end is too many.

    A line from all layers to one has a mean above L / 2, and D3 may be below that.
    """
    deepest_line = SkipDecode(max_tokens, min_layers=1)
    if mean_layers >= mean_depth(deepest_line.schedule(num_layers), max_tokens):
        return SkipDecode.for_mean(mean_layers, num_layers=num_layers, max_tokens=max_tokens)
    lines = [SkipDecode(max_tokens, min_layers=1, max_layers=layers) for layers in range(num_layers, 0, -1)]
    return min(lines, key=lambda line: abs(mean_depth(line.schedule(num_layers), max_tokens) - mean_layers))


def unified_for_mean(mean_layers: float, *, num_layers: int, max_tokens: int) -> UnifiedSkip:
    """Unified skipping that keeps as many layers as bring its nominal mean nearest; the deeper of two equally near.

    Step 0 is at full depth, so keeping K layers has the mean (L + (N - 1) K) / N over N steps.
    """
    kept = range(num_layers, min(2, num_layers) - 1, -1)
    means = {layers: (num_layers + (max_tokens - 1) * layers) / max_tokens for layers in kept}
    return UnifiedSkip(Fraction(num_layers, min(means, key=lambda layers: abs(means[layers] - mean_layers))))


def tail_skip_for_mean(mean_layers: float, *, num_layers: int, max_tokens: int) -> TailSkip:
    """Tail skipping of that nominal mean, to half a layer run in all; of the lowest it has where the mean is below.

    It runs one layer at least after step 0, where a D3 with a short beginning may run none.
    """
    lowest = Fraction(num_layers + max_tokens - 1, max_tokens)
    return TailSkip(lowest if mean_layers < lowest else mean_layers, max_tokens)


def early_exit_at_depth(depth_of: Callable[[DepthPolicy], float], mean_layers: float) -> EarlyExit:
    """Early exit whose mean depth is nearest, by bisection of its threshold over CALM's range [0, 1].

    `depth_of` answers some questions under a policy and tells the layers run per token; it is asked `BISECTIONS` times.
    Where even the threshold 1 leaves too soon, it is what is returned, and no other is tried: the depth that is
    measured then says so.
    """
    low, high = 0.0, 1.0
    deepest = depth_of(EarlyExit(high))
    if deepest <= mean_layers:
        return EarlyExit(high)
    tried = [(deepest - mean_layers, EarlyExit(high))]
    for _ in range(BISECTIONS - 1):
        policy = EarlyExit((low + high) / 2)
        depth = depth_of(policy)
        tried.append((abs(depth - mean_layers), policy))
        low, high = (low, policy.threshold) if depth > mean_layers else (policy.threshold, high)
    return min(tried, key=lambda one: one[0])[1]
