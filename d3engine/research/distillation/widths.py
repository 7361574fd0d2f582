"""Narrower MLPs in closed form: all neurons in one order of what they matter, and the down matrices refitted to those
that stay.

What a neuron matters is the sum over generated tokens of (z dL/dz)^2, where z is its activation and L the negative log
likelihood of a token drawn from the model's own distribution: to second order twice the KL divergence that its removal
costs (the Fisher information of a mask on it: Theis et al., arXiv 1801.05787). A token counts by the root of what all
its neurons matter together; without that a few tokens decide, those that the model had thought unlikely. Numbers of
different layers compare, so layers that matter less become narrower. Refitting goes from below to above on the
student's own states, towards full depth's: a layer makes up for what those under it have lost.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from d3engine.errors import require_number
from d3engine.model.students import narrowed
from d3engine.model.weights import LayerWeights
from d3engine.research.bridges.fitting import read_state, write_state
from d3engine.research.bridges.passage import gated_rows, linear, matrix_of
from d3engine.research.distillation.corpus import OwnAnswer
from d3engine.research.distillation.passes import AnswerPass, Entries, replaced
from d3engine.utils.files import as_json

RIDGE, RIDGE_ROWS = 0.1, 10_000
"""In units of the mean diagonal of the kept neurons' products, at that number of rows; it falls as the root of more.
On Coder-0.5B and 11,000 rows a fifth of it fitted what was held out worse."""

MULTIPLE = 32
"""Widths are multiples of this, as the native library's interleaved rows are."""

NARROWEST = 1 / 8
"""Of a layer's neurons as many stay at least."""

SUMMED_ROWS = 2048
"""Rows whose products are one: as many as make its multiplications, not its result, take the time."""

SAVE_SECONDS = 60.0
"""Between two saved states of a refitting at least: one of Coder-0.5B and 400 answers takes half a gigabyte."""


def kept_neurons(scores: Mapping[int, Tensor], width: float) -> dict[int, Tensor]:
    """The neurons, ascending, that stay of each layer: the part `width` in (0, 1] of all, those of the largest scores.

    Each layer's number is rounded to a multiple of `MULTIPLE`, and is no less than `NARROWEST` of what it has.
    """
    require_number("--width", width, 0, 1, open_low=True)
    every = torch.cat([scores[layer] for layer in sorted(scores)])
    least = every.topk(max(1, int(width * every.numel()))).values[-1]
    found = {}
    for layer, own in scores.items():
        wanted = max(int((own >= least).sum()), int(NARROWEST * own.numel()))
        count = min(own.numel(), max(MULTIPLE, round(wanted / MULTIPLE) * MULTIPLE))
        found[layer] = own.topk(count).indices.sort().values
    return found


def neuron_scores(
    run: AnswerPass, texts: Sequence[OwnAnswer], layers: Sequence[int], progress: Callable[[], None] = lambda: None
) -> dict[int, Tensor]:
    """Of each of `layers` float32 [I]: what its neurons matter on these answers."""
    scores = {layer: torch.zeros(run.config.intermediate_size) for layer in layers}
    generator = torch.Generator().manual_seed(0)
    for text in texts:
        prompt = len(text.prompt_ids)
        hidden = run.embedded([*text.prompt_ids, *text.token_ids[:-1]])
        rotations = run.rotations(0, hidden.shape[0])
        gates: dict[int, Tensor] = {}
        for number, layer in enumerate(run.weights.layers):
            hidden, _ = run.attention(number, layer, hidden, rotations[number], None)
            gated = gated_rows(run.config, layer, hidden)
            if number in scores:
                if not gated.requires_grad:
                    gated.requires_grad_()
                gated.retain_grad()
                gates[number] = gated
            hidden = hidden + linear(gated, layer.down, layer.down_bias)
        logits = run.logits(hidden[prompt:])
        with torch.no_grad():
            drawn = _drawn(logits, generator)
        F.cross_entropy(logits, drawn, reduction="sum").backward()  # type: ignore[no-untyped-call]
        _add_scores(scores, gates, prompt)
        progress()
    return scores


def _drawn(logits: Tensor, generator: torch.Generator) -> Tensor:
    """A token id of each row of logits [T, V]: one random number a row, where `multinomial` takes one a column."""
    below = logits.softmax(-1).cumsum(-1)
    at = torch.rand(len(logits), 1, generator=generator) * below[:, -1:]
    return torch.searchsorted(below, at, right=True)[:, 0].clamp_max(logits.shape[1] - 1)


@torch.no_grad()
def _add_scores(scores: Mapping[int, Tensor], gates: Mapping[int, Tensor], prompt_length: int) -> None:
    """Add a text's, by the activations [T, I] of its layers and their gradients."""
    parts = {}
    for number, gated in gates.items():
        assert gated.grad is not None
        parts[number] = (gated.float() * gated.grad.float())[prompt_length:].square()
    together: Tensor = sum(part.sum(1) for part in parts.values())  # type: ignore[assignment]
    weights = together.clamp_min(torch.finfo(torch.float32).tiny).rsqrt()
    for number, part in parts.items():
        scores[number] += weights @ part


@dataclass
class Refitting:
    """How far the layers are refitted: the neurons that stay, the down matrices of `done` layers, and the rows behind
    these, of all texts: `full` [T, H] at full depth, `own` [R, H] the student's."""

    kept: Mapping[int, Tensor]
    done: int = 0
    down: dict[int, Tensor] = field(default_factory=dict)
    full: Tensor = field(default_factory=lambda: torch.empty(0))
    own: Tensor = field(default_factory=lambda: torch.empty(0))

    def write(self, path: Path, key: str) -> None:
        """Save it, for a run of the same `key` to go on from."""
        tensors = {f"kept.{layer}": neurons for layer, neurons in self.kept.items()}
        tensors |= {f"down.{layer}": down.contiguous() for layer, down in self.down.items()}
        words = json.dumps([self.done, list(self.kept), list(self.down)])
        write_state(path, key, {**tensors, "full": self.full, "own": self.own}, {"refitting": words})

    @staticmethod
    def read(path: Path, key: str) -> Refitting | None:
        """What `write` has saved of this `key`; None where there is none."""

        def read(tensor: Callable[[str], Tensor], words: Mapping[str, str]) -> Refitting:
            done, kept, down = as_json(words["refitting"], path)
            neurons = {layer: tensor(f"kept.{layer}") for layer in kept}
            matrices = {layer: tensor(f"down.{layer}") for layer in down}
            return Refitting(neurons, done, matrices, tensor("full"), tensor("own"))

        return read_state(path, key, read)


@dataclass
class _Stream:
    """A text on its way up: `full` [T, H] at full depth, `own` [R, H] the student's generated rows."""

    prompt_length: int
    full: Tensor
    own: Tensor
    rotations: Sequence[Tensor]


def _joined(texts: Sequence[Tensor]) -> Iterator[Tensor]:
    """The rows of all texts, `SUMMED_ROWS` at once."""
    return iter(torch.split(torch.cat(list(texts)), SUMMED_ROWS))


@torch.no_grad()
def narrow(
    run: AnswerPass,
    texts: Sequence[OwnAnswer],
    begun: Refitting,
    skip_layers: Sequence[int] = (),
    own_layers: Mapping[int, LayerWeights] | None = None,
    progress: Callable[[], None] = lambda: None,
    save: Callable[[Refitting], None] = lambda state: None,
) -> dict[int, Tensor]:
    """A float32 down matrix [H, k] for each layer of `begun.kept`, of a student of `own_layers` and `skip_layers`.

    `progress` is called for each layer that is not done, `save` now and then with what is done.
    """
    kept, found, streams = begun.kept, dict(begun.down), list[_Stream]()
    for text in texts:
        full = run.embedded([*text.prompt_ids, *text.token_ids[:-1]])
        prompt = len(text.prompt_ids)
        streams.append(_Stream(prompt, full, full[prompt:], run.rotations(0, full.shape[0])))
    if begun.done:
        fulls = torch.split(begun.full, [len(stream.full) for stream in streams])
        owns = torch.split(begun.own, [len(stream.own) for stream in streams])
        for stream, full, own_rows in zip(streams, fulls, owns, strict=True):
            stream.full, stream.own = full, own_rows
    saved = time.monotonic()
    for number, layer in enumerate(run.weights.layers):
        if number < begun.done:
            continue
        entries = []
        for stream in streams:
            prompt = stream.prompt_length
            stream.full, (keys, values) = run.layer(number, layer, stream.full, stream.rotations[number], None)
            entries.append((keys[:prompt], values[:prompt]))
        if number in kept:
            found[number] = _narrow_layer(run, number, kept[number], streams, entries)
        elif number not in skip_layers:
            own = (own_layers or {}).get(number, layer)
            for stream, before in zip(streams, entries, strict=True):
                rotations = stream.rotations[number][stream.prompt_length :]
                stream.own, _ = run.layer(number, own, stream.own, rotations, before)
        progress()
        if time.monotonic() - saved >= SAVE_SECONDS:
            full, own_rows = torch.cat([one.full for one in streams]), torch.cat([one.own for one in streams])
            save(Refitting(kept, number + 1, found, full, own_rows))
            saved = time.monotonic()
    return found


def _narrow_layer(
    run: AnswerPass, number: int, neurons: Tensor, streams: Sequence[_Stream], entries: Sequence[Entries]
) -> Tensor:
    """Take the student's rows through a layer of which these neurons stay; the down matrix nearest to their own that
    brings them to full depth's rows (ridge regression of the difference)."""
    layer = run.weights.layers[number]
    gate_up = narrowed(layer, neurons)
    assert isinstance(gate_up, Tensor)
    own = replaced(layer, {"gate_up": gate_up}, run.weights.dtype)
    start = matrix_of(layer.down, torch.float32)[:, neurons]
    bias = None if layer.down_bias is None else layer.down_bias.float()
    behind: list[Tensor] = []
    left: list[Tensor] = []
    for stream, before in zip(streams, entries, strict=True):
        rotations = stream.rotations[number][stream.prompt_length :]
        stream.own, _ = run.attention(number, own, stream.own, rotations, before)
        behind.append(gated_rows(run.config, own, stream.own))
        left.append(stream.full[stream.prompt_length :].float() - stream.own.float())
    products, crossed = torch.zeros(len(neurons), len(neurons)), torch.zeros(len(neurons), start.shape[0])
    for rows, lacking in zip(_joined(behind), _joined(left), strict=True):
        products += rows.T @ rows
        gated = rows.float()
        crossed.addmm_(gated.T, lacking - F.linear(gated, start, bias))
    num_rows = sum(map(len, behind))
    ridge = RIDGE * math.sqrt(RIDGE_ROWS / num_rows) if num_rows > RIDGE_ROWS else RIDGE
    products.diagonal().add_(ridge * products.diagonal().mean())
    down: Tensor = start + torch.linalg.solve(products, crossed).T
    own = replaced(own, {"down": down}, run.weights.dtype)
    for stream, gated in zip(streams, behind, strict=True):
        stream.own = stream.own + linear(gated, own.down, own.down_bias)
    return down
