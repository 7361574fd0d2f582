"""Which windows to leave out, in which order: each next one costs least next to those
before it, with all bridges that decoding would cross."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from d3engine.errors import require
from d3engine.model.bridges import Bridge, Window
from d3engine.research.analysis.report import Table, counted
from d3engine.research.bridges.fitting import HeldOut, Judged
from d3engine.research.bridges.judging import FullText, window_schedule
from d3engine.research.plots import MARKERS, line_ramp, new_figure, save_figure


@dataclass(frozen=True)
class Chosen:
    """The next window of the order, and what is lost with it and all before it left out: KL divergence from full depth
    in nats, and how often the likeliest token is the same."""

    window: Window
    kl: float
    agreement: float


@dataclass(frozen=True)
class Order:
    """Windows in the order in which they go."""

    chosen: Sequence[Chosen]
    num_texts: int
    positions: int

    def table(self) -> Table:
        left_out, rows = 0, []
        for one in self.chosen:
            left_out += one.window[1] - one.window[0]
            first, stop = one.window
            rows.append((f"[{first}, {stop})", f"{left_out}", f"{one.kl:.3f}", f"{one.agreement:.1%}"))
        about = f"{counted(self.num_texts, 'text')}, {self.positions:,} positions, of which the order was chosen"
        return Table(f"Windows in order: {about}", ("window", "layers left out", "KL", "agreement"), rows)

    def as_dict(self) -> dict[str, Any]:
        """The same for machines; `windows` is what the policy takes."""
        return {
            "windows": [list(one.window) for one in self.chosen],
            "kl": [one.kl for one in self.chosen],
            "agreement": [one.agreement for one in self.chosen],
            "texts": self.num_texts,
            "positions": self.positions,
        }


def grid_of(bridges: Mapping[Window, Bridge], width: int) -> list[Window]:
    """The windows of `width` layers between multiples of it that have a bridge."""
    return [window for window in sorted(bridges) if window[1] - window[0] == width and window[0] % width == 0]


def choose_order(
    texts: Sequence[FullText],
    bridges: Mapping[Window, Bridge],
    candidates: Sequence[Window],
    count: int,
    progress: Callable[[], None] = lambda: None,
) -> Order:
    """`count` of the candidates, or fewer where what remains lacks a bridge; `progress` hears of each attempt."""
    require(len(texts) > 0, "texts", 0, "at least one that is longer than its prompt")
    chosen: list[Chosen] = []
    while len(chosen) < count:
        taken = [one.window for one in chosen]
        tried = []
        for window in candidates:
            schedule = window_schedule([*taken, window], texts[0].passage.config.num_layers)
            if window not in taken and all(needed in bridges for needed in schedule.windows()):
                found = np.concatenate([text.judge(schedule, bridges) for text in texts], axis=1)
                tried.append(Chosen(window, float(found[0].mean()), float(found[2].mean())))
                progress()
        if not tried:
            break
        chosen.append(min(tried, key=lambda one: one.kl))
    positions = sum(text.rows.stop - text.rows.start for text in texts)
    return Order(chosen, len(texts), positions)


def plot_held_out(result: HeldOut, path: str | Path, title: str = "") -> None:
    """Draw agreement with full depth, and the KL divergence from it, over the width of the window, to a file.

    Dashed lines are windows skipped as they are. Raises as `plot_schedule`.
    """
    figure = new_figure(width=9, height=4.5)
    agreement, divergence = figure.subplots(1, 2)
    _draw(agreement, result, lambda judged: 100 * judged.agreement)
    _draw(divergence, result, lambda judged: judged.kl)
    agreement.set_ylabel("same likeliest token as full depth, %")
    agreement.set_ylim(0, 102)
    divergence.set_ylabel("KL divergence from full depth, nats")
    divergence.set_yscale("log")
    agreement.legend(fontsize="small")
    save_figure(figure, path, title)


def _draw(axes: Any, result: HeldOut, value: Any) -> None:
    starts = sorted({first for first, _ in result.bridged})
    for place, start in enumerate(starts):
        colour, marker = line_ramp(place / max(len(starts) - 1, 1)), MARKERS[place % len(MARKERS)]
        for judged, line, name in ((result.bridged, "-", "bridged"), (result.skipped, "--", "skipped")):
            widths, values = _curve(judged, start, value)
            axes.plot(widths, values, marker + line, color=colour, label=f"from layer {start}, {name}")
    axes.set_xlabel("layers in the window")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)


def _curve(judged: dict[Window, Judged], start: int, value: Any) -> tuple[list[int], list[float]]:
    stops = sorted(stop for first, stop in judged if first == start)
    return [stop - start for stop in stops], [value(judged[start, stop]) for stop in stops]
