"""Lossless D3 against full depth: tokens per second over draft length and D3's setting, and what acceptance promises.

By the model in the plot a draft of g tokens, each accepted with probability b, yields (1 - b^(g+1)) / (1 - b) tokens a
verification and takes g c + 1 full steps. D3 drafts for `Lossless`, a window of layers left out for `SelfSpeculative`.
Seconds are the process's own on one thread; a speed-up is the median of the ratios within rounds. Ctrl-C after the
first round ends the run with the rounds that are done.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from benchmarks.report import Parser, option, ratios, settings_of, summary
from d3engine import InvalidValueError
from d3engine.depth import D3, DepthPolicy, Distilled, FullDepth, LayerTable, Lossless, SelfSpeculative
from d3engine.engine.engine import Engine
from d3engine.model.config import ModelConfig
from d3engine.model.students import read_student
from d3engine.request.outputs import RequestOutput
from d3engine.request.params import SamplingParams
from d3engine.research.analysis.answers import Prompt, read_prompts
from d3engine.research.evaluation.word_problems import format_prompt, problems
from d3engine.research.plots import BLUE, INK, ORANGE, new_figure, save_figure

DRAFT = {"flag": "--draft", "action": "append", "nargs": 2, "type": float, "metavar": ("ALPHA", "START")}
DRAFT_HELP = "a setting of D3 to draft with; may be repeated"
LENGTHS_HELP = "draft lengths"


@dataclass(frozen=True)
class DraftSettings:
    """Prompts, and what drafts of D3 cross skipped layers by. `chat` is a file of prompts, one a line."""

    bridges: str | None = option(None, "bridges that drafts cross skipped layers by", metavar="FILE")
    prompts: int = option(4, "word problems, or lines of --chat")
    chat: str | None = option(None, "prompts for the chat template, one a line, not word problems", metavar="FILE")
    tokens: int = option(64, "tokens of an answer at most")


@dataclass(frozen=True)
class Settings(DraftSettings):
    """What is run: each draft with each draft length, over `prompts` prompts, `batch` at once, in `repeats` rounds.

    A draft is D3 at one of `drafts` (alpha, start), leaves out one of `windows` of layers (first, last), or runs one of
    `students`. `chat` names the file that prompts come from, one a line; without it they are word problems.
    Drafts of D3 cross what they leave out by the file `bridges`, if there is one.
    """

    model: str = option("demo", "a model directory, or demo")
    drafts: tuple[tuple[float, float], ...] = option(
        ((0.95, 0.5), (0.8, 0.5), (0.8, 0.4), (0.8, 0.3)), DRAFT_HELP, **DRAFT
    )
    lengths: tuple[int, ...] = option((1, 2, 4, 8), LENGTHS_HELP)
    windows: tuple[tuple[int, int], ...] = option(
        (),
        "layers to leave out of a self-speculative draft; may be repeated",
        **{"flag": "--without", "action": "append", "nargs": 2, "type": int, "metavar": ("FIRST", "LAST")},
    )
    students: tuple[str, ...] = option((), "files of students to draft with", metavar="FILE")
    batch: int = option(1, "answers at once")
    repeats: int = option(8, "rounds timed, after a warm-up; 0: counts", type=int)


@dataclass(frozen=True)
class Draft:
    """Who drafts: `about` for the report, the policy by itself, and what verifies it."""

    about: dict[str, Any]
    alone: DepthPolicy
    verified: type[SelfSpeculative]

    @property
    def title(self) -> str:
        """ "alpha 0.9, start 0.6", or "without layers 3 to 4"."""
        if "student" in self.about:
            return str(self.about["student"])
        if "alpha" in self.about:
            return f"alpha {self.about['alpha']}, start {self.about['start']}"
        first, last = self.about["without"]
        return f"without layer {first}" if first == last else f"without layers {first} to {last}"

    def policy(self, length: int) -> SelfSpeculative:
        """The answers of full depth, drafted `length` tokens at a time."""
        return self.verified(self.alone, length)


def prompts_for(engine: Engine, count: int, chat: str | None) -> list[Prompt]:
    """A given number of word problems, or as many lines of the file `chat` in the model's chat template."""
    if chat is None:
        return [format_prompt(problem.question) for problem in itertools.islice(problems("test", 1), count)]
    return [engine.chat_prompt([{"role": "user", "content": turn}]) for turn in read_prompts(Path(chat), count)]


def drafts_of(settings: Settings, config: ModelConfig) -> list[Draft]:
    """All drafts of the settings, for a model of this config."""
    decays = [
        Draft({"alpha": alpha, "start": start}, D3(alpha, start, bridges=settings.bridges), Lossless)
        for alpha, start in settings.drafts
    ]
    students = [
        Draft(
            {"student": Path(file).name}, Distilled(read_student(Path(file), config).skip_layers, file), SelfSpeculative
        )
        for file in settings.students
    ]
    return decays + [_without(first, last, config.num_layers) for first, last in settings.windows] + students


def _without(first: int, last: int, num_layers: int) -> Draft:
    if not 0 <= first <= last < num_layers:
        raise InvalidValueError("--without", (first, last), f"two layers from 0 to {num_layers - 1}")
    left = [layer for layer in range(num_layers) if not first <= layer <= last]
    return Draft({"without": [first, last]}, LayerTable([list(range(num_layers)), left], "none"), SelfSpeculative)


def modelled_speedup(acceptance: float, cost: float, length: float) -> float:
    """(1 - b^(g+1)) / ((1 - b)(g c + 1)), and g + 1 over g c + 1 where b is 1."""
    return tokens_for(acceptance, length) / (length * cost + 1)


def tokens_for(acceptance: float, length: float) -> float:
    """Tokens a verification yields on average: (1 - b^(g+1)) / (1 - b)."""
    return length + 1 if acceptance == 1 else (1 - acceptance ** (length + 1)) / (1 - acceptance)


def acceptance_for(tokens: float, length: float) -> float:
    """The b in [0, 1] at which a verification of `length` drafted tokens yields `tokens` on average."""
    if tokens >= length + 1:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if tokens_for(middle, length) < tokens else (low, middle)
    return (low + high) / 2


def measure(settings: Settings) -> dict[str, Any]:
    """Run every system and return the report, without its environment."""
    torch.set_num_threads(1)
    answers: dict[str, list[RequestOutput]] = {}
    # whose bridges requests may name
    own = D3(*settings.drafts[0], bridges=settings.bridges) if settings.drafts else FullDepth()
    arguments: dict[str, Any] = {"device": "cpu", "max_num_seqs": settings.batch, "enable_prefix_caching": False}
    with Engine(settings.model, depth=own, **arguments) as engine:
        engine.bridges.allow(frozenset(settings.students))
        drafts = drafts_of(settings, engine.config)
        systems: dict[str, DepthPolicy] = {"full": FullDepth()}
        for draft in drafts:
            if settings.repeats:
                systems[draft.title] = draft.alone
            systems |= {_name(draft, length): draft.policy(length) for length in settings.lengths}
        asked = prompts_for(engine, settings.prompts, settings.chat)
        rounds: list[dict[str, float]] = []
        with tqdm(total=(settings.repeats + 1) * len(systems), unit="run", disable=None) as bar:

            def timed(name: str) -> float:
                bar.set_description(name)
                params = SamplingParams(temperature=0.0, max_tokens=settings.tokens, depth=systems[name])
                start = time.process_time()
                answers[name] = engine.generate(asked, params, use_tqdm=False)
                bar.update()
                return time.process_time() - start

            for name in systems:  # a warm-up, whose answers are those of every round
                timed(name)
            try:
                for _ in range(settings.repeats):
                    rounds.append({name: timed(name) for name in systems})
            except KeyboardInterrupt:
                if not rounds:
                    raise
                print(f"Ended after {len(rounds)} of {settings.repeats} rounds; what they say stands.", file=sys.stderr)
        seconds = {name: [each[name] for each in rounds] for name in systems}
        num_layers = engine.config.num_layers
    full = [output.outputs[0].token_ids for output in answers["full"]]
    cells = [_cell(draft, length, answers, seconds) for draft, length in itertools.product(drafts, settings.lengths)]
    count = sum(map(len, full))
    return {
        "benchmark": "lossless",
        "settings": asdict(settings),
        "num_layers": num_layers,
        "tokens": count,
        "cells": cells,
        **_full_depth(count, cells, seconds["full"]),
    }


def counts_of(outputs: Sequence[RequestOutput]) -> tuple[int, int, int]:
    """Drafted and accepted tokens, and verifications."""
    names = ("num_drafted_tokens", "num_accepted_tokens", "num_verifications")
    drafted, accepted, passes = (sum(getattr(one.metrics, name) for one in outputs) for name in names)
    return drafted, accepted, passes


def _full_depth(count: int, cells: Sequence[dict[str, Any]], seconds: Sequence[float]) -> dict[str, Any]:
    """Its speed, and the best draft beside it; nothing without timed rounds."""
    if not seconds:
        return {}
    speed = summary([count / s for s in seconds])
    return {"full_depth_tokens_per_second": speed, "best": max(cells, key=lambda cell: cell["speedup"]["median"])}


def _cell(
    draft: Draft, length: int, answers: dict[str, list[RequestOutput]], seconds: dict[str, list[float]]
) -> dict[str, Any]:
    """One draft and draft length beside full depth."""
    name = _name(draft, length)
    full = [output.outputs[0].token_ids for output in answers["full"]]
    given = [output.outputs[0] for output in answers[name]]
    assert [answer.token_ids for answer in given] == full, f"{name} is not lossless"
    drafted, accepted, passes = counts_of(answers[name])
    count = sum(map(len, full))
    counts = {
        **draft.about,
        "title": draft.title,
        "draft_length": length,
        "mean_draft_length": drafted / passes,
        "accepted_over_drafted": accepted / drafted,
        "tokens_per_verification": 1 + accepted / passes,
        # The end of an answer ends its draft, so drafts are shorter than they may be.
        "acceptance": acceptance_for(1 + accepted / passes, drafted / passes),
        "layers_per_token": sum(sum(answer.depths) for answer in given) / count,
    }
    if not seconds["full"]:
        return counts
    draft_tokens = sum(len(output.outputs[0].token_ids) for output in answers[draft.title])
    # What a shallow token costs: the draft by itself, whose answers may be of another length, over full depth.
    cost = median(ratios(seconds[draft.title], seconds["full"])) * count / draft_tokens
    return counts | {
        "tokens_per_second": summary([count / s for s in seconds[name]]),
        "speedup": summary(ratios(seconds["full"], seconds[name])),
        "draft_cost": cost,
        "modelled_speedup": modelled_speedup(counts["acceptance"], cost, drafted / passes),
    }


def _name(draft: Draft, length: int) -> str:
    return f"{draft.title}, {length}"


# -- the page --------------------------------------------------------------------------------------------------


def show(report: dict[str, Any], console: Console) -> None:
    """Print one row a cell, and whether any pays."""
    settings = report["settings"]
    table = Table(
        title=f"Drafts on {settings['model']!r}, {settings['batch']} at once", title_justify="left", padding=(0, 0)
    )
    is_timed = "best" in report
    columns = ["draft", "g", "accepted", "tokens\nper pass", "layers\nper token"]
    for column in columns + ["speed-up", "rounds", "model"] * is_timed:
        table.add_column(column, justify="right", no_wrap=True)
    for cell in report["cells"]:
        table.add_row(
            cell["title"],
            str(cell["draft_length"]),
            f"{cell['accepted_over_drafted']:.0%}",
            f"{cell['tokens_per_verification']:.2f}",
            f"{cell['layers_per_token']:.1f}",
            *(_times(cell) if is_timed else ()),
        )
    console.print(table)
    if not is_timed:
        return
    best = report["best"]
    words = f"{best['title']}, draft length {best['draft_length']}: {best['speedup']['median']:.2f}x"
    paying = [cell for cell in report["cells"] if cell["speedup"]["median"] > 1]
    console.print(f"{len(paying)} of {len(report['cells'])} settings pay; the best is {words}.")


def _times(cell: dict[str, Any]) -> tuple[str, str, str]:
    """What only a clock tells of a cell: the speed-up, its rounds, and what its model says."""
    speedup = cell["speedup"]
    return f"{speedup['median']:.2f}", f"{speedup['min']:.2f}-{speedup['max']:.2f}", f"{cell['modelled_speedup']:.2f}"


def plot(report: dict[str, Any], path: str) -> None:
    """Draw measured and modelled speed-up over the draft length, a panel for each draft, to a PNG file."""
    titles = list(dict.fromkeys(cell["title"] for cell in report["cells"]))
    figure = new_figure(width=3.1 * len(titles), height=3.8)
    panels = figure.subplots(1, len(titles), sharey=True, squeeze=False)[0]
    for axes, title in zip(panels, titles, strict=True):
        cells = [cell for cell in report["cells"] if cell["title"] == title]
        lengths = [cell["draft_length"] for cell in cells]
        acceptance = sum(cell["acceptance"] for cell in cells) / len(cells)
        cost = cells[0]["draft_cost"]
        line = range(1, max(lengths) + 1)
        label = f"model: b = {acceptance:.2f}, c = {cost:.2f}"
        modelled = [modelled_speedup(acceptance, cost, length) for length in line]
        axes.plot(line, modelled, color=ORANGE, linestyle="--", label=label)
        axes.plot(lengths, [cell["speedup"]["median"] for cell in cells], color=BLUE, marker="o", label="measured")
        axes.axhline(1, color=INK, linewidth=1)
        axes.set_title(title, fontsize="medium")
        axes.set_xlabel("draft length g")
        axes.set_xticks(lengths)
        axes.legend(frameon=False, fontsize="small")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("tokens per second over full depth's")
    panels[0].set_ylim(bottom=0)
    save_figure(
        figure,
        path,
        f"Lossless D3 on the {report['settings']['model']} model ({report['num_layers']} layers,"
        f" {report['settings']['batch']} at once, one CPU thread): it pays above 1",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = Parser("lossless", __doc__, arguments, Settings)
    parser.add_plot()
    options = parser.given()
    has_others = (options.windows or options.students) and not options.drafts
    settings = settings_of(Settings, options, **({"drafts": ()} if has_others else {}))
    if settings.repeats < 0 or (options.plot and not settings.repeats):
        parser.error(f"--repeats must be at least {1 if options.plot else 0}, not {settings.repeats}")
    parser.publish(measure(settings), show, plot=plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
