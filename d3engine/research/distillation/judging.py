"""Students and policies against full depth, on the model's own held-out answers, where a token was generated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from d3engine.depth import NEVER, DepthPolicy, Schedule
from d3engine.depth.schedule import AUTO_BRIDGES
from d3engine.errors import require
from d3engine.model.bridges import BRIDGES_FILE, Bridge, Window, read_bridges
from d3engine.model.config import ModelConfig
from d3engine.model.students import read_student, student_path
from d3engine.model.weights import LayerWeights
from d3engine.research.analysis.layers import FloatArray, Mean, compared, mean_over
from d3engine.research.analysis.report import Table, counted
from d3engine.research.bridges.passage import crossings_of
from d3engine.research.distillation.corpus import OwnAnswer
from d3engine.research.distillation.passes import AnswerPass, Layers, layers_of
from d3engine.research.evaluation.accuracy import shape_of
from d3engine.utils.files import beside

ALL = "all"

POSITIONS = 48
"""Generation steps whose means stand together: whether a later token loses less is seen by these."""


@dataclass(frozen=True)
class Judgeable:
    """A policy in words, its schedule, and its students' layers and its bridges, where it has any.

    `layers` are those from step 1 on, `later` those that take their place, each from a step on.
    """

    name: str
    schedule: Schedule
    layers: Layers = field(default_factory=dict)
    bridges: Mapping[Window, Bridge] | None = None
    later: Sequence[tuple[int, Layers]] = ()

    @property
    def first(self) -> int:
        """The lowest layer that is not as at full depth."""
        skipped = np.flatnonzero(self.schedule.cutoffs != NEVER).tolist()
        own = [number for _, layers in ((1, self.layers), *self.later) for number in layers]
        return min([*skipped, *own, self.schedule.num_layers])

    def saved(self, config: ModelConfig, steps: int) -> float:
        """Layers' worth of matrices that a token does not run, on average over `steps`."""
        whole = shape_of(config).layer_parameters
        runs = self.schedule.num_layers - self.schedule.depths(steps + 1)[1:].mean()
        levels: list[tuple[int, Layers]] = [(1, self.layers), *self.later, (steps + 1, {})]
        narrower = 0.0
        for (begin, layers), (end, _) in pairwise(levels):
            during = max(0, min(end, steps + 1) - begin) / steps
            narrower += during * sum(whole - _size(layer) for layer in layers.values()) / whole
        bridged = 0.0
        if self.bridges is not None:
            crossed = chain.from_iterable(crossings_of(self.schedule, 1, steps + 1).values())
            bridged = sum((rows.stop - rows.start) * self.bridges[window].num_parameters for rows, window in crossed)
        return float(runs + narrower - bridged / whole / steps)


def _size(layer: LayerWeights) -> int:
    matrices = (layer.qkv, layer.output, layer.gate_up, layer.down)
    return sum(int(matrix.shape[0]) * int(matrix.shape[1]) for matrix in matrices)


@dataclass
class Agreement:
    """Of each text float64 [2, R]: KL divergence from full depth in nats, and whether the likeliest token is its."""

    texts: list[tuple[str, FloatArray]] = field(default_factory=list)

    @property
    def kinds(self) -> list[str]:
        return sorted({kind for kind, _ in self.texts})

    def positions(self, kind: str = ALL) -> int:
        return sum(values.shape[1] for of, values in self.texts if kind in (ALL, of))

    def mean(self, measure: int, kind: str = ALL, among: slice = slice(None)) -> Mean:
        """0: KL, 1: agreement, of these rows; the interval is of texts, whose tokens are not independent."""
        return mean_over(values[measure, among] for of, values in self.texts if kind in (ALL, of))

    def as_dict(self) -> dict[str, Any]:
        return {kind: {"positions": self.positions(kind), **self._means(kind)} for kind in (ALL, *self.kinds)}

    def by_position(self) -> dict[str, dict[str, float | None]]:
        """The same of generation steps, `POSITIONS` together: "1-48", "49-96" and so on."""
        longest = max(values.shape[1] for _, values in self.texts)
        parts = range(0, longest, POSITIONS)
        return {f"{at + 1}-{at + POSITIONS}": self._means(ALL, slice(at, at + POSITIONS)) for at in parts}

    def _means(self, kind: str, among: slice = slice(None)) -> dict[str, float | None]:
        found: dict[str, float | None] = {}
        for name, measure in (("kl", 0), ("agreement", 1)):
            mean = self.mean(measure, kind, among)
            found |= {name: mean.value, f"{name}_95": mean.known_arm}
        return found


@torch.no_grad()
def judge(
    run: AnswerPass,
    texts: Sequence[OwnAnswer],
    candidates: Sequence[Judgeable],
    most_tokens: int,
    progress: Callable[[], None] = lambda: None,
    gather: Callable[[Iterable[list[FloatArray]]], list[list[FloatArray]]] = list,
) -> list[Agreement]:
    """Judge every candidate on the first `most_tokens` tokens of each answer.

    `gather` takes each text when all candidates are judged on it, and may end before the last.
    """
    layers, last = {candidate.first for candidate in candidates}, run.config.num_layers

    def judged(text: OwnAnswer) -> list[FloatArray]:
        full = run.at_full_depth(text.prompt_ids, text.token_ids[: most_tokens + 1], layers)
        known = run.logits(full.states[last]).log_softmax(-1)
        found = []
        for candidate in candidates:
            parts: dict[str, Any] = {name: getattr(candidate, name) for name in ("first", "layers", "later", "bridges")}
            given = run.logits(run.run(full, candidate.schedule, **parts)).log_softmax(-1)
            found.append(compared(known, given, torch.tensor(full.token_ids[1:]))[::2])
        progress()
        return found

    rows = list(zip(texts, gather(judged(text) for text in texts), strict=False))
    return [Agreement([(text.kind, own[nth]) for text, own in rows]) for nth in range(len(candidates))]


def judgeable_of(run: AnswerPass, directory: Path, words: str, policy: DepthPolicy, fingerprint: str) -> Judgeable:
    """The policy that `words` name, with its student or its bridges, read from the files that it names."""
    num_layers = run.config.num_layers
    schedule = policy.schedule(num_layers)
    plain = policy.exit_rule(num_layers) is None and policy.draft_rule(num_layers) is None
    require(plain and schedule.is_nested, "--depth", words, "one whose skipped layers stay skipped")
    levels: list[tuple[int, Layers]] = []
    for level in schedule.students:
        student = read_student(student_path(directory, level.student), run.config)
        require(student.fingerprint == fingerprint, "--depth", words, "with a student of these weights")
        skipped = np.flatnonzero(~schedule.active(level.step)).tolist()
        student.check_made_for(run.config, level.student, skipped, level.width)
        levels.append((level.step, layers_of(student, run.weights)))
    bridges = None
    if schedule.bridges is not None:
        is_auto = schedule.bridges == AUTO_BRIDGES
        file = beside(directory, BRIDGES_FILE) if is_auto else Path(schedule.bridges)
        found = read_bridges(file).to(torch.float32, torch.device("cpu"))
        require(found.fingerprint == fingerprint, "--depth", words, "with bridges of these weights")
        missing = [one for one in schedule.windows() if one not in found.by_window]
        require(not missing, "--depth", words, f"with bridges over the windows {missing[:8]} as well")
        bridges = {one: found.by_window[one] for one in schedule.windows()}
    return Judgeable(words, schedule, bridges=bridges, later=levels)


def agreement_table(
    candidates: Sequence[Judgeable], found: Sequence[Agreement], config: ModelConfig, steps: int
) -> Table:
    kinds = found[0].kinds
    rows = []
    for candidate, one in zip(candidates, found, strict=True):
        kl, agreement = one.mean(0), one.mean(1)
        by_kind = [f"{one.mean(1, kind).value:.1%}" for kind in kinds]
        shown = f"{candidate.saved(config, steps):.2f}", f"{kl.value:.4f}", f"{agreement.value:.1%}"
        rows.append((candidate.name, *shown, agreement.interval, *by_kind))
    about = f"{counted(len(found[0].texts), 'own answer')} held out, {found[0].positions():,} generated tokens"
    header = ("policy", "layers saved", "KL", "same token", "95 %", *kinds)
    return Table(f"Against full depth: {about}", header, rows)


def position_table(candidates: Sequence[Judgeable], found: Sequence[Agreement]) -> Table:
    """A row for each candidate: KL and agreement by generation step."""
    columns = [one.by_position() for one in found]
    rows = [
        (candidate.name, *(f"{means['kl']:.4f}, {means['agreement']:.1%}" for means in by.values()))
        for candidate, by in zip(candidates, columns, strict=True)
    ]
    return Table("By generation step: KL, same token", ("policy", *columns[0]), rows)
