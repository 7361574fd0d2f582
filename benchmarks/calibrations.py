"""How often calibration is wrong, and how often it refuses what is safe: thousands of simulated ones.

The search knows a model only through a `Scorer`, so one whose true losses are known takes a model's
place, and nothing of the rule is modelled: screening, its selection, the sequence of certificates run as they are.

    python -m benchmarks.calibrations --runs 10000          # a table; about ten minutes of one core
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from d3engine.depth import D3, DepthPolicy
from d3engine.research.calibration.scoring import Answers, Part
from d3engine.research.calibration.search import Candidate, calibrate, make_candidates, plan_budget
from d3engine.research.calibration.statistics import Tolerance
from d3engine.research.evaluation.accuracy import Interval, wilson_interval

NUM_LAYERS, MAX_TOKENS = 16, 64
LOSES_MUCH = 0.4

Truth = Callable[[D3], float]
"""The true loss of a setting, as a share of all problems."""


class SimulatedScorer:
    """A model that is right with `base`, and whose settings have the losses of `truth`.

    Beyond what a loss takes, `differing` of a setting's answers are right for wrong as often as wrong for right.
    """

    num_layers, max_tokens, guess = NUM_LAYERS, MAX_TOKENS, 0.0

    def __init__(self, truth: Truth, differing: float, base: float, seed: int) -> None:
        self._truth, self._differing, self._base = truth, differing, base
        self._random = np.random.default_rng(seed)
        self._full = dict.fromkeys(Part, np.zeros(0, dtype=bool))

    def score(self, policy: DepthPolicy, part: Part, first: int, count: int) -> Answers:
        """Answers of the same problems for every policy."""
        missing = max(0, first + count - len(self._full[part]))
        self._full[part] = np.concatenate([self._full[part], self._random.random(missing) < self._base])
        right, depth = self._full[part][first : first + count], NUM_LAYERS * MAX_TOKENS
        if isinstance(policy, D3):
            loss, depth = self._truth(policy), _layers(policy)
            differing = max(self._differing, loss)
            lost, won = (differing + loss) / 2 / self._base, (differing - loss) / 2 / (1 - self._base)
            chance = self._random.random(count)
            right = np.where(right, chance >= lost, chance < won)
        return Answers(tuple(right.tolist()), count * MAX_TOKENS, count * depth, seconds=0.0)


@dataclass(frozen=True)
class Simulation:
    """What came of calibrations: `wrong` have chosen a setting that loses the tolerance or more."""

    runs: int
    chosen: int
    wrong: int


def simulate(
    truth: Truth,
    tolerance: Tolerance,
    *,
    differing: float,
    runs: int,
    limit: int = 700,
    budget: int = 7000,
    base: float = 0.9,
    candidates: Sequence[Candidate] = (),
) -> Simulation:
    """Calibrate `runs` times; each run has a seed of its own, from 0."""
    candidates = candidates or make_candidates(NUM_LAYERS, MAX_TOKENS)
    plan = plan_budget(len(candidates), budget, limit, tolerance)
    chosen = wrong = 0
    for seed in range(runs):
        result = calibrate(SimulatedScorer(truth, differing, base, seed), candidates, plan, tolerance)
        chosen += result.chosen is not None
        wrong += result.chosen is not None and truth(result.chosen) >= tolerance.of(base) - 1e-12
    return Simulation(runs, chosen, wrong)


def truths(lost: float) -> Iterator[tuple[str, Truth]]:
    """Worlds by name; `lost` is the tolerance, as a share of all problems."""
    order = sorted((one.policy for one in make_candidates(NUM_LAYERS, MAX_TOKENS)), key=_layers)
    fast = set(order[: len(order) // 2])
    yield "no setting loses anything", lambda policy: 0.0
    yield "start 0.7 and 0.8 lose nothing, others much", lambda policy: 0.0 if policy.start >= 0.7 else LOSES_MUCH
    yield "all lose the tolerance exactly", lambda policy: lost
    yield "start 0.7 and 0.8 lose it exactly, others much", lambda policy: lost if policy.start >= 0.7 else LOSES_MUCH
    yield "the faster half loses it exactly, others nothing", lambda policy: lost if policy in fast else 0.0


def _layers(policy: D3) -> int:
    """Of a whole answer."""
    return int(policy.schedule(NUM_LAYERS).depths(MAX_TOKENS).sum())


def main() -> None:
    """Print a table of all worlds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--limit", type=int, default=700)
    parser.add_argument("--budget", type=int, default=7000)
    parser.add_argument("--tolerance", type=float, default=2.0, help="in points")
    parser.add_argument("--differing", type=float, nargs="+", default=[0.0, 2.0, 5.0], help="in %% of the problems")
    given = parser.parse_args()
    tolerance = Tolerance(given.tolerance / 100)
    sizes = f"{given.runs} calibrations each, {given.limit} problems certify, tolerance {tolerance}"
    table = Table("what is true", "answers that differ", "chosen", "chosen, and loses the tolerance", title=sizes)
    for name, truth in truths(tolerance.loss):
        for differing in given.differing:
            sizes = {"runs": given.runs, "limit": given.limit, "budget": given.budget}
            found = simulate(truth, tolerance, differing=differing / 100, **sizes)
            wrong = wilson_interval(found.wrong, found.runs)
            table.add_row(name, f"{differing:g} %", f"{found.chosen / found.runs:.1%}", _share(found, wrong))
    Console().print(table)


def _share(found: Simulation, interval: Interval) -> str:
    return f"{found.wrong / found.runs:.2%} ({interval.low:.2%} to {interval.high:.2%})"


if __name__ == "__main__":
    main()
