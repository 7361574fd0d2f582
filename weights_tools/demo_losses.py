"""How depth is trained in: which layers a batch passes over, and the losses of one pass.

The one idea: a pass under D3 trains the depths that an answer goes through as its window grows, and a pass at full
depth trains, by its exits, the depths at which the window has come to its end.
"""

import random

import torch
import torch.nn.functional as F
from torch import Tensor

from d3engine.weights_tools.demo_data import Batch
from d3engine.weights_tools.demo_trainer import DemoConfig, DemoModel, cutoffs

STARTS, START_WEIGHTS = (0.5, 0.6, 0.7, 0.8), (1, 6, 1, 1)
ALPHAS = (0.8, 0.9, 0.95, 0.99, 0.995, 0.999)
ALPHA_WEIGHTS = (2, 4, 2, 2, 1, 1)
# Of the batches whose border is moved into the prompt, most stop just before the answer, as a question without
# "\nAnswer:" does; the others may stop anywhere.
SHORT_TAIL, LONG_TAIL_SHARE = 8, 0.3


def draw_cutoff(rng: random.Random, config: DemoConfig, full_depth_share: float) -> list[int] | None:
    """Returns the depth policy of one batch, as cutoffs; None is full depth."""
    if rng.random() < full_depth_share:
        return None
    (alpha,), (start,) = rng.choices(ALPHAS, ALPHA_WEIGHTS), rng.choices(STARTS, START_WEIGHTS)
    return cutoffs(config.layers, alpha, start)


def draw_tail(rng: random.Random, prompt: int, share: float) -> int:
    """Returns how many of a prompt's last tokens count as generated: in most batches none, seldom nearly all.

    A prompt that stops early, say before "Answer:", leaves these tokens to be generated, at their steps' depths.
    """
    if rng.random() >= share:
        return 0
    return rng.randint(1, prompt - 1) if rng.random() < LONG_TAIL_SHARE else rng.randint(1, min(SHORT_TAIL, prompt - 1))


def batch_loss(model: DemoModel, batch: Batch, cutoff: list[int] | None, tail: int = 0) -> tuple[Tensor, Tensor]:
    """Returns (loss to minimise, mean loss over answer tokens alone) under a depth policy."""
    return token_loss(model, batch, model(batch.tokens[:, :-1], batch.prompt - tail, cutoff))


def exits_loss(model: DemoModel, batch: Batch, exits: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the sum of the losses at full depth and at each exit, and each over answer tokens alone, by name.

    Once D3's window has grown to its end, a token runs the layers below it alone: that is an exit, and one pass at
    full depth trains all of them.
    """
    depths = {"full": model.config.layers} | {f"exit {depth}": depth for depth in exits}
    passes = model.leave_at(batch.tokens[:, :-1], list(depths.values()))
    losses, answer_losses = zip(*(token_loss(model, batch, hidden) for hidden in passes), strict=True)
    return torch.stack(losses).sum(), dict(zip(depths, answer_losses, strict=True))


def token_loss(model: DemoModel, batch: Batch, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (weighted mean loss, mean loss over answer tokens) of hidden states (rows, time - 1, width)."""
    keep = batch.weights[:, 1:].flatten() > 0
    weights = batch.weights[:, 1:].flatten()[keep]
    logits = F.linear(hidden.flatten(0, 1)[keep], model.lm_head)
    losses = F.cross_entropy(logits, batch.tokens[:, 1:].flatten()[keep], reduction="none")
    answers = weights == 1
    return (losses * weights).sum() / weights.sum(), losses.detach()[answers].mean()
