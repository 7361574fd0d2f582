"""Fitting bridges: one pass over a text gathers the sums of all windows, and the ridge strength is chosen on a part of
it that the first solution has not seen.

The one idea: the text passes at full depth, since that is what the states before a window are in decoding too, where
the layers below the window always run. The first position of a text is left out: its state is an attention sink, of
another size than all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from d3engine.bridges.passage import Passage
from d3engine.bridges.saved_state import read_state, write_state
from d3engine.bridges.sums import FIELDS, Maps, Sums, of_rank, solve, unexplained
from d3engine.errors import require
from d3engine.model.bridges import Bridge, Window

RIDGES = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""Strengths that are tried, in units of the mean variance of the inputs."""

CHOOSING_EVERY = 5
"""One text in so many chooses the ridge strength; with the others it then makes the last fit."""

SAVE_EVERY = 16
"""Texts from one saved state of a fit to the next."""

GRID_WIDTHS = 3
"""Neighbouring windows of a grid that have a bridge over all of them."""

_PARTS = ("fit", "choose")


@dataclass(frozen=True, eq=False)
class Fitted:
    """A bridge, the ridge strength it was fitted with, and what part of the change that left unexplained where the
    strength was chosen."""

    bridge: Bridge
    ridge: float
    unexplained: float


def windows_from(starts: Iterable[int], num_layers: int) -> list[Window]:
    """All windows that begin at one of `starts`: those that a D3 with that first layer comes to, at any alpha."""
    return [(first, stop) for first in sorted(set(starts)) for stop in range(first + 1, num_layers + 1)]


def grid_windows(width: int, num_layers: int) -> list[Window]:
    """The windows from one multiple of `width` to another, up to `GRID_WIDTHS` widths: what `Nested` comes to whose
    windows are `width` layers each, as long as no more of them are neighbours."""
    ends = range(0, num_layers + 1, width)
    return [(first, stop) for first in ends for stop in ends if first < stop <= first + GRID_WIDTHS * width]


def text_hash(texts: Sequence[Sequence[int]]) -> str:
    """ "sha256:" and a digest of all token ids and where each text ends."""
    digest = sha256()
    for text in texts:
        digest.update(len(text).to_bytes(8, "little"))
        digest.update(np.asarray(text, dtype="<i8").tobytes())
    return f"sha256:{digest.hexdigest()}"


class Fit:
    """Gathers the sums of `windows` over texts, and solves them."""

    def __init__(self, passage: Passage, windows: Sequence[Window]) -> None:
        self._passage = passage
        size = passage.config.hidden_size
        self._stops = {
            first: [stop for _, stop in group]
            for first, group in groupby(sorted(set(windows)), lambda window: window[0])
        }
        for first, stops in self._stops.items():
            for stop in stops:
                allowed = f"layers [first, stop) of {passage.config.num_layers}"
                require(0 <= first < stop <= passage.config.num_layers, "window", f"{first}:{stop}", allowed)
        self._sums = {
            (part, first): Sums.zero(size, len(stops)) for part in _PARTS for first, stops in self._stops.items()
        }
        self.num_texts = 0

    @property
    def num_positions(self) -> int:
        """Positions gathered so far."""
        first = min(self._stops)
        return sum(int(self._sums[part, first].count) for part in _PARTS)

    @torch.inference_mode()
    def gather(self, text: Sequence[int]) -> None:
        """Let one text pass at full depth, and count its positions but the first."""
        wanted = {layer for first, stops in self._stops.items() for layer in (first, *stops)}
        states = self._passage.at_full_depth(text, len(text), wanted)
        part = _PARTS[self.num_texts % CHOOSING_EVERY == CHOOSING_EVERY - 1]
        for first, stops in self._stops.items():
            self._sums[part, first].add(states[first][1:], [states[stop][1:] for stop in stops])
        self.num_texts += 1

    def gather_all(
        self, texts: Sequence[Sequence[int]], state: Path | None, key: str, progress: Callable[[], None]
    ) -> None:
        """Gather all texts, of which those that a `state` of the same `key` holds are not read again.

        The state is written now and then, and is the caller's to delete.
        """
        if state is not None:
            self._load(state, key)
        for number, text in enumerate(texts):
            if number >= self.num_texts:
                self.gather(text)
                if state is not None and self.num_texts % SAVE_EVERY == 0:
                    self._save(state, key)
            progress()

    def solve(self, rank: int | None = None, ridges: Sequence[float] = RIDGES) -> list[Fitted]:
        """A bridge for each window, float32, full or of this rank."""
        return [fitted for first in self._stops for fitted in self._solve(first, rank, ridges)]

    def _solve(self, first: int, rank: int | None, ridges: Sequence[float]) -> list[Fitted]:
        stops, (fit, choose) = self._stops[first], (self._sums[part, first] for part in _PARTS)
        enough = int(fit.count) > 1 and int(choose.count) > 1
        require(enough, "texts", self.num_texts, f"at least {CHOOSING_EVERY}, since every fifth chooses the ridge")
        left = torch.stack([unexplained(choose, solve(fit, ridge)) for ridge in ridges])
        both = fit + choose
        found = []
        last = {ridge: solve(both, ridge) for ridge in {ridges[place] for place in left.argmin(0).tolist()}}
        for place, stop in enumerate(stops):
            best = int(left[:, place].argmin())
            bridge = _bridge((first, stop), place, both, last[ridges[best]], rank)
            found.append(Fitted(bridge, ridges[best], float(left[best, place])))
        return found

    def _save(self, path: Path, key: str) -> None:
        named = {
            f"{part}.{first}.{name}": tensor
            for (part, first), sums in self._sums.items()
            for name, tensor in sums.named().items()
        }
        write_state(path, key, named, {"texts": str(self.num_texts)})

    def _load(self, path: Path, key: str) -> None:
        """Go on from a saved state of this very fit, if there is one."""

        def read(tensor: Callable[[str], Tensor], words: Mapping[str, str]) -> tuple[dict[tuple[str, int], Sums], int]:
            sums = {place: Sums(*(tensor(f"{place[0]}.{place[1]}.{name}") for name in FIELDS)) for place in self._sums}
            return sums, int(words["texts"])

        found = read_state(path, key, read)
        if found is not None:
            self._sums, self.num_texts = found


def _bridge(window: Window, place: int, sums: Sums, maps: Maps, rank: int | None) -> Bridge:
    if rank is None:
        return Bridge(*window, maps.weight[place].float(), maps.offset[place].float())
    own = Maps(maps.weight[place : place + 1], maps.offset[place : place + 1])
    one = Sums(
        sums.count,
        sums.inputs,
        sums.products,
        sums.changes[place : place + 1],
        sums.mixed[place : place + 1],
        sums.squares[place : place + 1],
    )
    down, up, offset = of_rank(one, own, rank)
    return Bridge(*window, up[0].float(), offset[0].float(), down[0].float())
