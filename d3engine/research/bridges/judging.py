"""Texts judged under a schedule with bridges, from the first layer that it leaves out,
against full depth's states, which are computed once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from d3engine.depth import NEVER, Schedule
from d3engine.depth.schedule import cutoffs_without
from d3engine.model.bridges import Bridge, Window
from d3engine.research.analysis.layers import FloatArray, compared
from d3engine.research.bridges.passage import Passage


@dataclass(frozen=True)
class Reading:
    """A text to be read: its token ids, of which the first `prompt_length` run every layer, as a prompt does."""

    token_ids: Sequence[int]
    prompt_length: int


class FullText:
    """A text at full depth. What is judged are the positions behind its prompt: generation steps from 1 on."""

    def __init__(self, passage: Passage, reading: Reading, layers: set[int]) -> None:
        """The states before each of `layers` are kept, and those behind the last layer."""
        self.passage = passage
        self.text, self.prompt_length = reading.token_ids, reading.prompt_length
        self._states = passage.at_full_depth(self.text, self.prompt_length, {*layers, passage.config.num_layers})

    @property
    def rows(self) -> slice:
        """Of the states: what is judged, the text's last token left out, which nothing follows."""
        return slice(self.prompt_length, len(self.text) - 1)

    @property
    def targets(self) -> Tensor:
        """Int64: the token that follows each judged row."""
        return torch.tensor(self.text[self.prompt_length + 1 :], device=self.last.device)

    @property
    def last(self) -> Tensor:
        """The states [T, H] behind the last layer."""
        return self._states[self.passage.config.num_layers]

    @cached_property
    def logprobs(self) -> Tensor:
        """Float32 of the judged rows, [R, V]."""
        with torch.no_grad():
            return self.passage.logits(self.last[self.rows]).log_softmax(-1)

    def under(self, schedule: Schedule, bridges: Mapping[Window, Bridge] | None) -> Tensor:
        """The states [T, H] behind the last layer as a schedule has them."""
        skipped = np.flatnonzero(schedule.cutoffs != NEVER).tolist()
        lowest = skipped[0] if skipped else schedule.num_layers
        known = [layer for layer in self._states if layer <= lowest]
        first, hidden = (max(known), self._states[max(known)]) if known else (0, self.passage.embedded(self.text))
        return self.passage.run(hidden, first, self.prompt_length, schedule, bridges)

    def judge(self, schedule: Schedule, bridges: Mapping[Window, Bridge] | None) -> FloatArray:
        """Float64 [3, R]: KL divergence from full depth in nats, extra -log p, and whether the likeliest token is the
        same, of each judged row."""
        with torch.no_grad():
            logits = self.passage.logits(self.under(schedule, bridges)[self.rows])
            return compared(self.logprobs, logits.log_softmax(-1), self.targets)


def long_enough(readings: Sequence[Reading]) -> list[Reading]:
    """Those with two tokens at least behind their prompt."""
    return [one for one in readings if len(one.token_ids) >= one.prompt_length + 2]


def skipping(layers: Sequence[int], num_layers: int) -> Schedule:
    """Leaves out these layers from the first step on."""
    return Schedule.nested(cutoffs_without("layers", sorted(layers), num_layers))


def window_schedule(windows: Sequence[Window], num_layers: int) -> Schedule:
    """Leaves out these windows from the first step on."""
    return skipping([layer for first, stop in windows for layer in range(first, stop)], num_layers)


def first_layers(schedules: Sequence[Schedule]) -> set[int]:
    """The lowest layer that each of them ever leaves out."""
    return {int((schedule.cutoffs != NEVER).argmax()) for schedule in schedules if (schedule.cutoffs != NEVER).any()}
