"""What policies lose against full depth by generation step, with and without bridges, on a
given text read at each policy's depths as decoding would."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from d3engine.depth import Schedule
from d3engine.model.bridges import Bridge, Window
from d3engine.research.analysis.layers import FloatArray, Mean, mean_over
from d3engine.research.analysis.report import Table, counted, step_groups, steps_in_words
from d3engine.research.bridges.judging import FullText, Reading, first_layers, long_enough
from d3engine.research.bridges.passage import Passage, crossings_of
from d3engine.research.evaluation.accuracy import shape_of

MEASURES = ("kl", "extra", "agreement")


@dataclass(frozen=True)
class Candidate:
    """A policy in words, its schedule, and its bridges; None where it has none."""

    name: str
    schedule: Schedule
    bridges: Mapping[Window, Bridge] | None


@dataclass
class Decoded:
    """One policy: of each text float64 [3, T], by measure and position, and what ran for it.

    The measures are the KL divergence from full depth in nats, how much less likely the text's own token became, in
    nats, and whether the likeliest token is full depth's. `layers` and `bridged` are sums over positions: layers run,
    and what bridges cost in layers.
    """

    name: str
    texts: list[FloatArray] = field(default_factory=list)
    layers: int = 0
    bridged: float = 0.0

    @property
    def positions(self) -> int:
        return sum(text.shape[1] for text in self.texts)

    @property
    def mean_layers(self) -> float:
        """Layers run for a judged position."""
        return self.layers / self.positions

    @property
    def mean_cost(self) -> float:
        """The same with what the bridges cost, in layers."""
        return (self.layers + self.bridged) / self.positions

    def mean(self, measure: str, steps: range | None = None) -> Mean:
        """Over all positions, or those of generation steps (from 1 on)."""
        among = slice(None) if steps is None else slice(max(steps.start - 1, 0), steps.stop - 1)
        return mean_over(text[MEASURES.index(measure), among] for text in self.texts)


@dataclass(frozen=True)
class Comparison:
    """Several policies on the same texts."""

    policies: Sequence[Decoded]

    @property
    def groups(self) -> list[range]:
        """Generation steps, grouped by doubling; step 0 comes out of the prompt at full depth under every policy."""
        longest = max((text.shape[1] for text in self.policies[0].texts), default=0)
        return step_groups(longest + 1)[1:]

    def table(self) -> Table:
        header = ("policy", "layers", "with bridges", "KL", "agreement", "95 %", "perplexity x")
        about = f"{counted(len(self.policies[0].texts), 'text')}, {self.policies[0].positions:,} positions"
        return Table(f"Against full depth: {about}", header, [_row(one) for one in self.policies])

    def step_table(self) -> Table:
        """KL divergence and agreement by generation step, a row for each policy."""
        header = ("policy", *(f"steps {steps_in_words(group)}" for group in self.groups))
        rows = []
        for one in self.policies:
            means = [(one.mean("kl", group), one.mean("agreement", group)) for group in self.groups]
            rows.append((one.name, *(f"{kl.value:.3f}, {agreement.value:.0%}" for kl, agreement in means)))
        return Table("KL and agreement by generation step", header, rows)

    def as_dict(self) -> dict[str, Any]:
        return {
            "texts": len(self.policies[0].texts),
            "policies": [_described(one, self.groups) for one in self.policies],
        }


def measure_decoded(
    passage: Passage,
    candidates: Sequence[Candidate],
    readings: Sequence[Reading],
    progress: Callable[[], None] = lambda: None,
) -> Comparison:
    """Judge policies on texts; those without two tokens behind their prompt are passed over.

    `progress` hears of every text that is not.
    """
    found = [Decoded(candidate.name) for candidate in candidates]
    layers = first_layers([candidate.schedule for candidate in candidates])
    for reading in long_enough(readings):
        full = FullText(passage, reading, layers)
        for one, candidate in zip(found, candidates, strict=True):
            one.texts.append(full.judge(candidate.schedule, candidate.bridges))
            _count(one, candidate, passage, one.texts[-1].shape[1])
        progress()
    return Comparison(found)


def _count(one: Decoded, candidate: Candidate, passage: Passage, num_rows: int) -> None:
    """Add what ran for the generation steps 1 .. num_rows."""
    one.layers += int(candidate.schedule.depths(num_rows + 1)[1:].sum())
    if candidate.bridges is not None:
        crossed = crossings_of(candidate.schedule, 1, num_rows + 1)
        parameters = shape_of(passage.config).layer_parameters
        for rows, window in (each for due in crossed.values() for each in due):
            one.bridged += (rows.stop - rows.start) * candidate.bridges[window].num_parameters / parameters


def _row(one: Decoded) -> tuple[str, ...]:
    kl, agreement, extra = (one.mean(measure) for measure in ("kl", "agreement", "extra"))
    costs, ratio = (f"{one.mean_layers:.2f}", f"{one.mean_cost:.2f}"), f"{np.exp(extra.value):,.2f}"
    return one.name, *costs, f"{kl.value:.3f}", f"{agreement.value:.1%}", agreement.interval, ratio


def _described(one: Decoded, groups: Sequence[range]) -> dict[str, Any]:
    def values(steps: range | None) -> dict[str, float]:
        return {measure: one.mean(measure, steps).value for measure in MEASURES}

    return {
        "policy": one.name,
        "mean_layers": one.mean_layers,
        "mean_layers_with_bridges": one.mean_cost,
        **values(None),
        "agreement_95": one.mean("agreement").known_arm,
        "by_step": [{"steps": [group.start, group.stop], **values(group)} for group in groups],
    }
