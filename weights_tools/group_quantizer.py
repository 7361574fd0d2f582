"""Quantizes matrices to 4 bits in groups, each with a scale and a zero point, against the activations of a text."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from d3engine.errors import ModelFormatError
from d3engine.kernels import reference
from d3engine.kernels.reference_attention import attended
from d3engine.model.checkpoint import Checkpoint
from d3engine.model.config import ModelConfig
from d3engine.model.expected_tensors import HEAD_NORMS
from d3engine.model.llama import Rope, scaled_embedding_

GROUP_SIZES = (32, 64, 128)
_MOST = 15
_COLUMNS_AT_ONCE = 128
"""Columns whose errors are spread over the columns behind them in one product."""
_DAMPING = 0.05
"""Of the mean of the diagonal, added to it: few tokens leave directions that no activation has."""
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


def round_rows(matrix: Tensor) -> Groups:
    """`matrix` [N, K] in 8 bits: one group a row, whose zero point is 128."""
    scales = (matrix.abs().amax(dim=1, keepdim=True) / 127).clamp_(min=1e-6).half()
    codes = (matrix / scales.float()).round_().clamp_(-127, 127).add_(128).to(torch.uint8)
    return Groups(codes, torch.full_like(scales, 128, dtype=torch.uint8), scales)


def matrices_of_8_bits(config: ModelConfig) -> frozenset[str]:
    """The matrices of a mixture that get 8 bits: those to which a model is most sensitive, in about half its layers.

    As llama.cpp's Q4_K_M has it, the value and the down projection, in the first and last eighth of the layers and in
    every third between them. Of a fused matrix the values are no part.
    """
    names, eighth = config.tensor_names, config.num_layers // 8
    modules = [names.down, *(f"self_attn.{name}" for name in names.qkv[2:])]
    layers = [
        layer
        for layer in range(config.num_layers)
        if layer < eighth or layer >= 7 * config.num_layers // 8 or (layer - eighth) % 3 == 2
    ]
    return frozenset(f"{names.layer(layer)}{module}.weight" for layer in layers for module in modules)


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
    """Quantizes the layers of a model one after the other, each for the activations that the ones before it make."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        prompts: Tensor,
        group_size: int,
        of_8_bits: Collection[str] = (),
    ) -> None:
        """`prompts` int64 [S, L]: the text. The matrices named in `of_8_bits` become rows of 8 bits."""
        self._checkpoint, self._config, self.group_size = checkpoint, config, group_size
        self._of_8_bits = of_8_bits
        self._sequences, self._length = prompts.shape
        embedding = checkpoint.read(config.tensor_names.embedding)
        looked_up = embedding[prompts.flatten()].float() * config.multipliers.on_embedding
        self.hidden = scaled_embedding_(looked_up, config)
        rope = Rope(config, self._length, "cpu")
        lengths = torch.full((self._length,), self._length)
        self._rotations = rope.of_layers(rope.rotations(torch.arange(self._length), lengths))

    def layer(self, index: int) -> dict[str, Groups]:
        """The matrices of 4 bits of layer `index` by their names; layers are asked for in their order."""
        return {name: groups for name, groups in self._layer(index) if name not in self._of_8_bits}

    def _layer(self, index: int) -> Iterator[tuple[str, Groups]]:
        config, names = self._config, self._config.tensor_names
        prefix, norms = names.layer(index), names.norms
        attention = prefix + "self_attn."
        normed = self._normed(self.hidden, prefix, norms.attention)
        qkv, made = self._product(normed, [attention + name for name in names.qkv])
        yield from made.items()
        heads = self._attended(qkv, attention, self._rotations[index], config.windows[index])
        output, made = self._product(heads, [attention + "o_proj"])
        yield from made.items()
        self.hidden += self._normed(output, prefix, norms.attention_post)
        normed = self._normed(self.hidden, prefix, norms.mlp)
        gate_up, made = self._product(normed, [prefix + name for name in names.gate_up])
        yield from made.items()
        gate, up = gate_up.chunk(2, dim=1)
        gated = reference.activated(gate, config.activation).mul_(up)
        down, made = self._product(gated, [prefix + names.down])
        yield from made.items()
        self.hidden += self._normed(down, prefix, norms.mlp_post)

    def _normed(self, x: Tensor, prefix: str, name: str | None) -> Tensor:
        """The norm of `x` by the weights of that name; None: `x` itself."""
        if name is None:
            return x
        weight = self._read(f"{prefix}{name.removesuffix('.weight')}.weight") + self._config.norm_offset
        return reference.rms_norm(x, weight, self._config.rms_norm_eps)

    def _read(self, name: str) -> Tensor:
        return self._checkpoint.read(name).float()

    def _product(self, inputs: Tensor, modules: list[str]) -> tuple[Tensor, dict[str, Groups]]:
        """`inputs` [T, K] times the quantized matrices of `modules`, side by side, and the matrices."""
        matrices = [self._read(f"{module}.weight") for module in modules]
        biases = [self._bias(module) for module in modules]
        moments = inputs.t() @ inputs
        if not torch.isfinite(moments).all():
            raise ModelFormatError(
                f"{self._checkpoint.entries[modules[0] + '.weight'].file}: activations are not finite"
            )
        names = [f"{module}.weight" for module in modules]
        made = self._quantized(dict(zip(names, matrices, strict=True)), moments)
        product = F.linear(inputs, torch.cat([made[name].dequantize() for name in names]))
        if any(bias is not None for bias in biases):
            rows = [torch.zeros(len(one)) if bias is None else bias for one, bias in zip(matrices, biases, strict=True)]
            product += torch.cat(rows)
        return product, made

    def _quantized(self, matrices: dict[str, Tensor], moments: Tensor) -> dict[str, Groups]:
        """Matrices of the same inputs, those of 4 bits fitted together."""
        made = {name: round_rows(matrix) for name, matrix in matrices.items() if name in self._of_8_bits}
        fitted = {name: matrix for name, matrix in matrices.items() if name not in made}
        if fitted:
            groups = quantize_groups(torch.cat([*fitted.values()]), self.group_size, moments)
            sizes = [len(matrix) for matrix in fitted.values()]
            parts = (torch.split(part, sizes) for part in (groups.codes, groups.zero_points, groups.scales))
            made |= {name: Groups(*part) for name, part in zip(fitted, zip(*parts, strict=True), strict=True)}
        return made

    def _bias(self, module: str) -> Tensor | None:
        name = f"{module}.bias"
        return self._read(name) if name in self._checkpoint.entries else None

    def _attended(self, qkv: Tensor, attention: str, rotations: Tensor, window: int | None) -> Tensor:
        """What the heads make of `qkv` [T, Q + 2 K], with a sliding window at most: [T, Q]."""
        config = self._config
        if config.has_projection_norms:
            parts = list(torch.split(qkv, [config.q_size, config.kv_size, config.kv_size], dim=1))
            for nth, name in enumerate(HEAD_NORMS):
                parts[nth] = self._normed(parts[nth], attention, name)
            qkv = torch.cat(parts, dim=1)
        heads = qkv.view(self._sequences, self._length, -1, config.head_dim).transpose(1, 2)
        query, key, value = torch.split(heads, [config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
        if config.has_head_norms:
            pairs = zip((query, key), HEAD_NORMS, strict=True)
            query, key = (self._normed(heads, attention, name) for heads, name in pairs)
        query, key = (_turned(part, rotations, config) for part in (query, key))
        cap, scale = config.soft_caps.attention, config.attention_scale
        if cap is None and (window or self._length) >= self._length:
            found = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
        else:
            mask = torch.ones(self._length, self._length, dtype=torch.bool).tril()
            mask = mask if window is None else mask.triu(1 - window)
            found = attended(query, key, value, mask, scale, cap, enable_gqa=True)
        return found.transpose(1, 2).reshape(len(qkv), -1)


def _turned(heads: Tensor, rotations: Tensor, config: ModelConfig) -> Tensor:
    """Heads [..., L, D] in transformers' order of channels, turned by `rotations` [L, D / 2]."""
    stop, axis = config.rotary_dim, -1 if config.has_interleaved_rope else -2
    pairs = heads[..., :stop].reshape(*heads.shape[:-1], *((-1, 2) if axis == -1 else (2, -1)))
    first, second = pairs.unbind(axis)
    turned = torch.complex(first.contiguous(), second.contiguous()) * rotations[:, : stop // 2]
    return torch.cat([torch.stack([turned.real, turned.imag], axis).flatten(-2), heads[..., stop:]], dim=-1)
