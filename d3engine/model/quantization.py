"""Changes weights that are already loaded, quantizes them too: the same as a quantized directory or a loader gives.

The one idea: a scale belongs to one output channel, so that stacking matrices and permuting their rows, as loading
does, may come before or after.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import Tensor

from d3engine.errors import InvalidValueError, require
from d3engine.kernels.lanes import Int8LanesWeight
from d3engine.kernels.matrices import Weight
from d3engine.kernels.quantized import Int8Weight, QuantizedWeight, quantize_fp8, quantize_int4, quantize_int8
from d3engine.model.config import DEFAULT_HEAD_FORM, QUANTIZATION_SCHEMES, head_forms
from d3engine.model.weights import LayerWeights, LlamaWeights

_QUANTIZE: Mapping[str, Callable[[Tensor], QuantizedWeight]] = {
    "int8": quantize_int8,
    "fp8": quantize_fp8,
    "int4": quantize_int4,
}


def quantize_matrix(matrix: Weight, scheme: str) -> QuantizedWeight:
    """Return a float matrix [N, K] as "int8" or "fp8" (one scale per row), or "int4" (a scale for 128 columns of one).

    Raises `InvalidValueError` for another scheme and for a matrix that is quantized already, `ValueError` for NaN or
    infinity in it.
    """
    require(scheme in QUANTIZATION_SCHEMES, "scheme", scheme, f"one of {', '.join(QUANTIZATION_SCHEMES)}")
    if not isinstance(matrix, Tensor):
        raise InvalidValueError("weights", type(matrix).__name__, "float matrices")
    return _QUANTIZE[scheme](matrix)


def check_head_form(form: str, is_tied: bool) -> None:
    """Raise `InvalidValueError` unless the LM head of a model, which may be its embedding, can have this form."""
    forms = head_forms(is_tied)
    tied = " for a model whose head is its embedding" if is_tied else ""
    require(form in forms, "lm_head", form, f"one of {', '.join(forms)}{tied}")


def quantize_weights(weights: LlamaWeights, scheme: str, *, lm_head: str = DEFAULT_HEAD_FORM) -> LlamaWeights:
    """Return `weights` with the matrices of the layers and the LM head quantized on their device.

    The head becomes `lm_head`, one of LM_HEAD_FORMS. Norms, biases and an embedding that is no head are those of
    `weights`. Raises as `quantize_matrix`, and `InvalidValueError` for a form that the head cannot have.
    """
    is_tied = weights.lm_head is weights.embedding
    check_head_form(lm_head, is_tied)
    return with_matrices(
        weights,
        lambda matrix: quantize_matrix(matrix, scheme),
        lambda matrix: matrix if lm_head == "float" else quantize_matrix(matrix, lm_head),
    )


def in_form(weights: LlamaWeights, form: Callable[[Weight], Weight]) -> LlamaWeights:
    """Return `weights` with every matrix in the form that `form` makes of it, of the same values.

    An embedding stays as it is, unless it is the head and single rows can be read from that in its new form.
    """
    made = with_matrices(weights, form)
    if made.lm_head is not made.embedding:
        return made
    head = form(made.lm_head)
    return replace(made, lm_head=head, embedding=head if isinstance(head, Int8LanesWeight) else made.embedding)


def with_matrices(
    weights: LlamaWeights, change: Callable[[Weight], Weight], change_head: Callable[[Weight], Weight] | None = None
) -> LlamaWeights:
    """Return `weights` with `change` applied to each matrix of the layers, and `change_head` to the LM head, which may
    be the embedding; None: `change` to an own head, and nothing to the embedding.
    """

    def layer(given: LayerWeights) -> LayerWeights:
        return replace(
            given,
            qkv=change(given.qkv),
            output=change(given.output),
            gate_up=change(given.gate_up),
            down=change(given.down),
        )

    layers = tuple(layer(given) for given in weights.layers)
    if weights.lm_head is not weights.embedding:
        return replace(weights, layers=layers, lm_head=(change_head or change)(weights.lm_head))
    table = weights.embedding if change_head is None else change_head(weights.embedding)
    assert isinstance(table, Tensor | Int8Weight), "single rows are read from floats and int8"
    return replace(weights, layers=layers, embedding=table, lm_head=table)
