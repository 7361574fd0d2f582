"""Hidden states in the course of a step: kept for a later one, captured for a caller, changed by one.

What a draft has computed of the lower layers is kept until it is verified: the states below the first skipped layer are
the full model's. A step that drafts writes them into a buffer, one place for each row that a slot may draft, and the
step that verifies goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from d3engine.kernels.low_rank import LowRankMap
from d3engine.kernels.native.model import NativeMaps
from d3engine.kernels.native.runs import STEERINGS, Hooks
from d3engine.model.llama import Llama
from d3engine.request.hidden_states import FloatArray, Steer
from d3engine.scheduling.kv_cache import IntArray
from d3engine.scheduling.plan import CapturedRows, DraftWork, HiddenRows, Plan, Span, SteeredRows

Due: TypeAlias = tuple[int, Callable[[], object]]
"""A layer, and what is done to the residual stream in front of it."""


class HiddenStateCache:
    """A buffer of hidden states [places, H] that grows to the largest place in use."""

    def __init__(self, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._states = torch.empty((0, hidden_size), dtype=dtype, device=device)

    def due(self, work: DraftWork | None, hidden: Tensor) -> list[Due]:
        """Put what was kept back into `hidden` [R, H], a step's embedded rows; what is to be kept is due later."""
        if work is None:
            return []
        for given in work.resumed:
            hidden[self._tensor(given.rows)] = self._states[self._tensor(given.places)]
        return [(rows.layer, partial(self.keep, rows, hidden)) for rows in work.kept]

    def keep(self, rows: HiddenRows, hidden: Tensor) -> None:
        """Copy rows of `hidden` to their places."""
        self.with_room(int(rows.places.max()) + 1)[self._tensor(rows.places)] = hidden[self._tensor(rows.rows)]

    def with_room(self, num_places: int) -> Tensor:
        """The buffer itself, [places, H], with at least `num_places`; good until it is asked for again."""
        lacking = num_places - len(self._states)
        if lacking > 0:
            self._states = torch.cat((self._states, self._states.new_empty((lacking, self._states.shape[1]))))
        return self._states

    def _tensor(self, array: IntArray) -> Tensor:
        return torch.from_numpy(array).to(self._states.device)


class LayerHooks:
    """What is due to a step's residual stream in front of layers, each when the layers below have run.

    In front of one layer the order is that of the arguments.
    """

    def __init__(self, *due: Iterable[Due]) -> None:
        self._due = sorted(chain(*due), key=lambda one: one[0])

    def cut(self, spans: Iterable[Span]) -> Iterator[Span]:
        """The spans, cut where something is due."""
        layers = sorted({layer for layer, _ in self._due})
        for span in spans:
            low, high = span.layers.start, span.layers.stop
            inside = [layer for layer in layers if low < layer < high]
            if not inside:
                yield span
                continue
            for start, stop in pairwise([low, *inside, high]):
                yield replace(span, layers=range(start, stop))

    def up_to(self, layer: int) -> None:
        """All layers below `layer` have run."""
        while self._due and self._due[0][0] <= layer:
            self._due.pop(0)[1]()


class StateHooks:
    """Captures and steers the rows of steps."""

    def __init__(self, num_layers: int, dtype: torch.dtype, device: torch.device) -> None:
        self._num_layers = num_layers
        self._dtype, self._device = dtype, device
        self._changes: WeakKeyDictionary[Steer, dict[int, tuple[Tensor, ...]]] = WeakKeyDictionary()

    def captures(
        self, captured: Iterable[CapturedRows], hidden: Tensor, final: Callable[[Tensor], Tensor], found: list[Tensor]
    ) -> Iterator[Due]:
        """What `captured` wants of `hidden` [R, H] comes into `found`, [1, rows, H] each.

        `final` is the model's final norm, for states behind its last layer.
        """
        for group in captured:
            yield group.layer, partial(self._capture, group, hidden, final, found)

    def changes(self, steered: Iterable[SteeredRows], hidden: Tensor) -> Iterator[Due]:
        """What is added to rows of `hidden` [R, H]."""
        for group in steered:
            yield group.layer, partial(self._steer, group, hidden)

    def _capture(
        self, group: CapturedRows, hidden: Tensor, final: Callable[[Tensor], Tensor], found: list[Tensor]
    ) -> None:
        states = hidden[torch.from_numpy(group.rows).to(hidden.device)]
        found.append((final(states) if group.layer == self._num_layers else states)[None])

    def _steer(self, group: SteeredRows, hidden: Tensor) -> None:
        rows = torch.from_numpy(group.rows).to(hidden.device)
        change = self._tensors(group.steer)[group.layer]
        states = hidden[rows]
        hidden[rows] = states + (change[0] if len(change) == 1 else states @ change[0].t() @ change[1].t())

    def _tensors(self, steer: Steer) -> dict[int, tuple[Tensor, ...]]:
        if steer not in self._changes:
            self._changes[steer] = {
                layer: tuple(
                    torch.tensor(array, dtype=self._dtype, device=self._device)
                    for array in (change if isinstance(change, tuple) else (change,))
                )
                for layer, change in steer.changes.items()
            }
        return self._changes[steer]


class NativeStateHooks:
    """The same for the native library."""

    def __init__(self, model: Llama) -> None:
        self._model = model
        self._maps: WeakKeyDictionary[Steer, dict[int, NativeMaps]] = WeakKeyDictionary()

    def of(self, plan: Plan, num_steps: int) -> Hooks | None:
        """What a plan captures and steers in this number of steps; None where it does neither."""
        if not plan.captured and not plan.steered:
            return None
        pairs = np.concatenate([np.empty((0, 2), np.int32), *map(_pairs, plan.captured)])
        steerings = np.concatenate([np.empty(0, STEERINGS), *map(self._steerings, plan.steered)])
        states = np.empty((num_steps, len(pairs), self._model.config.hidden_size), np.float32)
        return Hooks(steerings, pairs, states, held=[group.steer for group in plan.steered])  # and so their maps

    def _steerings(self, group: SteeredRows) -> npt.NDArray[Any]:
        change, maps = group.steer.changes[group.layer], self._maps_of(group.steer).get(group.layer)
        found = np.zeros(group.rows.size, STEERINGS)
        found["layer"], found["row"] = group.layer, group.rows
        found["start"], found["stop"], found["step"] = group.positions
        found["vector"] = 0 if isinstance(change, tuple) else change.ctypes.data
        found["map"] = 0 if maps is None else maps.address
        return found

    def captured(self, plan: Plan, hooks: Hooks | None, steps: slice = slice(None)) -> tuple[Tensor, ...]:
        """The captured states of these steps, [S, rows, H] of each of the plan's captured rows."""
        if hooks is None:
            return ()
        sizes = [group.rows.size for group in plan.captured]
        each = torch.split(torch.from_numpy(hooks.captured[steps]), sizes, dim=1) if sizes else ()
        last = self._model.config.num_layers
        return tuple(
            self._model.final_states(states) if group.layer == last else states
            for group, states in zip(plan.captured, each, strict=True)
        )

    def _maps_of(self, steer: Steer) -> dict[int, NativeMaps]:
        if steer not in self._maps:
            self._maps[steer] = {
                layer: NativeMaps((_low_rank(*change),))
                for layer, change in steer.changes.items()
                if isinstance(change, tuple)
            }
        return self._maps[steer]


def _pairs(group: CapturedRows) -> npt.NDArray[np.int32]:
    """The layer and each row."""
    return np.stack((np.full(group.rows.size, group.layer), group.rows), axis=1).astype(np.int32)


def _low_rank(down: FloatArray, up: FloatArray) -> LowRankMap:
    matrices = LowRankMap(torch.tensor(down), torch.tensor(up.T.copy()))
    return matrices.to(torch.float32, torch.device("cpu"))
