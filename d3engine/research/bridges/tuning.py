"""Tunes bridges by the KL divergence from full depth of a text that passes as a policy
would decode it, all its bridges at work."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from d3engine.depth import Schedule
from d3engine.errors import require
from d3engine.model.bridges import Bridge, Window
from d3engine.research.bridges.fitting import read_training, write_training
from d3engine.research.bridges.judging import FullText
from d3engine.utils.files import as_json

SAVE_EVERY = 25
"""Steps from one saved state to the next."""

_PARTS = ("weight", "offset", "down")


@dataclass(frozen=True)
class TuningOptions:
    """`steps` of Adam, each on `rows` positions of one text, at a rate that falls from `rate` to 0 in a line; `seed`
    says which texts and positions."""

    steps: int = 300
    rows: int = 128
    rate: float = 3e-4
    seed: int = 0


class Tuning:
    """Tunes the bridges that a schedule crosses; what was tuned is float32 until the end."""

    def __init__(self, bridges: Mapping[Window, Bridge], schedule: Schedule, options: TuningOptions) -> None:
        windows = schedule.windows()
        require(len(windows) > 0, "policy", schedule, "one that leaves layers out")
        self._schedule, self._options = schedule, options
        self._bridges = {
            window: _with(bridges[window], lambda tensor: tensor.detach().float().clone().requires_grad_())
            for window in windows
        }
        self._adam = torch.optim.Adam([tensor for _, tensor in self._named()], lr=options.rate)
        self.losses: list[float] = []

    @property
    def num_steps(self) -> int:
        return len(self.losses)

    @property
    def bridges(self) -> dict[Window, Bridge]:
        return {
            window: _with(bridge, lambda tensor: tensor.detach().clone()) for window, bridge in self._bridges.items()
        }

    def run(
        self,
        texts: Sequence[FullText],
        state: Path | None,
        key: str,
        progress: Callable[[float], None] = lambda _: None,
    ) -> None:
        """All steps that are left; those that a `state` of the same `key` holds are not taken again.

        `progress` hears of each step's KL divergence, NaN for one that is not taken. The state is written now and
        then, and is the caller's to delete. Steps draw from the seed and their own number alone, so a run that was cut
        off ends as one that was not.
        """
        require(len(texts) > 0, "texts", 0, "at least one that is longer than its prompt")
        if state is not None:
            self._load(state, key)
        for _ in range(self.num_steps):
            progress(float("nan"))
        while self.num_steps < self._options.steps:
            progress(self._step(texts))
            if state is not None and self.num_steps % SAVE_EVERY == 0:
                words = {"losses": json.dumps(self.losses)}
                write_training(state, key, self._adam, self._named(), words)

    def _step(self, texts: Sequence[FullText]) -> float:
        numbers = random.Random(f"tune-{self._options.seed}-{self.num_steps}")
        text = texts[numbers.randrange(len(texts))]
        among = range(text.rows.start, text.rows.stop)
        rows = torch.tensor(sorted(numbers.sample(among, min(self._options.rows, len(among)))))
        for group in self._adam.param_groups:
            group["lr"] = self._options.rate * (1 - self.num_steps / self._options.steps)
        with torch.no_grad():
            full = text.passage.logits(text.last[rows]).log_softmax(-1)
        given = text.passage.logits(text.under(self._schedule, self._bridges)[rows]).log_softmax(-1)
        loss = (full.exp() * (full - given)).sum(-1).mean()
        self._adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._adam.step()
        self.losses.append(float(loss.detach()))
        return self.losses[-1]

    def _named(self) -> list[tuple[str, Tensor]]:
        """What is tuned, by names for a file, in a fixed order."""
        return [
            (f"{first}:{stop}.{part}", tensor)
            for (first, stop), bridge in sorted(self._bridges.items())
            for part in _PARTS
            if (tensor := getattr(bridge, part)) is not None
        ]

    def _load(self, path: Path, key: str) -> None:
        def read(words: Mapping[str, str]) -> tuple[list[float], int]:
            losses = [float(loss) for loss in as_json(words["losses"], path)]
            return losses, len(losses)

        self.losses = read_training(path, key, self._adam, self._named(), read) or self.losses


def _with(bridge: Bridge, change: Callable[[Tensor], Tensor]) -> Bridge:
    down = None if bridge.down is None else change(bridge.down)
    return replace(bridge, weight=change(bridge.weight), offset=change(bridge.offset), down=down)
