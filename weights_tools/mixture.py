"""Chooses the matrices of a 4-bit model that get 8 bits: those whose rounding costs its outputs most for their bits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from d3engine.errors import require
from d3engine.model.checkpoint import Checkpoint, is_layer_matrix
from d3engine.model.config import ModelConfig
from d3engine.model.expected_tensors import expected_tensors
from d3engine.utils.progress import counting
from d3engine.weights_tools.group_quantizer import Groups, quantize_together, stored_bits
from d3engine.weights_tools.layerwise import LayerwiseModel

_JUDGED, _JUDGED_LENGTH = 32, 128
"""Parts of the text whose outputs are judged, at most, and their tokens."""
_DRAWS = 4
"""Random directions of the outputs for each part: they cost less than further parts."""
_JUDGED_AT_ONCE = 2
"""Sequences whose logits are in memory at once."""

Unit: TypeAlias = tuple[str, ...]
"""Matrices that get 8 bits together: a gate and its up projection, which kernels read as one, or a single one."""


def matrices_of_8_bits(
    checkpoint: Checkpoint,
    config: ModelConfig,
    prompts: Tensor,
    group_size: int,
    bits: float,
    *,
    show_progress: bool = True,
) -> frozenset[str]:
    """The matrices that get 8 bits where the layers may have `bits` a weight; `check_bits` says which it may be.

    Those come first that save most divergence for a bit (`output_costs` of `prompts` int64 [S, L]).
    """
    shapes = _shapes(config)
    costs = output_costs(checkpoint, config, prompts, group_size, show_progress=show_progress)
    extra = {
        unit: sum(stored_bits(shapes[name], 8) - stored_bits(shapes[name], 4, group_size) for name in unit)
        for unit in costs
    }
    left = bits * sum(map(math.prod, shapes.values()))
    left -= sum(stored_bits(shape, 4, group_size) for shape in shapes.values())
    chosen: list[str] = []
    for unit in sorted(costs, key=lambda unit: costs[unit] / extra[unit], reverse=True):
        if extra[unit] <= left:
            chosen += unit
            left -= extra[unit]
    return frozenset(chosen)


def check_bits(bits: float, config: ModelConfig, group_size: int) -> None:
    """Raise `InvalidValueError` for fewer bits a weight than 4-bit groups take, or more than 8-bit rows do."""
    shapes = _shapes(config).values()
    weights = sum(map(math.prod, shapes))
    lowest, highest = (sum(stored_bits(shape, each, group_size) for shape in shapes) / weights for each in (4, 8))
    lowest, highest = (math.ceil(100 * each) / 100 for each in (lowest, highest))
    allowed = f"a number from {lowest:.2f} to {highest:.2f}, which all matrices take in 4 and in 8 bits"
    require(lowest <= bits <= highest, "bits", bits, allowed)


def output_costs(
    checkpoint: Checkpoint, config: ModelConfig, prompts: Tensor, group_size: int, *, show_progress: bool = True
) -> dict[Unit, float]:
    """KL divergence, in nats a token of `prompts` int64 [S, L], that each layer matrix in 4 bits costs alone.

    To second order, where it is half the mean square of a gradient times the rounding errors: that of the outputs along
    a random direction whose second moments are the Fisher information of the logits.
    """
    total = 2 * config.num_layers
    with counting("measuring layers", "layer", total) if show_progress else nullcontext(lambda: None) as done:
        rounded: dict[str, Groups] = {}
        for found in _rounded_layers(LayerwiseModel(checkpoint, config, prompts.shape[1]), prompts, group_size):
            rounded |= found
            done()
        costs: dict[Unit, float] = {}
        length = min(_JUDGED_LENGTH, prompts.shape[1])
        some = prompts[:: max(1, len(prompts) // _JUDGED)]
        parts = [part for part in torch.split(some, length, dim=1) if part.shape[1] == length]
        judged = torch.cat(parts)[:_JUDGED]  # the first parts of all sequences before any second one
        for of_layer in _costs_of_layers(LayerwiseModel(checkpoint, config, length), judged, rounded):
            costs |= of_layer
            done()
    return costs


def _rounded_layers(model: LayerwiseModel, prompts: Tensor, group_size: int) -> Iterator[dict[str, Groups]]:
    """The matrices of each layer in 4 bits, fitted to what the float layers before it make."""
    states = model.embedded(prompts)
    for index in range(model.config.num_layers):
        found: dict[str, Groups] = {}
        states = model.layer(index, states, partial(_rounding, model, group_size, found))
        yield found


def _rounding(
    model: LayerwiseModel,
    group_size: int,
    found: dict[str, Groups],
    inputs: list[Tensor],
    modules: list[str],
    added: list[Tensor],
) -> Iterator[Tensor]:
    """The products of the float matrices, which `found` gets in 4 bits."""
    moments = model.second_moments(inputs, modules)
    found |= quantize_together(model.matrices(modules), group_size, moments)
    yield from model.product(inputs, modules, added)


def _costs_of_layers(
    model: LayerwiseModel, prompts: Tensor, rounded: Mapping[str, Groups]
) -> Iterator[dict[Unit, float]]:
    """What `output_costs` returns, of the last layer first."""
    before = [model.embedded(prompts)]
    for index in range(model.config.num_layers):
        before.append(model.layer(index, before[-1]))
    draws = _gradients(model, before.pop())
    for index in reversed(range(model.config.num_layers)):
        # How far each sequence goes along the rounding errors of a unit: nowhere, but the slope there is wanted.
        steps = {unit: torch.zeros(len(prompts), 1, 1, requires_grad=True) for unit in units_of(model.config, index)}
        states = [one.requires_grad_() for one in before.pop()]
        outputs = model.layer(index, states, partial(_stepping, model, rounded, steps))
        wanted = [*states, *steps.values()]
        found = [torch.autograd.grad(outputs, wanted, draw, retain_graph=True) for draw in draws]
        draws = [one[: len(states)] for one in found]
        slopes = zip(*(one[len(states) :] for one in found), strict=True)
        totals = [float(torch.stack(of_unit).square().sum()) for of_unit in slopes]
        tokens = 2 * len(draws) * prompts.numel()
        yield {unit: total / tokens for unit, total in zip(steps, totals, strict=True)}


def _stepping(
    model: LayerwiseModel,
    rounded: Mapping[str, Groups],
    steps: Mapping[Unit, Tensor],
    inputs: list[Tensor],
    modules: list[str],
    _: list[Tensor],
) -> Iterator[Tensor]:
    """The products of the float matrices, and `steps` times those of their rounding errors."""
    matrices, bias = model.matrices(modules), model.bias(modules)
    floats = torch.cat([*matrices.values()])
    units = [unit for unit in steps if unit[0] in matrices]
    errors = [torch.cat([rounded[name].dequantize() - matrices[name] for name in unit]) for unit in units]
    sizes = [len(one) for one in inputs]
    for one, *lengths in zip(inputs, *(torch.split(steps[unit], sizes) for unit in units), strict=True):
        changes = [step * F.linear(one.detach(), error) for step, error in zip(lengths, errors, strict=True)]
        yield F.linear(one, floats, bias) + torch.cat(changes, dim=-1)


def units_of(config: ModelConfig, index: int) -> list[Unit]:
    """The units of a layer, in the order of its products."""
    names = config.tensor_names
    prefix = names.layer(index)
    alone = [f"{prefix}self_attn.{name}.weight" for name in (*names.qkv, "o_proj")]
    return [
        *((name,) for name in alone),
        tuple(f"{prefix}{name}.weight" for name in names.gate_up),
        (f"{prefix}{names.down}.weight",),
    ]


def _gradients(model: LayerwiseModel, states: list[Tensor]) -> list[tuple[Tensor, ...]]:
    """Gradients of random projections of the logits, by final hidden `states` [S, L, H] each; `_DRAWS` times.

    With p the probabilities and s random signs, the gradient by the logits is sqrt(p) s - p (sqrt(p) . s): the mean of
    its square along a change of the logits is twice the KL divergence of that change, to second order.
    """
    generator = torch.Generator().manual_seed(0)
    leaves = [one.detach().requires_grad_() for part in states for one in torch.split(part, _JUDGED_AT_ONCE)]
    found: list[list[Tensor]] = [[] for _ in range(_DRAWS)]
    for leaf, logits in zip(leaves, model.logits(leaves), strict=True):
        probabilities = logits.detach().softmax(dim=-1)
        roots = probabilities.sqrt()
        for gradients in found:
            direction = roots * (torch.randint(0, 2, logits.shape, generator=generator, dtype=torch.int8) * 2 - 1)
            direction -= probabilities * direction.sum(dim=-1, keepdim=True)
            gradients += torch.autograd.grad(logits, leaf, direction, retain_graph=True)
    return [torch.split(torch.cat(gradients), [len(part) for part in states]) for gradients in found]


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, shape in expected_tensors(config).items() if is_layer_matrix(name)}
