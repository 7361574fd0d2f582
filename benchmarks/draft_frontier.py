"""Whether drafts by skipped layers can pay: acceptance over what a draft costs, with and without bridges.

A cycle of n drafts, each token accepted with probability a at the share s of a full pass in FLOPs, yields
(1 + a + ... + a^n) / (n s + 1) tokens a pass: a setting is a point (s, a), and what must be reached is a line. No load
changes these counts.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Console
from tqdm import tqdm

from benchmarks import lossless
from benchmarks.lossless import DRAFT, DRAFT_HELP, LENGTHS_HELP, acceptance_for, counts_of, modelled_speedup
from benchmarks.report import main_of, option, print_table
from d3engine.depth import D3, FullDepth, Lossless, Schedule
from d3engine.depth.schedule import windows_of
from d3engine.depth.statistics import ModelShape
from d3engine.engine.engine import Engine
from d3engine.request.params import SamplingParams
from d3engine.research.evaluation.accuracy import shape_of
from d3engine.research.plots import BLUE, INK, ORANGE, new_figure, save_figure

LONGEST = 16
"""Tokens of a draft at most, where the length that suits a setting best is looked for."""

GOALS = (1.0, 1.25)


@dataclass(frozen=True)
class Settings(lossless.DraftSettings):
    """What is counted: D3's settings (alpha, start), each by drafts of `lengths`, over `prompts` word problems, or as
    many lines of the file `chat`, asked by the model's chat template.

    With a small alpha a draft is as shallow as `start` allows from its second token on.
    """

    model: str = option("smollm2", "a model directory, smollm2 or demo")
    drafts: tuple[tuple[float, float], ...] = option(
        ((0.5, 0.9), (0.5, 0.8), (0.5, 0.7), (0.5, 0.6), (0.97, 0.6)), DRAFT_HELP, **DRAFT
    )
    lengths: tuple[int, ...] = option((1, 3), LENGTHS_HELP)


def best_length(acceptance: float, share: float) -> int:
    """The length of draft that is worth most."""
    return max(range(1, LONGEST + 1), key=lambda length: modelled_speedup(acceptance, share, length))


def needed(share: float, goal: float) -> float:
    """The acceptance at which drafts of this share reach `goal` at their best length; above 1 where none does."""
    if modelled_speedup(1.0, share, best_length(1.0, share)) < goal:
        return 1.01
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        is_enough = modelled_speedup(middle, share, best_length(middle, share)) >= goal
        low, high = (low, middle) if is_enough else (middle, high)
    return high


def share_of(schedule: Schedule, shape: ModelShape, num_steps: int) -> float:
    """What a drafted token costs of a full pass in FLOPs of matrices, on average over these steps."""
    full = shape.num_layers * shape.layer_parameters + shape.head_parameters
    costs = []
    for step in range(1, num_steps):
        active = schedule.active(step)
        maps = 0 if schedule.bridges is None else len(windows_of(active))
        costs.append(int(active.sum()) * shape.layer_parameters + maps * shape.hidden_size**2 + shape.head_parameters)
    return float(np.mean(costs)) / full


def measure(settings: Settings) -> dict[str, Any]:
    """Answer by every setting and return the report, without its environment."""
    kinds = [None] if settings.bridges is None else [None, settings.bridges]
    first = D3(*settings.drafts[0], bridges=settings.bridges)
    with Engine(settings.model, depth=first, device="cpu", max_num_seqs=settings.prompts, num_threads=1) as engine:
        shape, asked = shape_of(engine.config), lossless.prompts_for(engine, settings.prompts, settings.chat)
        plain = SamplingParams(temperature=0.0, max_tokens=settings.tokens, depth=FullDepth())
        full = [output.outputs[0].token_ids for output in engine.generate(asked, plain, use_tqdm=False)]
        points = []
        systems = list(itertools.product(kinds, settings.drafts, settings.lengths))
        for bridges, draft, length in tqdm(systems, unit="run", disable=None):
            d3 = D3(*draft, bridges=bridges)
            params = SamplingParams(temperature=0.0, max_tokens=settings.tokens, depth=Lossless(d3, length))
            outputs = engine.generate(asked, params, use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs] == full, f"{d3} is not lossless"
            counts = counts_of(outputs)
            share = share_of(d3.schedule(shape.num_layers), shape, settings.tokens)
            points.append(_point(draft, bridges is not None, length, counts, share))
    return {
        "benchmark": "draft_frontier",
        "settings": asdict(settings),
        "num_layers": shape.num_layers,
        "points": points,
        "best": max(points, key=lambda point: point["at_best_length"]),
    }


def _point(
    draft: tuple[float, float], is_bridged: bool, length: int, counts: tuple[int, int, int], share: float
) -> dict[str, Any]:
    drafted, accepted, passes = counts
    acceptance = acceptance_for(1 + accepted / passes, drafted / passes)
    best = best_length(acceptance, share)
    return {
        "alpha": draft[0],
        "start": draft[1],
        "bridged": is_bridged,
        "draft_length": length,
        "drafted": drafted,
        "accepted": accepted,
        "acceptance": acceptance,
        "share": share,
        "speedup": (1 + accepted / passes) / (drafted / passes * share + 1),
        "best_length": best,
        "at_best_length": modelled_speedup(acceptance, share, best),
    }


def show(report: dict[str, Any], console: Console) -> None:
    """Print one row a point, and what the best of them comes to."""
    columns = ("alpha", "start", "", "n", "accepted", "a", "s", "worth", "best n", "worth there", "a for 1.25x")
    rows = []
    for point in report["points"]:
        wanted = needed(point["share"], 1.25)
        rows.append(
            (
                *(str(point["alpha"]), str(point["start"]), "bridged" if point["bridged"] else "skipped"),
                *(str(point["draft_length"]), f"{point['accepted']}/{point['drafted']}"),
                *(f"{point[one]:.2f}" for one in ("acceptance", "share", "speedup")),
                *(str(point["best_length"]), f"{point['at_best_length']:.2f}"),
                f"{wanted:.2f}" if wanted <= 1 else "none",
            )
        )
    print_table(console, columns, rows, f"Drafts of {report['settings']['model']!r} by skipped layers")


def plot(report: dict[str, Any], path: str) -> None:
    """Draw the points, and the lines that they would have to reach, to a PNG file."""
    figure = new_figure(width=6.4, height=4.4)
    axes = figure.subplots()
    shares = np.linspace(0.05, 1.0, 96)
    for goal, style in zip(GOALS, ("-", "--"), strict=True):
        axes.plot(shares, [needed(share, goal) for share in shares], color=INK, linestyle=style, label=f"{goal:g}x")
    for is_bridged, colour in ((False, BLUE), (True, ORANGE)):
        own = [point for point in report["points"] if point["bridged"] == is_bridged]
        label = "bridged" if is_bridged else "skipped as published"
        if own:
            axes.scatter([p["share"] for p in own], [p["acceptance"] for p in own], color=colour, label=label)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    axes.set_xlabel("share s of a full pass that a draft costs (FLOPs)")
    axes.set_ylabel("acceptance a of a drafted token")
    axes.set_title(f"Drafts of {report['settings']['model']} by skipped layers: a line is what they must reach")
    axes.legend(frameon=False, fontsize="small", loc="upper left")
    axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)


main = main_of("draft_frontier", __doc__, Settings, measure, show, width=120, plot=plot)


if __name__ == "__main__":
    sys.exit(main())
