"""Bridges inside a graph: which rows cross which window is known on the device alone, once the graph is replayed.

The one idea: a graph holds the crossing of every window that its rows may have to cross, each over as many rows as
reach to the last that does. Which rows do follows from their steps and cutoffs, for all windows at once; where nobody
does the products read nothing and leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from d3engine.executor.bridging import BridgeStore
from d3engine.executor.graph_shapes import Crossed
from d3engine.kernels.decode_rows import DecodeRows
from d3engine.model.bridge_weights import BridgeWeights


@dataclass(frozen=True, eq=False)
class _Windows:
    """Windows as a graph reads them, int64 [W] each; they must live as long as it does."""

    bridges: tuple[BridgeWeights, ...]
    names: Tensor
    firsts: Tensor
    stops: Tensor


class GraphBridges:
    """By whose maps each of up to `rows` rows crosses what it leaves out, at addresses that stay."""

    def __init__(self, store: BridgeStore | None, kernels: Any, rows: int, device: torch.device) -> None:
        self._store = store
        self._kernels = kernels
        self._names: dict[str, int] = {}
        self._of_rows = torch.full((rows,), -1, dtype=torch.int64, device=device)
        self._places = torch.arange(1, rows + 1, device=device)
        self._windows: dict[tuple[Crossed, ...], _Windows] = {}

    def write(self, names: Sequence[str | None]) -> None:
        """Put the bridges of the first rows where graphs read them."""
        if names:
            numbers = [-1 if name is None else self._number(name) for name in names]
            self._of_rows[: len(numbers)] = torch.tensor(numbers)

    def prepare(self, crossed: tuple[Crossed, ...]) -> None:
        """Put windows where a graph may read them; before it is captured, which must not wait for the host."""
        if not crossed or crossed in self._windows:
            return
        assert self._store is not None, "a plan names bridges that no schedule was checked for"
        bridges = tuple(self._store.bridges(one.bridges)[one.first, one.stop] for one in crossed)
        numbers = [(self._number(one.bridges), one.first, one.stop) for one in crossed]
        self._windows[crossed] = _Windows(bridges, *torch.tensor(numbers).T.contiguous().to(self._places.device))

    def begin(self, crossed: tuple[Crossed, ...], rows: DecodeRows) -> GraphCrossings | None:
        """The windows of a step of these rows, not yet crossed; None where nobody crosses any."""
        if not crossed:
            return None
        windows, count = self._windows[crossed], rows.steps.shape[0]
        runs = rows.steps[:, None] < rows.cutoffs
        skipped = F.pad((~runs).cumsum(dim=1), (1, 0))
        width = windows.stops - windows.firsts
        beside = F.pad(runs, (1, 1), value=True)  # layer l stands at l + 1
        all_of_it = skipped[:, windows.stops] - skipped[:, windows.firsts] == width
        own = self._of_rows[:count, None] == windows.names
        lives = self._places[:count, None] <= rows.num_rows
        who = all_of_it & own & lives & beside[:, windows.firsts] & beside[:, windows.stops + 1]
        until = (who * self._places[:count, None]).amax(dim=0).to(torch.int32)
        return GraphCrossings(windows.bridges, who, until, self._kernels)

    def _number(self, name: str) -> int:
        return self._names.setdefault(name, len(self._names))


class GraphCrossings:
    """The windows of one step; `who` bool [B, W] says which rows cross which, `until` [W] how far these reach."""

    def __init__(self, bridges: Sequence[BridgeWeights], who: Tensor, until: Tensor, kernels: Any) -> None:
        self._due = list(enumerate(bridges))
        self._who, self._until, self._kernels = who, until, kernels

    def up_to(self, layer: int, hidden: Tensor) -> None:
        """All layers below `layer` have run on `hidden` [B, H]."""
        while self._due and self._due[0][1].first <= layer:
            nth, bridge = self._due.pop(0)
            behind = hidden.clone()
            bridge.cross(self._kernels, behind, self._until[nth : nth + 1])
            hidden.copy_(torch.where(self._who[:, nth, None], behind, hidden))
