"""Quantizes matrices to 4 bits in groups, each with a scale and a zero point, against the activations of a text."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from d3engine.model.checkpoint import Checkpoint
from d3engine.model.config import ModelConfig
from d3engine.weights_tools.layerwise import LayerwiseModel, weighted

GROUP_SIZES = (32, 64, 128)
_MOST = 15
_COLUMNS_AT_ONCE = 128
"""Columns whose errors are spread over the columns behind them in one product."""
_DAMPING = 0.2
"""Of the mean of the diagonal, added to it: a text has chance correlations, which other texts do not share."""
_SWEEPS = 2
"""Rounds in which each scale and code is chosen again; later ones gain little."""
_SHRINKAGE = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
"""Shares of a group's range that its fifteen steps may cover."""


@dataclass(frozen=True)
class Groups:
    """A matrix [N, K]: `codes` and `zero_points` uint8, `scales` float16, these two [N, groups].

    Codes have 4 bits, or 8 with one group a row (`round_rows`).
    """

    codes: Tensor
    zero_points: Tensor
    scales: Tensor

    def dequantize(self) -> Tensor:
        """The float32 matrix."""
        size = self.codes.shape[1] // self.scales.shape[1]
        zero_points, scales = (part.repeat_interleave(size, dim=1) for part in (self.zero_points, self.scales.float()))
        return (self.codes.float() - zero_points) * scales


def quantize_groups(matrix: Tensor, group_size: int, second_moments: Tensor) -> Groups:
    """Round `matrix` [N, K] to 4 bits so that the products of a text's activations change least.

    `second_moments` float32 [K, K] are the sums of x x' over activations x. Each group has the zero point and the scale
    of the least error weighted by the activations' squares. Columns are rounded from the one with the largest
    activations on, and the error of each is made up for by those that follow (Frantar et al., GPTQ, 2022). Then codes
    and scales are chosen again one after the other, each the best beside all others (Behdin et al., QuantEase, 2023).
    """
    matrix, damped = matrix.float(), _damped(second_moments)
    columns = torch.split(matrix, group_size, dim=1), torch.split(second_moments.diagonal(), group_size)
    fits = list(map(_fit, *columns))
    zero_points, scales = (torch.stack(one, dim=1) for one in zip(*fits, strict=True))
    codes = _compensated(matrix, zero_points, scales.float(), damped)
    for _ in range(_SWEEPS):
        codes, scales = _improved(matrix, codes, zero_points, scales, damped)
    return Groups(codes.to(torch.uint8), zero_points.to(torch.uint8), scales)


def _compensated(matrix: Tensor, zero_points: Tensor, scales: Tensor, damped: Tensor) -> Tensor:
    """The codes [N, K], as floats, of a matrix with given groups."""
    rows, columns = matrix.shape
    order = damped.diagonal().argsort(descending=True)
    group_of = order // (columns // scales.shape[1])
    left, upper = matrix[:, order], _inverse_factor(damped[order][:, order])
    codes = torch.empty_like(matrix)
    for start in range(0, columns, _COLUMNS_AT_ONCE):
        stop = min(start + _COLUMNS_AT_ONCE, columns)
        block, errors = left[:, start:stop].t().contiguous(), torch.empty(stop - start, rows)
        zeros, steps = (one[:, group_of[start:stop]].t().contiguous() for one in (zero_points, scales))
        for nth, column in enumerate(range(start, stop)):
            found = (block[nth] / steps[nth]).round_().add_(zeros[nth]).clamp_(0, _MOST)
            codes[:, order[column]] = found
            errors[nth] = (block[nth] - (found - zeros[nth]) * steps[nth]) / upper[column, column]
            block[nth:].addr_(upper[column, column:stop], errors[nth], alpha=-1)
        left[:, stop:].addmm_(errors.t(), upper[start:stop, stop:], alpha=-1)
    return codes


def _improved(
    matrix: Tensor, codes: Tensor, zero_points: Tensor, scales: Tensor, damped: Tensor
) -> tuple[Tensor, Tensor]:
    """Codes and scales of a lower or the same error: of one group after the other the scale, then each code."""
    size, codes, scales = codes.shape[1] // scales.shape[1], codes.clone(), scales.clone()
    zeros, steps = (one.repeat_interleave(size, dim=1) for one in (zero_points, scales.float()))
    left = matrix - (codes - zeros) * steps
    for group in range(scales.shape[1]):
        part = slice(group * size, (group + 1) * size)
        own = damped[part, part]
        pull = (left @ damped[:, part]).t().contiguous()
        zero = zero_points[:, group]
        numbers = (codes[:, part] - zero[:, None]).t().contiguous()
        old = scales[:, group].float()
        better = (old + (numbers * pull).sum(0) / (numbers * (own @ numbers)).sum(0)).half()
        better = torch.where(torch.isfinite(better) & (better > 0), better, scales[:, group])
        scales[:, group] = better
        step = better.float()
        pull -= own @ (numbers * (step - old))
        for nth in range(size):
            wanted = numbers[nth] * step + pull[nth] / own[nth, nth]
            found = (wanted / step).round_().add_(zero).clamp_(0, _MOST).sub_(zero)
            pull.addr_(own[nth], (found - numbers[nth]) * step, alpha=-1)
            numbers[nth] = found
        codes[:, part] = (numbers + zero).t()
        left[:, part] = matrix[:, part] - (numbers * step).t()
    return codes, scales


def stored_bits(shape: Sequence[int], bits: int, group_size: int = 0) -> int:
    """Bits of a matrix [N, K] in a file: 4 of a code, in groups, or 8, with a scale for each row."""
    rows, columns = shape
    of_shape = 2 * 64
    if bits == 8:
        return 8 * rows * columns + 16 * rows + of_shape
    zero_points = 32 * -(-rows // 8)
    return 4 * rows * columns + columns // group_size * (16 * rows + zero_points) + of_shape


def round_rows(matrix: Tensor) -> Groups:
    """`matrix` [N, K] in 8 bits: one group a row, whose zero point is 128."""
    scales = (matrix.abs().amax(dim=1, keepdim=True) / 127).clamp_(min=1e-6).half()
    codes = (matrix / scales.float()).round_().clamp_(-127, 127).add_(128).to(torch.uint8)
    return Groups(codes, torch.full_like(scales, 128, dtype=torch.uint8), scales)


def _damped(second_moments: Tensor) -> Tensor:
    """The moments with `_DAMPING` of their mean added to the diagonal."""
    damped = second_moments.clone()
    diagonal = damped.diagonal()
    diagonal += _DAMPING * diagonal.mean().clamp(min=1e-6)
    return damped


def _inverse_factor(damped: Tensor) -> Tensor:
    """The upper Cholesky factor of the inverse."""
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    upper: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return upper


def _fit(part: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Zero points float32 and scales float16, both [N], of the least error of `part` [N, G] weighted by `weights` [G].

    0 is always representable. Each share of the range is tried with the scale that fits its codes best.
    """
    low, high = part.amin(dim=1).clamp_(max=0), part.amax(dim=1).clamp_(min=0)
    span = (high - low).clamp_(min=1e-6)
    best, kept_zero_points, kept_scales = None, torch.zeros_like(low), torch.ones_like(low).half()
    for share in _SHRINKAGE:
        scales = (span * (share / _MOST)).half()
        zero_points = (-low * share / scales.float()).round_().clamp_(0, _MOST)
        for _ in range(2):
            steps = scales.float()[:, None]
            codes = (part / steps).round_().add_(zero_points[:, None]).clamp_(0, _MOST).sub_(zero_points[:, None])
            error = ((codes * steps - part).square_() * weights).sum(dim=1)
            better = torch.ones_like(error, dtype=torch.bool) if best is None else error < best
            best = error if best is None else torch.where(better, error, best)
            kept_zero_points = torch.where(better, zero_points, kept_zero_points)
            kept_scales = torch.where(better, scales, kept_scales)
            squares = (codes.square() * weights).sum(dim=1)
            fitted = ((codes * part * weights).sum(dim=1) / squares).half()
            scales = torch.where(torch.isfinite(fitted) & (fitted > 0), fitted, scales)
    return kept_zero_points, kept_scales


class LayerQuantizer:
    """Quantizes the layers of a model one after the other, each for the activations that the ones before it make.

    Beside the text through quantized layers it runs through the float ones, whose products each matrix is fitted to.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        prompts: Tensor,
        group_size: int,
        of_8_bits: Collection[str] = (),
    ) -> None:
        """`prompts` int64 [S, L]: the text. The matrices named in `of_8_bits` become rows of 8 bits."""
        self.group_size = group_size
        self._model, self._of_8_bits = LayerwiseModel(checkpoint, config, prompts.shape[1]), of_8_bits
        self._rounded = self._floats = self._model.embedded(prompts)

    def layer(self, index: int) -> dict[str, Groups]:
        """The quantized matrices of layer `index` by their names; layers are asked for in their order."""
        made: dict[str, Groups] = {}
        count = len(self._rounded)

        def product(inputs: list[Tensor], modules: list[str], added: list[Tensor]) -> Iterator[Tensor]:
            matrices, bias = self._model.matrices(modules), self._model.bias(modules)
            rounded, floats = inputs[:count], inputs[count:]
            floating = torch.cat([*matrices.values()])
            moments = self._model.second_moments(rounded, modules)
            gaps = [wanted - one for one, wanted in zip(added[:count], added[count:], strict=True)]
            wanted = _caught_up(floating, rounded, floats, gaps, moments)
            sizes = [len(matrix) for matrix in matrices.values()]
            made.update(self._quantized(dict(zip(matrices, torch.split(wanted, sizes), strict=True)), moments))
            quantized = torch.cat([made[name].dequantize() for name in matrices])
            yield from (F.linear(one, quantized, bias) for one in rounded)
            yield from (F.linear(one, floating, bias) for one in floats)

        states = self._model.layer(index, [*self._rounded, *self._floats], product)
        self._rounded, self._floats = states[:count], states[count:]
        return made

    def _quantized(self, matrices: dict[str, Tensor], moments: Tensor) -> dict[str, Groups]:
        """Matrices of the same inputs, those of 4 bits fitted together."""
        made = {name: round_rows(matrix) for name, matrix in matrices.items() if name in self._of_8_bits}
        others = {name: matrix for name, matrix in matrices.items() if name not in made}
        return made | quantize_together(others, self.group_size, moments)


def quantize_together(matrices: dict[str, Tensor], group_size: int, moments: Tensor) -> dict[str, Groups]:
    """`quantize_groups` of matrices with the same inputs."""
    if not matrices:
        return {}
    groups = quantize_groups(torch.cat([*matrices.values()]), group_size, moments)
    sizes = [len(matrix) for matrix in matrices.values()]
    parts = (torch.split(part, sizes) for part in (groups.codes, groups.zero_points, groups.scales))
    return {name: Groups(*part) for name, part in zip(matrices, zip(*parts, strict=True), strict=True)}


def _caught_up(
    matrix: Tensor, rounded: Sequence[Tensor], floats: Sequence[Tensor], gaps: Sequence[Tensor], moments: Tensor
) -> Tensor:
    """`matrix` [N, K] changed: its products of `rounded` come near those of `matrix` and `floats`, plus `gaps`, if any.

    So it makes up for what the layers before it lost, as far as its inputs show that (Arai and Ichikawa, QEP, 2025).
    Where its outputs are added to hidden states, `gaps` [S, L, N] are what these lack.
    """
    rows, columns = matrix.shape
    inputs = [weighted(one.flatten(0, -2)) for one in rounded]
    lost = torch.zeros(rows, columns)
    changes = ((wanted - one).flatten(0, -2) for one, wanted in zip(rounded, floats, strict=True))
    if 2 * rows < columns:  # the cheaper of two orders of the same products
        for change, one in zip(changes, inputs, strict=True):
            lost.addmm_(F.linear(change, matrix).t(), one)
    else:
        cross = torch.zeros(columns, columns)
        for change, one in zip(changes, inputs, strict=True):
            cross.addmm_(change.t(), one)
        lost = matrix @ cross
    for gap, one in zip(gaps, inputs, strict=False):
        lost.addmm_(gap.flatten(0, -2).t(), one)
    factor = torch.linalg.cholesky(_damped(moments))
    return matrix + torch.cholesky_solve(lost.t(), factor).t()
