"""The settings that a calibration tries: start, alpha, tail and bridges, without those that change nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from d3engine.depth import D3, Schedule
from d3engine.errors import require_integer

STARTS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
ALPHAS = (0.8, 0.9, 0.99, 0.999, 0.9999)
"""The search space of the D3 paper's Table 5, and 0.99, which lies in the gap that the paper leaves."""

PAPER_ALPHAS = tuple(alpha for alpha in ALPHAS if alpha != 0.99)
"""Those of the paper alone."""


@dataclass(frozen=True)
class Candidate:
    """One setting; `alike` are those of the grid, itself included, that run the same layers."""

    policy: D3
    alike: tuple[D3, ...]


def make_candidates(
    num_layers: int,
    max_tokens: int,
    starts: Sequence[float] = STARTS,
    alphas: Sequence[float] = ALPHAS,
    tails: Sequence[int] = (0,),
    bridges: Mapping[str, AbstractSet[tuple[int, int]]] | None = None,
) -> list[Candidate]:
    """The different settings of a grid, for a model of so many layers and answers of so many tokens at most.

    `bridges` are the windows that each file holds, by what it is called: every setting is also one with each that holds
    all of its windows.
    """
    require_integer("num_layers", num_layers, 1)
    require_integer("max_tokens", max_tokens, 1)
    by_effect: dict[tuple[str | None, bytes], list[D3]] = {}
    for tail, alpha, start in product(tails, alphas, starts):
        policy = D3(alpha=alpha, start=start, tail=tail)
        if policy.first_layer(num_layers) + tail > num_layers:
            continue  # the window would end below its first layer
        schedule = policy.schedule(num_layers)
        effect = _effect(schedule, max_tokens)
        if (effect < max_tokens).any():
            for name in (None, *_with_all_windows(schedule, bridges or {})):
                by_effect.setdefault((name, effect.tobytes()), []).append(replace(policy, bridges=name))
    return [Candidate(alike[0], tuple(alike)) for alike in by_effect.values()]


def _with_all_windows(schedule: Schedule, bridges: Mapping[str, AbstractSet[tuple[int, int]]]) -> Iterator[str]:
    left_out = set(schedule.windows())
    return (name for name, windows in bridges.items() if left_out <= windows)


def _effect(schedule: Schedule, max_tokens: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    """Int32 [L]: the cutoffs as far as an answer can see them."""
    return np.minimum(schedule.cutoffs, np.int32(max_tokens))
