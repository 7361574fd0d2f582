"""What a window costs on text that no bridge was fitted on: skipped as it is, and with its bridge.

The one idea: as in decoding, the beginning of a text is its prompt and runs every layer, and all positions behind it
leave the window out. Each is asked for its next token, and the answer is compared with full depth's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from d3engine.analysis.layers import FloatArray
from d3engine.analysis.report import Table, counted
from d3engine.bridges.judging import FullText, Reading, long_enough, window_schedule
from d3engine.bridges.passage import Passage
from d3engine.model.bridges import Bridge, Window


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
        """What it comes to."""
        return {"kl": self.kl, "agreement": self.agreement, "perplexity": self.perplexity}


@dataclass
class HeldOut:
    """By window what was judged, skipped and bridged; and full depth, of which the perplexity alone says something."""

    num_texts: int = 0
    full: Judged = field(default_factory=Judged)
    skipped: dict[Window, Judged] = field(default_factory=dict)
    bridged: dict[Window, Judged] = field(default_factory=dict)

    def table(self) -> Table:
        """A row for each window."""
        header = ("window", "skipped: KL", "agreement", "perplexity", "bridged: KL", "agreement", "perplexity")
        rows = [
            (f"[{first}, {stop})", *_cells(self.skipped[first, stop]), *_cells(self.bridged[first, stop]))
            for first, stop in sorted(self.bridged)
        ]
        about = f"{counted(self.num_texts, 'text')}, {self.full.count:,} positions"
        return Table(f"Held out: {about}, full depth's perplexity {self.full.perplexity:.2f}", header, rows)

    def as_dict(self) -> dict[str, Any]:
        """The same for machines."""
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
