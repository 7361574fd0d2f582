"""Drafting against none: tokens a second, acceptance and equality of answers, over 60 prompts of four kinds.

Engines of `SYSTEMS`, and llama.cpp's own drafting on the same files, take turns at each prompt or group of prompts. A
ratio is tokens a second over those without drafts at the same prompts. Tokens are compared in every run,
log-probabilities in one that is not timed.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import groupby, product
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from benchmarks.children import Child
from benchmarks.llama_cpp_drafts import start
from benchmarks.report import Parser, option, positive, settings_of
from benchmarks.systems import rest
from d3engine.depth import FullDepth
from d3engine.engine.engine import Engine
from d3engine.request.params import SamplingParams
from d3engine.research.plots import BLUE, INK, ORANGE, new_figure, save_figure

BASE, AGAIN = "none", "none again"
SYSTEMS: dict[str, Callable[[str], dict[str, Any]]] = {
    BASE: lambda draft: {"depth": FullDepth()},
    AGAIN: lambda draft: {"depth": FullDepth()},  # what noise alone does to a ratio
    "draft": lambda draft: _speculative(method="draft_model", model=draft, num_speculative_tokens=4),
    "lookup": lambda draft: _speculative(method="ngram", num_speculative_tokens=8),
    "lookup, auto": lambda draft: _speculative(method="ngram"),
    "auto": lambda draft: _speculative(method="draft_model", model=draft),
}
"""System -> arguments of its engine, given the draft model."""


def _speculative(**config: Any) -> dict[str, Any]:
    return {"speculative_config": config}


PEER = "llama.cpp"
PROMPTS = Path(__file__).with_name("speculation_prompts.json")
KINDS = ("code", "problems", "edits", "chats")
SLOWER = 0.97
"""A prompt whose ratio is below this is one that drafting makes slower, and not by noise."""


@dataclass(frozen=True)
class Settings:
    """What is run: `limit` prompts of each kind, answers of at most `tokens` tokens, at each temperature and batch.

    Of `repeats` runs of the same prompts by the same system the one of middle length counts.
    Log-probabilities are compared over `checked` prompts of each kind. The peer drafts each of `peer_lengths` tokens.
    """

    model: str = option(help="the model that answers")
    draft: str = option(help="a smaller model of the same vocabulary")
    systems: tuple[str, ...] = option(
        tuple(name for name in SYSTEMS if name != AGAIN), f"with {BASE}", choices=list(SYSTEMS)
    )
    limit: int = option(15, "prompts of each kind")
    tokens: int = option(256, "of an answer at most")
    temperatures: tuple[float, ...] = option((0.0, 0.7))
    batches: tuple[int, ...] = option((1,), "prompts at once")
    repeats: int = option(1, "runs of each prompt by each system, of which the middle one counts")
    checked: int = option(1, "prompts with log-probabilities, a kind", type=int)
    threads: int = option(2)
    max_model_len: int = option(1024)
    peer_lengths: tuple[int, ...] = (2, 3, 4, 5)


@dataclass(frozen=True)
class Run:
    """One call: its seconds, those of the prompt pass among them, and what was answered and drafted."""

    seconds: float
    prompt_seconds: float
    token_ids: list[list[int]]
    drafted: int
    accepted: int
    verifications: int
    logprobs: list[list[float]] | None = None

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return sum(map(len, self.token_ids)) / self.seconds


class EngineSystem:
    """An engine of `SYSTEMS`; `base` is the system over which its ratios are."""

    base = BASE

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def answer(self, prompts: list[list[int]], params: list[SamplingParams]) -> Run:
        """Answer them by one `generate`."""
        begun = time.perf_counter()
        outputs = self._engine.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begun
        answers, metrics = [output.outputs[0] for output in outputs], [output.metrics for output in outputs]
        told = [one.logprobs for one in answers if one.logprobs is not None]
        return Run(
            seconds,
            max(one.prefill_seconds or 0.0 for one in metrics),
            [one.token_ids for one in answers],
            sum(one.num_drafted_tokens for one in metrics),
            sum(one.num_accepted_tokens for one in metrics),
            sum(one.num_verifications for one in metrics),
            [[entry.logprob for row in rows for entry in row.values()] for rows in told] or None,
        )


class PeerSystem:
    """llama.cpp with this number of drafted tokens: greedily and one prompt at a time, as its example does."""

    base = PEER

    def __init__(self, child: Child, draft_length: int) -> None:
        self._child = child
        self._draft_length = draft_length

    def answer(self, prompts: list[list[int]], params: list[SamplingParams]) -> Run:
        """Answer the one prompt."""
        (prompt,), (asked,) = prompts, params
        found = self._child.ask({"prompt": prompt, "tokens": asked.max_tokens, "draft_length": self._draft_length})
        return Run(**found | {"token_ids": [found["token_ids"]]})


System = EngineSystem | PeerSystem


# -- what is asked ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """Prompts of one kind that are answered at once, and the number of the first."""

    kind: str
    first: int
    prompts: list[list[int]]


def read_prompts(limit: int) -> dict[str, list[str]]:
    """The first `limit` prompts of each kind."""
    found = json.loads(PROMPTS.read_text(encoding="utf-8"))
    return {kind: found[kind][:limit] for kind in KINDS}


def groups_of(prompts: dict[str, list[list[int]]], batch: int) -> list[Group]:
    """The prompts in groups of `batch`, the last group of a kind with what is left."""
    return [
        Group(kind, first, of_kind[first : first + batch])
        for kind, of_kind in prompts.items()
        for first in range(0, len(of_kind), batch)
    ]


def params_of(
    group: Group, settings: Settings, temperature: float, logprobs: int | None = None
) -> list[SamplingParams]:
    """The parameters of a group; a prompt's seed is its number."""
    return [
        SamplingParams(
            temperature=temperature,
            seed=group.first + nth,
            max_tokens=settings.tokens,
            logprobs=logprobs,
            top_p=1.0,
        )
        for nth in range(len(group.prompts))
    ]


# -- measuring -------------------------------------------------------------------------------------------------


Turn = tuple[float, int, Group, str]
"""Temperature, batch, prompts and the system that answers them."""

Runs = dict[tuple[float, int, str], list[tuple[Group, Run]]]
"""By temperature, batch and system."""


def measure(settings: Settings) -> dict[str, Any]:
    """Run every system over all prompts and return the report, without its environment.

    Ctrl-C ends the turns: the report has the prompts that every system has answered by then.
    """
    with ExitStack() as opened:
        engines = {name: opened.enter_context(_engine(name, settings)) for name in settings.systems}
        systems: dict[str, System] = {name: EngineSystem(engine) for name, engine in engines.items()}
        asked = {
            kind: [_ids(engines[BASE], text) for text in texts] for kind, texts in read_prompts(settings.limit).items()
        }
        version = None
        if settings.peer_lengths:
            child, version = start(settings.model, settings.draft, settings.threads, settings.max_model_len)
            opened.callback(child.close)
            systems[PEER] = PeerSystem(child, 0)
            systems |= {f"{PEER}, {length}": PeerSystem(child, length) for length in settings.peer_lengths}
        turns, checks = list(_turns(settings, systems, asked)), list(_checks(settings, asked))
        with tqdm(total=len(turns) + len(checks) * len(engines), unit="run", disable=None) as bar:
            for system in systems.values():  # a warm-up
                system.answer(asked[KINDS[0]][:1], [SamplingParams(temperature=0.0, max_tokens=8)])
            runs, is_whole = _answers(settings, systems, turns, bar)
            checked = _equal_bits(settings, systems, checks if is_whole else [], bar)
    cells = [
        {"system": name, "base": systems[name].base, "temperature": temperature, "batch": batch, **cell}
        for (temperature, batch, name), found in runs.items()
        for cell in cells_of(middle_runs(found), middle_runs(runs[temperature, batch, systems[name].base]))
    ]
    return {
        "benchmark": "speculation",
        "settings": asdict(settings) | {name: Path(getattr(settings, name)).name for name in ("model", "draft")},
        "arguments": {name: repr(SYSTEMS[name](Path(settings.draft).name)) for name in settings.systems},
        "llama.cpp": version,
        "log_probabilities": checked,
        "cells": cells,
    }


def _answers(settings: Settings, systems: dict[str, System], turns: list[Turn], bar: Any) -> tuple[Runs, bool]:
    """The runs of all turns, or after Ctrl-C of the groups that every system has answered; whether it is all."""
    runs: Runs = {(temperature, batch, name): [] for temperature, batch, _, name in turns}
    try:
        for temperature, batch, group, name in turns:
            bar.set_description(f"{name}, {group.kind}")
            rest()
            run = systems[name].answer(group.prompts, params_of(group, settings, temperature))
            runs[temperature, batch, name].append((group, run))
            bar.update()
    except KeyboardInterrupt:
        runs = answered_by_all(runs)
        if not runs:
            raise
        print("Ended early: the prompts that every system has answered are reported.", file=sys.stderr)
        return runs, False
    return runs, True


def answered_by_all(runs: Runs) -> Runs:
    """The runs without the groups that some system has not answered; each answers them in the same order."""
    least: dict[tuple[float, int], int] = {}
    for (temperature, batch, _), found in runs.items():
        least[temperature, batch] = min(len(found), least.get((temperature, batch), len(found)))
    return {key: found[: least[key[:2]]] for key, found in runs.items() if least[key[:2]]}


def middle_runs(found: list[tuple[Group, Run]]) -> list[tuple[Group, Run]]:
    """For each group in turn, of its runs the one of middle length."""
    of_groups = (list(runs) for _, runs in groupby(found, key=lambda pair: id(pair[0])))
    return [sorted(runs, key=lambda pair: pair[1].seconds)[(len(runs) - 1) // 2] for runs in of_groups]


def _equal_bits(
    settings: Settings, systems: dict[str, System], checks: list[tuple[Group, float]], bar: Any
) -> dict[str, dict[str, int]]:
    """How many answers of each engine equal those of the base with their log-probabilities."""
    checked = {name: {"answers": 0, "equal": 0} for name in settings.systems}
    for group, temperature in checks:
        bar.set_description(f"log-probabilities, {group.kind}")
        params = params_of(group, settings, temperature, logprobs=0)
        found = {name: systems[name].answer(group.prompts, params) for name in settings.systems}
        bar.update(len(found))
        for name, run in found.items():
            checked[name]["answers"] += 1
            checked[name]["equal"] += is_equal(run, found[BASE])
    return checked


def _engine(name: str, settings: Settings) -> Engine:
    # Prompts share a beginning, and each is asked more than once.
    return Engine(
        settings.model,
        max_model_len=settings.max_model_len,
        max_num_seqs=max(settings.batches),
        num_threads=settings.threads,
        enable_prefix_caching=False,
        **SYSTEMS[name](settings.draft),
    )


def _ids(engine: Engine, text: str) -> list[int]:
    return engine.chat_prompt([{"role": "user", "content": text}])["prompt_token_ids"]


def _turns(settings: Settings, systems: dict[str, System], asked: dict[str, list[list[int]]]) -> Iterator[Turn]:
    for temperature, batch in product(settings.temperatures, settings.batches):
        is_for_all = temperature == 0 and batch == 1
        names = [name for name, system in systems.items() if is_for_all or system.base == BASE]
        # Kinds in turn, so that a run that is ended early has some of each.
        for nth, group in enumerate(sorted(groups_of(asked, batch), key=lambda group: group.first)):
            for begin in range(nth, nth + settings.repeats):
                first = begin % len(names)
                yield from ((temperature, batch, group, name) for name in [*names[first:], *names[:first]])


def _checks(settings: Settings, asked: dict[str, list[list[int]]]) -> Iterator[tuple[Group, float]]:
    some = {kind: prompts[: settings.checked] for kind, prompts in asked.items()}
    yield from product(groups_of(some, 1), settings.temperatures)


def is_equal(one: Run, other: Run) -> bool:
    """Whether tokens and log-probabilities are the same to the bit."""
    return one.token_ids == other.token_ids and one.logprobs == other.logprobs


def cells_of(found: list[tuple[Group, Run]], base: list[tuple[Group, Run]]) -> Iterator[dict[str, Any]]:
    """The figures of a system over its base, of every kind and of all; both have the same groups in the same order."""
    for kind in (*KINDS, "all"):
        pairs = [
            (group, run, other)
            for (group, run), (_, other) in zip(found, base, strict=True)
            if kind in (group.kind, "all")
        ]
        if pairs:
            yield {"kind": kind, **_cell(pairs)}


def _cell(pairs: list[tuple[Group, Run, Run]]) -> dict[str, Any]:
    runs = [run for _, run, _ in pairs]
    ratios = [run.rate / other.rate for _, run, other in pairs]
    low, middle, high = map(float, np.quantile(ratios, (0.25, 0.5, 0.75)))
    worst = pairs[int(np.argmin(ratios))][0]
    tokens, seconds = sum(sum(map(len, run.token_ids)) for run in runs), sum(run.seconds for run in runs)
    drafted, accepted, verifications = (
        sum(getattr(run, name) for run in runs) for name in ("drafted", "accepted", "verifications")
    )
    equal = [
        own == wanted for _, run, other in pairs for own, wanted in zip(run.token_ids, other.token_ids, strict=True)
    ]
    return {
        "ratio": {"median": middle, "low": low, "high": high},
        "worst": {"ratio": min(ratios), "prompt": f"{worst.kind} {worst.first + 1}"},
        "slower": sum(ratio < SLOWER for ratio in ratios) / len(ratios),
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "prompt_share": sum(run.prompt_seconds for run in runs) / seconds,
        "drafted": drafted,
        "accepted": accepted,
        "verifications": verifications,
        "tokens_per_verification": 1 + accepted / verifications if verifications else None,
        "answers": len(equal),
        "equal": sum(equal),
        "ratios": ratios,
        "seconds": [run.seconds for run in runs],
    }


# -- the page --------------------------------------------------------------------------------------------------


def show(report: dict[str, Any], console: Console) -> None:
    """Print one row for each kind of prompt and system, and what of the log-probabilities was equal."""
    settings = report["settings"]
    title = f"Drafts of {settings['draft']} for {settings['model']}, {settings['threads']} threads"
    table = Table(title=title, title_justify="left", padding=(0, 1, 0, 0))
    for column in ("system", "prompts"):
        table.add_column(column, no_wrap=True)
    for column in (
        "temp.",
        "at once",
        "tokens/s",
        "ratio (middle half)",
        "worst",
        f"below {SLOWER}",
        "tokens a\nverification",
        "accepted",
        "equal",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for cell in report["cells"]:
        table.add_row(cell["system"], cell["kind"], *_in_words(cell), end_section=cell["kind"] == "all")
    console.print(table)
    for name, found in report["log_probabilities"].items():
        if name != BASE:
            console.print(f"{name}: {found['equal']} of {found['answers']} answers equal with their log-probabilities")


def _in_words(cell: dict[str, Any]) -> Iterator[str]:
    ratio, worst, per = cell["ratio"], cell["worst"], cell["tokens_per_verification"]
    yield f"{cell['temperature']:g}"
    yield str(cell["batch"])
    yield f"{cell['tokens_per_second']:.1f}"
    if cell["system"] == cell["base"]:
        yield from ("", "", "", "", "", "")
        return
    yield f"{ratio['median']:.2f} ({ratio['low']:.2f}-{ratio['high']:.2f})"
    yield f"{worst['ratio']:.2f} {worst['prompt']}"
    yield f"{cell['slower']:.0%}"
    yield "" if per is None else f"{per:.2f}"
    yield f"{cell['accepted'] / cell['drafted']:.0%}" if cell["drafted"] else ""
    yield f"{cell['equal']}/{cell['answers']}"


def plot(report: dict[str, Any], path: str) -> None:
    """Draw the median ratio and its middle half: a panel for each kind and batch, greedy beside sampled."""
    batches, temperatures = report["settings"]["batches"], report["settings"]["temperatures"]
    cells = [cell for cell in report["cells"] if cell["system"] != cell["base"]]
    kinds = (*KINDS, "all")
    figure = new_figure(width=2.4 * len(kinds), height=0.6 + 2.8 * len(batches))
    panels = figure.subplots(len(batches), len(kinds), sharey=True, squeeze=False)
    for (row, batch), (column, kind) in product(enumerate(batches), enumerate(kinds)):
        axes = panels[row][column]
        names = list(dict.fromkeys(cell["system"] for cell in cells if cell["batch"] == batch))
        for nth, (temperature, colour) in enumerate(
            zip(temperatures, (BLUE, ORANGE) * len(temperatures), strict=False)
        ):
            found = [
                cell
                for cell in cells
                if (cell["batch"], cell["kind"], cell["temperature"]) == (batch, kind, temperature)
            ]
            places = [names.index(cell["system"]) + 0.3 * (nth - (len(temperatures) - 1) / 2) for cell in found]
            medians, lows, highs = ([cell["ratio"][name] for cell in found] for name in ("median", "low", "high"))
            spread = [np.subtract(medians, lows), np.subtract(highs, medians)]
            axes.errorbar(places, medians, yerr=spread, fmt="o", color=colour, label=f"temperature {temperature:g}")
        axes.axhline(1, color=INK, linewidth=1)
        axes.set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize="small")
        axes.set_xlim(-0.6, len(names) - 0.4)
        axes.set_title(kind if len(batches) == 1 else f"{kind}, {batch} at once", fontsize="medium")
        axes.spines[["top", "right"]].set_visible(False)
    for row in panels:
        row[0].set_ylabel("tokens a second\nover no drafts")
    panels[0][0].set_ylim(bottom=0)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2, frameon=False, fontsize="small")
    save_figure(figure, path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = Parser("speculation", __doc__, arguments, Settings)
    parser.add_argument(
        "--peer-lengths",
        type=positive,
        nargs="*",
        default=Settings.peer_lengths if find_spec("llama_cpp") else (),
        help="tokens that llama.cpp drafts, where it is installed; nothing leaves it out",
    )
    parser.add_plot()
    settings = settings_of(Settings, parser.given())
    if BASE not in settings.systems:
        parser.error(f"--systems must name {BASE}, over which the ratios are")
    parser.publish(measure(settings), show, width=150, plot=plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
