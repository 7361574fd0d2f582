"""Would it pay to run the steps that are fed with some tokens at full depth, whatever D3 says of their place?

On a given text, steps that are fed with a deep token run every layer, all others D3's. Entries that D3 left out are
absent, copied, projected, or kept as only full depth could have written them. Beside that stand plain D3 of as many
layers per token, and as many deep steps drawn at random.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from tqdm import tqdm

from benchmarks.report import Parser, option, settings_of
from d3engine.cli.observing import observe
from d3engine.depth import D3, Schedule
from d3engine.model.llama import Rope
from d3engine.research.analysis.answers import Answered
from d3engine.research.analysis.kinds import Kind, TokenKinds
from d3engine.research.analysis.layers import Mean, compared, mean_of_clusters
from d3engine.research.analysis.observer import Observer

ENTRIES = ("absent", "copied", "projected", "kept")
"""What a layer holds of a token that it was left out of."""

BISECTIONS = 20
BoolArray = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]


class LooseEnds:
    """One text at full depth: the residual stream and the entries of every layer, and the answer's distributions."""

    def __init__(self, observer: Observer, one: Answered) -> None:
        self.observer, self.one = observer, one
        positions = torch.arange(len(one.sequence), device=observer.device)
        rope = Rope(observer.config, len(one.sequence), observer.device)
        lengths = torch.clamp(positions + 1, min=len(one.prompt_ids)) if rope.depends_on_length else None
        self._rotations = rope.of_layers(rope.rotations(positions, lengths))
        self._pools = [observer.new_pool(len(one.sequence)) for _ in range(observer.config.num_layers)]
        hidden = observer.embedded(one.sequence)
        for layer, pool in enumerate(self._pools):
            observer.run_layer(layer, hidden, self._rotations[layer], pool)
        self.full = self.log_probabilities(hidden)

    @property
    def steps(self) -> int:
        """Steps after the first, which are fed with a token of the answer."""
        return len(self.one.token_ids) - 1

    def log_probabilities(self, hidden: Tensor) -> Tensor:
        """Float32 [steps, V]."""
        return self.observer.logits(hidden[self.one.answer_rows][1:]).log_softmax(dim=-1)

    @torch.inference_mode()
    def run(self, active: BoolArray, entries: str) -> Floats:
        """Float64 [3, steps]: KL divergence, extra nats and agreement of a pass in which step s ran `active[s]`."""
        one, observer = self.one, self.observer
        runs = torch.ones(observer.config.num_layers, len(one.sequence), dtype=torch.bool, device=observer.device)
        runs[:, one.answer_rows.start + 1 :] = torch.from_numpy(active.T.copy())
        hidden = observer.embedded(one.sequence)
        below = self._pools[0]
        for layer, rows in enumerate(runs):
            rotations = self._rotations[layer]
            if entries == "absent":  # the rows that run it are a text of their own, at their places in the whole
                some = hidden[rows]
                observer.run_layer(layer, some, rotations[rows], observer.new_pool(len(some)))
                hidden[rows] = some
                continue
            before, pool = hidden.clone(), observer.new_pool(len(one.sequence))
            queries = observer.write_entries(layer, hidden, rotations, pool, 0)
            if entries != "projected":
                source = below if entries == "copied" else self._pools[layer]
                pool[:, :, ~rows] = source[:, :, ~rows]
            observer.attend(layer, hidden, queries, pool)
            hidden[~rows], below = before[~rows], pool
        targets = torch.tensor(one.token_ids[1:], device=observer.device)
        return compared(self.full, self.log_probabilities(hidden), targets)


def layers_of(schedule: Schedule, steps: int) -> BoolArray:
    """Bool [steps, L]: what each step after the first runs."""
    return np.array([schedule.active(step) for step in range(1, steps + 1)])


def with_deep_steps(active: BoolArray, deep: BoolArray) -> BoolArray:
    """The same, and every layer at the deep steps."""
    return active | deep[:, None]


def equal_alpha(start: float, num_layers: int, lengths: Sequence[int], mean_layers: float) -> float | None:
    """The largest alpha whose mean depth over texts of this length is not above `mean_layers`; None if none is."""

    def mean(alpha: float) -> float:
        depths = D3(alpha, start).schedule(num_layers).depths(max(lengths) + 1)[1:].cumsum()
        return float(sum(depths[length - 1] for length in lengths) / sum(lengths))

    low, high = 1e-9, 1.0
    if mean(low) > mean_layers:
        return None
    for _ in range(BISECTIONS):
        middle = 1 - 10 ** ((np.log10(1 - low + 1e-12) + np.log10(1 - high + 1e-12)) / 2)
        low, high = (middle, high) if mean(middle) <= mean_layers else (low, middle)
    return low


@dataclass(frozen=True)
class Row:
    """One setting over all texts: how many of its steps are deep, layers per step, and what it loses."""

    name: str
    deep_share: float
    mean_layers: float
    kl: Mean
    extra: Mean
    agrees: Mean

    def as_dict(self) -> dict[str, Any]:
        figures = {"kl_nats": self.kl, "extra_nats": self.extra, "same_first_choice": self.agrees}
        return {
            "name": self.name,
            "deep_share": self.deep_share,
            "mean_layers": self.mean_layers,
            **{name: {"mean": figure.value, "arm_95": figure.arm} for name, figure in figures.items()},
        }


def row(name: str, texts: Sequence[LooseEnds], plans: Sequence[BoolArray], deep: float, entries: str) -> Row:
    """Run every text by its plan."""
    found = [text.run(plan, entries) for text, plan in zip(texts, plans, strict=True)]
    counts = np.array([text.steps for text in texts])
    figures = [mean_of_clusters(np.array([one[place].sum() for one in found]), counts) for place in range(3)]
    return Row(name, deep, float(np.concatenate(plans).sum(axis=1).mean()), *figures)


def dearest(texts: Sequence[LooseEnds], schedule: Schedule, share: float) -> set[int]:
    """The tokens whose steps lose most under a schedule, fed to no more than this share of the steps of these texts."""
    losses: dict[int, list[float]] = defaultdict(list)
    for text in texts:
        kl = text.run(layers_of(schedule, text.steps), "absent")[0]
        for token, loss in zip(text.one.token_ids[:-1], kl.tolist(), strict=True):
            losses[token].append(loss)
    room, chosen = share * sum(len(one) for one in losses.values()), set[int]()
    for token in sorted(losses, key=lambda token: -float(np.mean(losses[token]))):
        room -= len(losses[token])
        if room < 0:
            break
        chosen.add(token)
    return chosen


DeepSteps = Callable[[LooseEnds], BoolArray]


SETS = ("digits", "#### and newline", "punctuation and spaces", "words", "dearest tokens")


def deep_sets(kinds: TokenKinds, fitted: set[int]) -> Iterator[tuple[str, DeepSteps]]:
    """Which steps are deep, by the token that they are fed with."""

    def of(*wanted: Kind) -> DeepSteps:
        return lambda text: np.isin(kinds.among(text.one.token_ids[:-1]), [kind.value for kind in wanted])

    groups = ((Kind.DIGITS,), (Kind.MARK, Kind.NEWLINE), (Kind.PUNCTUATION, Kind.SPACES), (Kind.WORDS,))
    yield from zip(SETS, (of(*group) for group in groups), strict=False)
    yield SETS[-1], lambda text: np.isin(text.one.token_ids[:-1], list(fitted))


@dataclass(frozen=True)
class Settings:
    """What is asked, of which model, and what is compared."""

    model: str = option("demo", "as `d3engine analyze` takes it")
    alpha: float = option(0.9, "of D3")
    start: float = option(0.5, "of D3")
    starts: tuple[float, ...] = option((0.5, 0.6, 0.7, 0.8), "of plain D3 beside it")
    entries: tuple[str, ...] = option(ENTRIES, "of skipped tokens", choices=ENTRIES)
    only: tuple[str, ...] = option((), "these tokens alone", choices=SETS)
    share: float = option(0.25, "of all steps, at most, that the dearest are fed to")
    limit: int = option(40, "texts, of which the first half tells the dearest tokens", type=int)
    max_tokens: int | None = option(None, "of a text", type=int)
    prompts: Path | None = option(None, "a file of prompts", type=Path)
    chat: bool = option(False, "put them into the model's chat template")
    task: str | None = option(None, "a task instead, with --data")
    data: Path | None = option(None, "its folder; the texts are its own answers", type=Path)
    dtype: str = option("auto")
    threads: int = option(1, type=int)


def measure(observer: Observer, kinds: TokenKinds, answered: Sequence[Answered], settings: Settings) -> dict[str, Any]:
    """The first half of the texts tells which tokens are dearest, the second half is measured."""
    num_layers, policy = observer.config.num_layers, D3(settings.alpha, settings.start)
    with torch.inference_mode():
        texts = [LooseEnds(observer, one) for one in tqdm(answered, desc="full depth") if len(one.token_ids) > 1]
    fitting, texts = texts[: len(texts) // 2], texts[len(texts) // 2 :]
    schedule, lengths = policy.schedule(num_layers), [text.steps for text in texts]
    plain = [layers_of(schedule, text.steps) for text in texts]
    groups = [{"deep": [row("plain D3", texts, plain, 0.0, "absent").as_dict()], "plain": [], "name": "none"}]
    left_out: list[str] = []
    chance = np.random.default_rng(0)
    sets = dict(deep_sets(kinds, dearest(fitting, schedule, settings.share)))
    for name, deep in tqdm([(name, sets[name]) for name in settings.only or sets], desc="kinds"):
        marks = [deep(text) for text in texts]
        deep_share = float(np.concatenate(marks).mean())
        if not deep_share:
            left_out.append(name)
            continue
        plans = [with_deep_steps(one, mark) for one, mark in zip(plain, marks, strict=True)]
        rows = [row(f"{name}, {kept}", texts, plans, deep_share, kept) for kept in settings.entries]
        first = settings.entries[0]
        drawn = [with_deep_steps(one, chance.permutation(mark)) for one, mark in zip(plain, marks, strict=True)]
        rows.append(row(f"as many at random, {first}", texts, drawn, deep_share, first))
        others = []
        for start in settings.starts:
            alpha = equal_alpha(start, num_layers, lengths, rows[0].mean_layers)
            if alpha is not None:
                own = D3(alpha, start).schedule(num_layers)
                runs = [layers_of(own, text.steps) for text in texts]
                others.append(row(f"D3, alpha {alpha:.6g}, start {start:g}", texts, runs, 0.0, "absent"))
        groups.append(
            {"name": name, "deep": [one.as_dict() for one in rows], "plain": [one.as_dict() for one in others]}
        )
    return {
        "benchmark": "deep_kinds",
        "texts": len(texts),
        "steps": sum(lengths),
        "groups": groups,
        "left_out": left_out,
    }


def show(report: dict[str, Any], console: Console) -> None:
    """A table for all groups."""
    title = f"{report['texts']} texts, {report['steps']} steps; {report['policy']}"
    table = Table(title=title, title_justify="left")
    for column in ("policy", "deep steps", "layers", "KL, nats", "extra perplexity", "same first choice"):
        table.add_column(column)
    for group in report["groups"]:
        for one in (*group["deep"], *group["plain"]):
            kl = one["kl_nats"]
            table.add_row(
                one["name"],
                f"{one['deep_share']:.0%}",
                f"{one['mean_layers']:.2f}",
                f"{kl['mean']:.3g} +- {kl['arm_95']:.2g}",
                f"{100 * (np.exp(one['extra_nats']['mean']) - 1):+.3g}%",
                f"{one['same_first_choice']['mean']:.1%}",
            )
        table.add_section()
    console.print(table)
    for name in report["left_out"]:
        console.print(f"No step is fed with these: {name}.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison."""
    parser = Parser("deep_kinds", __doc__, arguments, Settings)
    given = settings_of(Settings, parser.given())
    torch.set_num_threads(given.threads)
    asking = {name: getattr(given, name) for name in ("max_tokens", "prompts", "chat", "task", "data")}
    asking = {name: value for name, value in asking.items() if value}
    if given.data:
        asking |= {"reference": True, "shots": 0}
    seen = observe(given.model, {"dtype": given.dtype}, asking, given.limit, None)
    assert seen.engine.tokenizer is not None
    kinds = TokenKinds(seen.engine.tokenizer, seen.engine.config.eos_token_ids)
    report = measure(seen.observer, kinds, seen.answered, given)
    report |= {"policy": f"D3, alpha {given.alpha:g}, start {given.start:g}"}
    parser.publish(report, show, width=120)
    return 0


if __name__ == "__main__":
    sys.exit(main())
