"""The windows that `d3engine bridge fit` is asked for: by D3's start, one by one, by a policy, or as a grid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from d3engine.cli.bridge_texts import policy_of
from d3engine.cli.depth_options import number
from d3engine.depth.window import exact_fraction
from d3engine.errors import require, require_integer

if TYPE_CHECKING:
    from d3engine.model.bridges import Window

GRID_WIDTHS = 3
"""As `d3engine.bridges.fitting.GRID_WIDTHS`, which is not loaded for help."""

Starts: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--start", help="d3's start: all windows from there on; may be repeated (0.8)."),
]
Windows: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--window", metavar="A:B", help="Also the layers A to B - 1 alone; may be repeated."),
]
Policies: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--depth", help='Also the windows that a policy leaves out, "skipdecode mean-layers=24"; may be repeated.'
    ),
]
Grid: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--grid",
        metavar="WIDTH",
        help="Also what d3engine bridge nest needs, not measured here: windows between multiples of WIDTH, "
        f"up to {GRID_WIDTHS} WIDTHs wide.",
    ),
]


@dataclass(frozen=True)
class WindowOptions:
    """What a command was given. Without any of it, the windows of D3's start 0.8."""

    starts: Sequence[str]
    windows: Sequence[str]
    policies: Sequence[str]
    grid: int | None

    def find(self, directory: Path) -> tuple[list[Window], list[Window]]:
        """The windows to measure, and all to fit, in order."""
        from d3engine.bridges.fitting import grid_windows, windows_from
        from d3engine.model.config import ModelConfig

        layers = ModelConfig.from_directory(directory).num_layers
        reported = {
            *windows_from([_first_of(start, layers) for start in self._starts], layers),
            *(_window(window, layers) for window in self.windows),
            *(window for policy in self.policies for window in _left_out(policy, layers)),
        }
        by_grid = [] if self.grid is None else grid_windows(require_integer("--grid", self.grid, 1, layers), layers)
        return sorted(reported), sorted({*reported, *by_grid})

    @property
    def _starts(self) -> Sequence[str]:
        others = self.windows or self.policies or self.grid is not None
        return self.starts or ([] if others else ["0.8"])


def _first_of(start: str, num_layers: int) -> int:
    exact = exact_fraction("--start", number(start))
    require(0 < exact < 1, "--start", start, "a number in (0, 1), as d3's")
    return int(exact * num_layers)


def _window(words: str, num_layers: int) -> Window:
    first, _, stop = words.partition(":")
    allowed = f"A:B with 0 <= A < B <= {num_layers}, the layers A to B - 1"
    fits = first.isdecimal() and stop.isdecimal() and int(first) < int(stop) <= num_layers
    require(fits, "--window", words, allowed)
    return int(first), int(stop)


def _left_out(words: str, num_layers: int) -> list[Window]:
    found = policy_of(words).schedule(num_layers).windows()
    require(bool(found), "--depth", words, "one that is known beforehand to leave layers out")
    return found
