"""What a window costs on text that no bridge was fitted on: skipped as it is, and with its bridge.

The one idea: as in decoding, the beginning of a text is its prompt and runs every layer, and all positions behind it
leave the window out. Each is asked for its next token, and the answer is compared with full depth's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from d3engine.analysis.observer import Observer
from d3engine.analysis.report import Table, counted
from d3engine.bridges.fitting import states_between
from d3engine.model.bridges import Bridge, Window
from d3engine.model.rope import Rope


@dataclass
class Judged:
    """Sums over positions: the KL divergence from full depth's next-token distribution, in nats, how often both have
    the same likeliest token, and -log p of the token that follows."""

    count: int = 0
    divergence: float = 0.0
    agreed: int = 0
    surprise: float = 0.0

    def add(self, full: Tensor, logits: Tensor, following: Tensor) -> None:
        """Judge logits [T, V] against full depth's log-probabilities [T, V] and the tokens int64 [T] that follow."""
        given = logits.log_softmax(-1)
        self.count += following.shape[0]
        self.divergence += float((full.exp() * (full - given)).sum())
        self.agreed += int((full.argmax(-1) == given.argmax(-1)).sum())
        self.surprise -= float(given.gather(1, following[:, None]).sum())

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


@torch.inference_mode()
def measure_held_out(
    observer: Observer,
    bridges: Sequence[Bridge],
    texts: Sequence[Sequence[int]],
    prompt_tokens: int,
    progress: Callable[[], None] = lambda: None,
) -> HeldOut:
    """Judge each bridge's window on texts of which the first `prompt_tokens` positions run every layer.

    Texts without two tokens more are passed over. `progress` hears of every text.
    """
    found = HeldOut()
    for text in texts:
        if len(text) >= prompt_tokens + 2:
            _judge(observer, bridges, text, prompt_tokens, found)
            found.num_texts += 1
        progress()
    return found


def _judge(
    observer: Observer, bridges: Sequence[Bridge], text: Sequence[int], prompt_tokens: int, found: HeldOut
) -> None:
    num_layers = observer.config.num_layers
    wanted = {layer for bridge in bridges for layer in bridge.window} | {num_layers}
    states = states_between(observer, text, wanted)
    following = torch.tensor(text[prompt_tokens + 1 :], device=observer.device)
    rows = slice(prompt_tokens, len(text) - 1)
    full_logits = observer.logits(states[num_layers][rows])
    full = full_logits.log_softmax(-1)
    found.full.add(full, full_logits, following)
    for bridge in bridges:
        before = states[bridge.first][prompt_tokens:]
        for kind, passed in ((found.skipped, before), (found.bridged, bridge.crossed(before))):
            hidden = torch.cat((states[bridge.stop][:prompt_tokens], passed))
            run_on(observer, hidden, bridge.stop)
            judged = kind.setdefault(bridge.window, Judged())
            judged.add(full, observer.logits(hidden[rows]), following)


def run_on(observer: Observer, hidden: Tensor, first: int) -> None:
    """Let a text's states [T, H] before layer `first` pass all layers from there, in place."""
    positions = torch.arange(hidden.shape[0], device=hidden.device)
    rope = Rope(observer.config, hidden.shape[0], hidden.device)
    lengths = positions + 1 if rope.depends_on_length else None
    rotations = rope.of_layers(rope.rotations(positions, lengths))
    for layer in range(first, observer.config.num_layers):
        observer.run_layer(layer, hidden, rotations[layer], observer.new_pool(hidden.shape[0]))
