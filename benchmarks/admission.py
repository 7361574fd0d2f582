"""What admission in waves saves: the real scheduler under D3 and steady load, with fake tokens and no model.

Answers arrive at random (Poisson) and are all equally long. *Load* is the mean share of busy slots: an answer of N
tokens is busy for N steps, so `load * batch / N` arrive in a step. Time passes whether or not anything runs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from tqdm import tqdm

from benchmarks.fake_sequences import BLOCK_SIZE, FAKE_TOKEN, fake_scheduler, fake_sequence, fake_tokens, layers_run
from benchmarks.report import Parser, option, print_table, settings_of
from d3engine.depth import D3, Schedule
from d3engine.depth.labels import policy_in_words
from d3engine.depth.statistics import layer_bound
from d3engine.request.admission import Admission, Immediate, IntervalAdmission
from d3engine.research.plots import BLUE, GREEN, INK, ORANGE, PURPLE, VERMILION, new_figure, save_figure

PROMPT_TOKENS = BLOCK_SIZE


@dataclass(frozen=True)
class Settings:
    """What is simulated. The first `warm_up` steps fill the batch and are not counted."""

    num_layers: int = 32
    alpha: float = option(0.9, "D3's decay")
    start: float = option(0.6, "where D3's window begins")
    tokens: int = 256
    load: float = 0.98
    waves: tuple[int, ...] = option((16, 32), "steps between admissions")
    batches: tuple[int, ...] = option((8, 32, 128), "slots")
    steps: int = option(20_000, "engine steps per cell, warm-up included", type=int)
    warm_up: int = option(2_000, "steps not counted", type=int)
    seed: int = option(0, "of the arrivals", type=int)

    @property
    def schedule(self) -> Schedule:
        return D3(self.alpha, self.start).schedule(self.num_layers)

    @property
    def admissions(self) -> tuple[Admission, ...]:
        return (Immediate(), *(IntervalAdmission(steps) for steps in self.waves))


class Simulation:
    """One scheduler and a clock; a step of the clock is a step of the engine, or nothing when nobody is there."""

    def __init__(self, settings: Settings, batch: int, admission: Admission) -> None:
        length, batched = PROMPT_TOKENS + settings.tokens, batch * PROMPT_TOKENS
        options: dict[str, Any] = {"admission": admission, "enable_prefix_caching": False}
        self._scheduler = fake_scheduler(settings.num_layers, batch, length, batched_tokens=batched, **options)
        self._settings, self._schedule = settings, settings.schedule
        self._arrived: list[int] = []
        self._clock = 0

    def arrive(self, count: int) -> None:
        """Queue `count` sequences now."""
        prompt = [FAKE_TOKEN] * PROMPT_TOKENS
        for _ in range(count):
            number = len(self._arrived)
            self._arrived.append(self._clock)
            tokens = self._settings.tokens
            self._scheduler.add(fake_sequence(number, prompt, tokens, self._schedule, shares_prompt=False))

    def step(self) -> tuple[int, int, list[int]]:
        """Let one step pass: rows that ran, layers that any of them ran, and the waits of those that started."""
        plan = self._scheduler.schedule()
        found: tuple[int, int, list[int]] = (0, 0, [])
        if plan is not None:
            started = [plan.sequences[chunk].arrival for chunk in np.flatnonzero(plan.starts == 0).tolist()]
            found = (len(plan.sequences), layers_run(plan), [self._clock - self._arrived[a] for a in started])
            list(self._scheduler.update(plan, fake_tokens(plan)))
        self._clock += 1
        return found


def simulate(settings: Settings, batch: int, admission: Admission, bar: tqdm[Any]) -> dict[str, float]:
    """A strategy at a batch size: L times the steps that ran anything over the layers that any row ran in them, and the
    means of rows that ran, idle steps included, and of steps from arrival to the first step.

    `bar` moves at each step.
    """
    simulation = Simulation(settings, batch, admission)
    arrivals = np.random.default_rng(settings.seed).poisson(settings.load * batch / settings.tokens, settings.steps)
    busy_steps = rows = layers = 0
    waits: list[int] = []
    for tick in range(settings.steps):
        bar.update()
        simulation.arrive(int(arrivals[tick]))
        step_rows, step_layers, step_waits = simulation.step()
        if tick < settings.warm_up:
            continue
        busy_steps += step_rows > 0
        rows += step_rows
        layers += step_layers
        waits += step_waits
    return {
        "admit_every": admission.steps if isinstance(admission, IntervalAdmission) else 1,
        "batch": batch,
        "layer_steps_saved": settings.num_layers * busy_steps / layers,
        "mean_rows": rows / (settings.steps - settings.warm_up),
        "mean_wait": float(np.mean(waits)),
    }


def measure(settings: Settings) -> dict[str, Any]:
    """Simulate every cell and return the report, without its environment."""
    cells: list[dict[str, float]] = []
    pairs = [(batch, admission) for batch in settings.batches for admission in settings.admissions]
    with tqdm(total=len(pairs) * settings.steps, unit="step", unit_scale=True, disable=None) as bar:
        for batch, admission in pairs:
            bar.set_description(f"batch {batch}, {admission}")
            cell = simulate(settings, batch, admission, bar)
            immediate = next((c for c in cells if c["batch"] == batch and c["admit_every"] == 1), cell)
            cells.append(cell | {"extra_wait": cell["mean_wait"] - immediate["mean_wait"]})
    depths = [int(depth) for depth in settings.schedule.depths(settings.tokens)]
    bound = layer_bound(depths, num_layers=settings.num_layers, layer_size=1, head_size=0)
    rates = [settings.load * batch / settings.tokens for batch in settings.batches]
    return {
        "benchmark": "admission",
        "settings": asdict(settings) | {"arrivals_per_step": rates},
        "bound": bound,
        "cells": cells,
    }


# -- the page --------------------------------------------------------------------------------------------------


def show(report: dict[str, Any], console: Console) -> None:
    """Print layer-steps saved and waits, one row a strategy."""
    settings = report["settings"]
    console.print(
        f"L={settings['num_layers']}, D3({settings['alpha']}, {settings['start']}), {settings['tokens']} tokens an"
        f" answer, Poisson arrivals at {settings['load']:.0%} load,"
        f" {settings['steps'] - settings['warm_up']} steps counted"
    )
    columns = ("admit every", *(f"batch {batch}" for batch in settings["batches"]))
    strategies = {_name(every): cells for every, cells in _by_strategy(report).items()}
    saved = [(name, *(f"{cell['layer_steps_saved']:.2f}" for cell in cells)) for name, cells in strategies.items()]
    title = f"layer-steps saved (bound {report['bound']:.2f}x)"
    print_table(console, columns, saved, title, left=columns[:1])
    waits = [
        (name, *(f"{cell['mean_wait']:.1f} ({cell['extra_wait']:+.1f})" for cell in cells))
        for name, cells in strategies.items()
    ]
    print_table(console, columns, waits, "mean steps from arrival to the first step", left=columns[:1])


def plot(report: dict[str, Any], path: str | Path) -> None:
    """Draw layer-steps saved and extra wait, bars by strategy in groups by batch, to a PNG file."""
    colours = (BLUE, ORANGE, GREEN, PURPLE, VERMILION)
    hatches = ("", "//", "..", "xx", "\\\\")  # and in grey
    settings = report["settings"]
    figure = new_figure(width=9, height=4.2)
    saved_axes, wait_axes = figure.subplots(1, 2, width_ratios=[3, 2])
    strategies = _by_strategy(report)
    places = np.arange(len(settings["batches"]))
    width = 0.8 / len(strategies)
    for number, (every, cells) in enumerate(strategies.items()):
        offset = (number - (len(strategies) - 1) / 2) * width
        look: dict[str, Any] = {
            "color": colours[number % len(colours)],
            "hatch": hatches[number % len(hatches)],
            "edgecolor": "white",
            "label": f"admit every {_name(every)}",
        }
        saved = [cell["layer_steps_saved"] for cell in cells]
        bars = saved_axes.bar(places + offset, saved, width, **look)
        saved_axes.bar_label(bars, fmt="%.2f", fontsize="small", padding=1)
        if every > 1:
            waits = [cell["extra_wait"] for cell in cells]
            bars = wait_axes.bar(places + offset, waits, width, **look)
            wait_axes.bar_label(bars, fmt="%.1f", fontsize="small", padding=1)
    bound = report["bound"]
    saved_axes.axhline(bound, color=INK, linestyle="--", linewidth=1, label=f"bound {bound:.2f}x")
    saved_axes.set_ylim(1, 1 + (bound - 1) * 1.15)
    saved_axes.set_ylabel("layer-steps saved (times; 1 is full depth)")
    wait_axes.axhline(0, color=INK, linewidth=1)
    wait_axes.margins(y=0.15)
    wait_axes.set_ylabel("extra wait (engine steps, mean)")
    for axes in (saved_axes, wait_axes):
        axes.set_xticks(places, [str(batch) for batch in settings["batches"]])
        axes.set_xlabel("batch (slots)")
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = saved_axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize="small")
    policy = policy_in_words(D3(settings["alpha"], settings["start"]))
    save_figure(
        figure,
        path,
        f"Admission in waves: {settings['num_layers']} layers, {policy}, {settings['tokens']} tokens per answer,"
        f" {settings['load']:.0%} load",
    )


def _by_strategy(report: dict[str, Any]) -> dict[int, list[dict[str, Any]]]:
    strategies: dict[int, list[dict[str, Any]]] = {}
    for cell in report["cells"]:
        strategies.setdefault(cell["admit_every"], []).append(cell)
    return strategies


def _name(every: int) -> str:
    return "step" if every == 1 else f"{every} steps"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the simulation."""
    parser = Parser("admission", __doc__, arguments, Settings)
    parser.add_argument("--plot", metavar="FILE", help="also draw the table to this PNG file (needs matplotlib)")
    settings = settings_of(Settings, parser.given())
    if not 0 <= settings.warm_up < settings.steps:
        parser.error(f"--warm-up {settings.warm_up} leaves none of --steps {settings.steps}")
    parser.publish(measure(settings), show, plot=plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
