"""Narrower MLPs in closed form: neurons in one order of what they matter, and the down matrix refitted to those kept.

A neuron's score is the sum of its squared activation over the model's own answers times the squared norm of its column
of the down matrix. What the neurons left out did is then regressed on those that stay (ridge), so no step is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from d3engine.errors import require_number
from d3engine.model.students import NEURONS
from d3engine.research.bridges.passage import matrix_of
from d3engine.research.distillation.corpus import OwnAnswer
from d3engine.research.distillation.passes import AnswerPass

RIDGE = 0.1
"""In units of the mean diagonal of the kept neurons' products."""

MULTIPLE = 32
"""Widths are multiples of this, as the native library's interleaved rows are."""

MEMORY = 3 * 2**30
"""Bytes of products that are gathered at once, at most: layers come in groups."""


def kept_neurons(width: float, intermediate: int) -> int:
    """How many neurons stay at a width in (0, 1]."""
    require_number("--width", width, 0, 1, open_low=True)
    return max(MULTIPLE, int(width * intermediate) // MULTIPLE * MULTIPLE)


@torch.no_grad()
def narrow(
    run: AnswerPass,
    texts: Sequence[OwnAnswer],
    layers: Sequence[int],
    width: float,
    *,
    refit: bool = True,
    progress: Callable[[int], None] = lambda total: None,
) -> dict[int, dict[str, Tensor]]:
    """`NEURONS` and a float32 down matrix for each of `layers`; the texts are read twice or more.

    `progress` is called for each text that was read, with how many that will be in all.
    """
    count = kept_neurons(width, run.config.intermediate_size)
    group = max(1, MEMORY // (4 * count * (count + run.config.hidden_size)))
    groups = [layers[start : start + group] for start in range(0, len(layers), group)] if refit else []
    advance = partial(progress, (1 + len(groups)) * len(texts))
    scores = {layer: torch.zeros(run.config.intermediate_size) for layer in layers}

    def add_squares(layer: int, gated: Tensor) -> None:
        scores[layer] += gated.float().square().sum(0)

    _read(run, texts, layers, add_squares, advance)
    found = {}
    for layer in layers:
        down = matrix_of(run.weights.layers[layer].down, torch.float32)
        kept = (scores[layer] * down.square().sum(0)).topk(count).indices.sort().values
        found[layer] = {NEURONS: kept, "down": down[:, kept].contiguous()}
    for some in groups:
        _refit(run, texts, some, found, advance)
    return found


def _refit(
    run: AnswerPass,
    texts: Sequence[OwnAnswer],
    layers: Sequence[int],
    found: dict[int, dict[str, Tensor]],
    progress: Callable[[], None],
) -> None:
    sums: dict[int, tuple[Tensor, Tensor]] = {}
    rest: dict[int, tuple[Tensor, Tensor]] = {}
    for layer in layers:
        kept = found[layer][NEURONS]
        others = torch.ones(run.config.intermediate_size, dtype=torch.bool)
        others[kept] = False
        rest[layer] = others, matrix_of(run.weights.layers[layer].down, torch.float32)[:, others].T
        sums[layer] = torch.zeros(kept.numel(), kept.numel()), torch.zeros(kept.numel(), run.config.hidden_size)

    def add_products(layer: int, gated: Tensor) -> None:
        products, crossed = sums[layer]
        others, down = rest[layer]
        own = gated[:, found[layer][NEURONS]].float()
        products.addmm_(own.T, own)
        crossed.addmm_(own.T, gated[:, others].float() @ down)

    _read(run, texts, layers, add_products, progress)
    for layer in layers:
        products, crossed = sums[layer]
        products.diagonal().add_(RIDGE * products.diagonal().mean())
        found[layer]["down"] += torch.linalg.solve(products, crossed).T


def _read(
    run: AnswerPass,
    texts: Sequence[OwnAnswer],
    layers: Sequence[int],
    use: Callable[[int, Tensor], None],
    progress: Callable[[], None],
) -> None:
    """Let `use` see what the down matrices of `layers` get, of the generated tokens of every text."""
    wanted = set(layers)
    for text in texts:
        # The states before a layer's MLP are those that its attention has left, so layers run once more from there.
        hidden = run.embedded([*text.prompt_ids, *text.token_ids[:-1]])
        rotations = run.rotations(0, hidden.shape[0])
        for number in range(max(wanted) + 1):
            layer = run.weights.layers[number]
            hidden, _ = run.attention(number, layer, hidden, rotations[number], None)
            gated = run.gated(layer, hidden)
            if number in wanted:
                use(number, gated[len(text.prompt_ids) :])
            hidden = hidden + run.down(layer, gated)
        progress()
