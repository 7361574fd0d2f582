"""Quantizes weights that are already loaded: the same numbers as a quantized directory gives, without one.

The one idea: a scale belongs to one output channel, so that stacking matrices and permuting their rows, as loading
does, may come before or after.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import Tensor

from d3engine.errors import InvalidValueError, require
from d3engine.kernels.quantized import Int4Weight, Int8Weight, Weight, quantize_int4, quantize_int8
from d3engine.model.config import QUANTIZATION_SCHEMES
from d3engine.model.weights import LayerWeights, LlamaWeights

_QUANTIZE: Mapping[str, Callable[[Tensor], Int8Weight | Int4Weight]] = {"int8": quantize_int8, "int4": quantize_int4}


def quantize_matrix(matrix: Weight, scheme: str) -> Int8Weight | Int4Weight:
    """Return a float matrix [N, K] as "int8" (one scale per row) or "int4" (a scale for 128 columns of a row).

    Raises `InvalidValueError` for another scheme and for a matrix that is quantized already, `ValueError` for NaN or
    infinity in it.
    """
    require(scheme in QUANTIZATION_SCHEMES, "scheme", scheme, f"one of {', '.join(QUANTIZATION_SCHEMES)}")
    if not isinstance(matrix, Tensor):
        raise InvalidValueError("weights", type(matrix).__name__, "float matrices")
    return _QUANTIZE[scheme](matrix)


def quantize_weights(weights: LlamaWeights, scheme: str) -> LlamaWeights:
    """Return `weights` with the matrices of the layers, and an LM head that is not tied, quantized on their device.

    Norms, biases and the embedding (with an LM head tied to it) are those of `weights`. Raises as `quantize_matrix`.
    """
    return with_matrices(weights, lambda matrix: quantize_matrix(matrix, scheme))


def with_matrices(weights: LlamaWeights, change: Callable[[Weight], Weight]) -> LlamaWeights:
    """Return `weights` with `change` applied to each matrix that quantization touches."""

    def layer(given: LayerWeights) -> LayerWeights:
        return replace(
            given,
            qkv=change(given.qkv),
            output=change(given.output),
            gate_up=change(given.gate_up),
            down=change(given.down),
        )

    tied = weights.lm_head is weights.embedding
    return LlamaWeights(
        embedding=weights.embedding,
        layers=tuple(layer(given) for given in weights.layers),
        final_norm=weights.final_norm,
        lm_head=weights.embedding if tied else change(weights.lm_head),
    )
