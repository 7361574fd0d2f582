"""Hidden states that outlive a step: what a draft has computed of the lower layers, kept until it is verified.

The states below the first skipped layer are the full model's. A step that drafts writes them into a buffer, one place
for each row that a slot may draft, and the step that verifies goes on from there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from d3engine.cache.kv_cache import IntArray
from d3engine.plan import DraftWork, HiddenRows


class HiddenStateCache:
    """A buffer of hidden states [places, H] that grows to the largest place in use."""

    def __init__(self, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._states = torch.empty((0, hidden_size), dtype=dtype, device=device)

    def follow(self, work: DraftWork | None, hidden: Tensor) -> KeptRows:
        """Put what was kept back into `hidden` [R, H], a step's embedded rows, and watch it for what is to be kept."""
        if work is None:
            return KeptRows(self, (), hidden)
        for given in work.resumed:
            hidden[self._tensor(given.rows)] = self._states[self._tensor(given.places)]
        return KeptRows(self, work.kept, hidden)

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


class KeptRows:
    """The rows of one step that are to be kept, each when the layers below its own have run."""

    def __init__(self, states: HiddenStateCache, rows: tuple[HiddenRows, ...], hidden: Tensor) -> None:
        self._states = states
        self._due = list(rows)
        self._hidden = hidden

    def up_to(self, layer: int) -> None:
        """All layers below `layer` have run."""
        while self._due and self._due[0].layer <= layer:
            self._states.keep(self._due.pop(0), self._hidden)
