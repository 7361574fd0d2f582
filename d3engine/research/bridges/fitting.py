"""The normal equations of all windows from one start. Ridge regression needs sums alone:
one pass over any text, whose parts and held-out errors are arithmetic with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from d3engine.errors import require
from d3engine.model.bridges import Bridge, Window
from d3engine.research.analysis.layers import FloatArray
from d3engine.research.analysis.report import Table, counted
from d3engine.research.bridges.judging import FullText, Reading, long_enough, window_schedule
from d3engine.research.bridges.passage import Passage
from d3engine.utils.files import open_regular, path_of, write_whole

FIELDS = ("count", "inputs", "products", "changes", "mixed", "squares")


@dataclass(frozen=True, eq=False)
class Sums:
    """Over positions, with x the state before the first layer and y_k the change of it by window k; float64.

    Attributes:
        count: [] positions.
        inputs: [H] sum of x.
        products: [H, H] sum of x x^T.
        changes: [K, H] sum of y_k.
        mixed: [K, H, H] sum of x y_k^T.
        squares: [K] sum of |y_k|^2.
    """

    count: Tensor
    inputs: Tensor
    products: Tensor
    changes: Tensor
    mixed: Tensor
    squares: Tensor

    @classmethod
    def zero(cls, hidden_size: int, num_windows: int) -> Sums:
        """Of no position."""
        size, windows = hidden_size, num_windows
        shapes = ((), (size,), (size, size), (windows, size), (windows, size, size), (windows,))
        return cls(*(torch.zeros(shape, dtype=torch.float64) for shape in shapes))

    def add(self, before: Tensor, behind: Sequence[Tensor]) -> None:
        """Count the states [T, H] before the first layer, and those behind each window."""
        x = before.double().cpu()
        self.count.add_(x.shape[0])
        self.inputs.add_(x.sum(0))
        self.products.addmm_(x.T, x)
        for window, states in enumerate(behind):
            y = states.double().cpu() - x
            self.changes[window].add_(y.sum(0))
            self.mixed[window].addmm_(x.T, y)
            self.squares[window].add_(y.square().sum())

    def __add__(self, other: Sums) -> Sums:
        return Sums(*(getattr(self, name) + getattr(other, name) for name in FIELDS))


@dataclass(frozen=True, eq=False)
class Maps:
    """One map for each window: y_k ~ weight_k x + offset_k, float64 [K, H, H] and [K, H]."""

    weight: Tensor
    offset: Tensor


def solve(sums: Sums, ridge: float) -> Maps:
    """The ridge solution of every window; `ridge` is in units of the mean variance of the inputs."""
    size, windows = sums.inputs.shape[0], sums.squares.shape[0]
    mean, change = sums.inputs / sums.count, sums.changes / sums.count
    spread = sums.products - sums.count * torch.outer(mean, mean)
    mixed = sums.mixed - sums.count * mean[None, :, None] * change[:, None, :]
    regular = spread + ridge * spread.diagonal().mean() * torch.eye(size, dtype=torch.float64)
    found = torch.linalg.solve(regular, mixed.permute(1, 0, 2).reshape(size, windows * size))
    weight = found.reshape(size, windows, size).permute(1, 2, 0)
    return Maps(weight, change - weight @ mean)


def unexplained(sums: Sums, maps: Maps) -> Tensor:
    """Float64 [K]: of the changes' sum of squares around their mean, the part that each map leaves; 1 is no better
    than the mean, and a map that fits another text can be worse."""
    fitted = (maps.weight * (maps.weight @ sums.products)).sum((1, 2))
    crossing = (maps.weight * sums.mixed.transpose(1, 2)).sum((1, 2))
    shifted = (maps.offset * (maps.weight @ sums.inputs)).sum(1)
    error = (
        sums.squares
        - 2 * crossing
        - 2 * (maps.offset * sums.changes).sum(1)
        + fitted
        + 2 * shifted
        + sums.count * maps.offset.square().sum(1)
    )
    return error / (sums.squares - sums.changes.square().sum(1) / sums.count)


def of_rank(sums: Sums, maps: Maps, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """The best maps of a rank near these: down [K, r, H], up [K, H, r] and offset [K, H].

    Reduced-rank regression (Izenman 1975): the changes that the full maps predict are kept in the r directions in
    which they vary most.
    """
    mean, change = sums.inputs / sums.count, sums.changes / sums.count
    spread = sums.products - sums.count * torch.outer(mean, mean)
    predicted = maps.weight @ spread @ maps.weight.transpose(1, 2)
    up = torch.linalg.eigh(predicted).eigenvectors[:, :, -rank:]
    down = up.transpose(1, 2) @ maps.weight
    return down, up, change - (up @ (down @ mean)[..., None])[..., 0]


State = TypeVar("State")


def write_state(path: Path, key: str, tensors: dict[str, Tensor], words: Mapping[str, str]) -> None:
    write_whole(path, save(tensors, {"key": key, **words}))


def read_state(
    path: Path, key: str, read: Callable[[Callable[[str], Tensor], Mapping[str, str]], State]
) -> State | None:
    """What `read` makes of the state's tensors, by their names, and its words.

    A file of another run, or one that cannot be read or lacks something, counts as none.
    """
    try:
        with open_regular(path) as opened, safe_open(path_of(opened), framework="pt") as file:
            words = file.metadata() or {}
            return read(file.get_tensor, words) if words.get("key") == key else None
    except (SafetensorError, OSError, ValueError, KeyError, TypeError):
        return None


def write_training(
    path: Path, key: str, adam: torch.optim.Adam | None, named: Sequence[tuple[str, Tensor]], words: Mapping[str, str]
) -> None:
    """Write the state of a run that trains these tensors, with Adam's moments of them."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in named:
        tensors[f"{name}.now"] = tensor.detach()
        if adam is not None and (kept := adam.state.get(tensor)):
            tensors |= {f"{name}.mean": kept["exp_avg"], f"{name}.square": kept["exp_avg_sq"]}
    write_state(path, key, tensors, words)


def read_training(
    path: Path,
    key: str,
    adam: torch.optim.Adam | None,
    named: Sequence[tuple[str, Tensor]],
    read: Callable[[Mapping[str, str]], tuple[State, int]],
) -> State | None:
    """Put the tensors and moments of a saved state of this very run in place; None where there is none.

    `read` makes of its words what is returned, and the number of steps that Adam has taken.
    """

    def read_all(tensor: Callable[[str], Tensor], words: Mapping[str, str]) -> tuple[State, int, list[list[Tensor]]]:
        state, steps = read(words)
        kinds = ("now", "mean", "square") if steps else ("now",)
        return state, steps, [[tensor(f"{name}.{kind}") for kind in kinds] for name, _ in named]

    found = read_state(path, key, read_all)
    if found is None:
        return None
    state, steps, saved = found
    for (_, tensor), (now, *moments) in zip(named, saved, strict=True):
        with torch.no_grad():
            tensor.copy_(now)
        if moments and adam is not None:
            step = torch.tensor(float(steps))
            adam.state[tensor] = {"step": step, "exp_avg": moments[0], "exp_avg_sq": moments[1]}
    return state


@dataclass
class Judged:
    """Sums over positions: the KL divergence from full depth's next-token distribution, in nats, how often both have
    the same likeliest token, and -log p of the token that follows."""

    count: int = 0
    divergence: float = 0.0
    agreed: int = 0
    surprise: float = 0.0

    def add(self, judged: FloatArray, surprise: float) -> None:
        """Count what `FullText.judge` found, where full depth's own -log p is `surprise` in all."""
        self.count += judged.shape[1]
        self.divergence += float(judged[0].sum())
        self.agreed += int(judged[2].sum())
        self.surprise += surprise + float(judged[1].sum())

    @property
    def kl(self) -> float:
        return self.divergence / self.count

    @property
    def agreement(self) -> float:
        return self.agreed / self.count

    @property
    def perplexity(self) -> float:
        mean = self.surprise / self.count
        return math.exp(mean) if mean < 700 else math.inf

    def as_dict(self) -> dict[str, float]:
        return {"kl": self.kl, "agreement": self.agreement, "perplexity": self.perplexity}


@dataclass
class HeldOut:
    """By window what was judged, skipped and bridged; and full depth, of which the perplexity alone says something."""

    num_texts: int = 0
    full: Judged = field(default_factory=Judged)
    skipped: dict[Window, Judged] = field(default_factory=dict)
    bridged: dict[Window, Judged] = field(default_factory=dict)

    def table(self) -> Table:
        header = ("window", "skipped: KL", "agreement", "perplexity", "bridged: KL", "agreement", "perplexity")
        rows = [
            (f"[{first}, {stop})", *_cells(self.skipped[first, stop]), *_cells(self.bridged[first, stop]))
            for first, stop in sorted(self.bridged)
        ]
        about = f"{counted(self.num_texts, 'text')}, {self.full.count:,} positions"
        return Table(f"Held out: {about}, full depth's perplexity {self.full.perplexity:.2f}", header, rows)

    def worse_than_none(self) -> list[Window]:
        """The windows whose map costs no less than leaving them out does."""
        return sorted(window for window, one in self.bridged.items() if one.kl >= self.skipped[window].kl)

    def as_dict(self) -> dict[str, Any]:
        windows = [
            {
                "window": [first, stop],
                "skipped": self.skipped[first, stop].as_dict(),
                "bridged": self.bridged[first, stop].as_dict(),
            }
            for first, stop in sorted(self.bridged)
        ]
        full = {"texts": self.num_texts, "positions": self.full.count, "perplexity": self.full.perplexity}
        return {**full, "windows": windows}


def _cells(judged: Judged) -> tuple[str, str, str]:
    return f"{judged.kl:.3f}", f"{judged.agreement:.1%}", f"{judged.perplexity:,.2f}"


def measure_held_out(
    passage: Passage,
    bridges: Sequence[Bridge],
    readings: Sequence[Reading],
    progress: Callable[[], None] = lambda: None,
) -> HeldOut:
    """Judge each bridge's window on texts whose prompts run every layer.

    Those without two tokens more are passed over. `progress` hears of every other.
    """
    found = HeldOut()
    firsts = {bridge.first for bridge in bridges}
    for reading in long_enough(readings):
        full = FullText(passage, reading, firsts)
        surprise = -float(full.logprobs.gather(1, full.targets[:, None]).sum())
        found.full.add(full.judge(window_schedule([], passage.config.num_layers), None), surprise)
        for bridge in bridges:
            schedule = window_schedule([bridge.window], passage.config.num_layers)
            for kind, has in ((found.skipped, None), (found.bridged, {bridge.window: bridge})):
                kind.setdefault(bridge.window, Judged()).add(full.judge(schedule, has), surprise)
        found.num_texts += 1
        progress()
    return found


SHRINKAGES = (1.0, 0.75, 0.5, 0.25)
"""Shares of a map's change that are tried, towards a state that passes as it is."""


def shrink(
    passage: Passage, bridges: Sequence[Bridge], readings: Sequence[Reading], progress: Callable[[], None]
) -> dict[Window, float]:
    """By its window the share of each map's change that costs the least KL divergence on these texts.

    What a map changes in vain costs more behind it than ridge regression knows.
    """
    costs = {bridge.window: dict.fromkeys(SHRINKAGES, 0.0) for bridge in bridges}
    firsts = {bridge.first for bridge in bridges}
    for reading in long_enough(readings):
        full = FullText(passage, reading, firsts)
        for bridge in bridges:
            schedule = window_schedule([bridge.window], passage.config.num_layers)
            for share in SHRINKAGES:
                judged = full.judge(schedule, {bridge.window: bridge.shrunk(share)})
                costs[bridge.window][share] += float(judged[0].sum())
        progress()
    return {window: min(of_share, key=lambda share: of_share[share]) for window, of_share in costs.items()}


RIDGES = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""Strengths that are tried, in units of the mean variance of the inputs."""

CHOOSING_EVERY = 5
"""One text in this number chooses the ridge strength; with the others it then makes the last fit."""

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
    """All windows that begin at one of `starts`: those that a D3 with that first layer has, at any alpha."""
    return [(first, stop) for first in sorted(set(starts)) for stop in range(first + 1, num_layers + 1)]


def grid_windows(width: int, num_layers: int) -> list[Window]:
    """The windows from one multiple of `width` to another, up to `GRID_WIDTHS` widths: those of a `Nested` whose
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
        first = min(self._stops)
        return sum(int(self._sums[part, first].count) for part in _PARTS)

    @torch.inference_mode()
    def gather(self, text: Sequence[int], first_position: int = 1) -> None:
        """Let one text pass at full depth, and count its positions from the given one on."""
        wanted = {layer for first, stops in self._stops.items() for layer in (first, *stops)}
        states = self._passage.at_full_depth(text, len(text), wanted)
        part = _PARTS[self.num_texts % CHOOSING_EVERY == CHOOSING_EVERY - 1]
        for first, stops in self._stops.items():
            among = slice(first_position, None)
            self._sums[part, first].add(states[first][among], [states[stop][among] for stop in stops])
        self.num_texts += 1

    def gather_all(
        self,
        texts: Sequence[Sequence[int]],
        state: Path | None,
        key: str,
        progress: Callable[[], None],
        first_positions: Sequence[int] | None = None,
    ) -> None:
        """Gather all texts, of which those that a `state` of the same `key` holds are not read again.

        Of each text the positions from that of `first_positions` on count: of an answer those that were generated. The
        state is written now and then, and is the caller's to delete.
        """
        if state is not None:
            self._load(state, key)
        for number, text in enumerate(texts):
            if number >= self.num_texts:
                self.gather(text, 1 if first_positions is None else first_positions[number])
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
            for name, tensor in vars(sums).items()
        }
        write_state(path, key, named, {"texts": str(self.num_texts)})

    def _load(self, path: Path, key: str) -> None:

        def read(tensor: Callable[[str], Tensor], words: Mapping[str, str]) -> tuple[dict[tuple[str, int], Sums], int]:
            sums = {place: Sums(*(tensor(f"{place[0]}.{place[1]}.{name}") for name in FIELDS)) for place in self._sums}
            return sums, int(words["texts"])

        found = read_state(path, key, read)
        if found is not None:
            self._sums, self.num_texts = found


def _bridge(window: Window, place: int, sums: Sums, maps: Maps, rank: int | None) -> Bridge:
    if rank is None:
        return Bridge(*window, maps.weight[place].float(), maps.offset[place].float())
    one = slice(place, place + 1)
    own = replace(sums, changes=sums.changes[one], mixed=sums.mixed[one], squares=sums.squares[one])
    down, up, offset = of_rank(own, Maps(maps.weight[one], maps.offset[one]), rank)
    return Bridge(*window, up[0].float(), offset[0].float(), down[0].float())
