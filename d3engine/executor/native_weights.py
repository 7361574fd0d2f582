"""An engine's model as the native library reads it: the same tensors, where they lie."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace

from torch import Tensor

from d3engine.executor.eager import EagerExecutor
from d3engine.kernels.blocks import BlockLanesWeight, BlockWeight
from d3engine.kernels.interleaved import LANES
from d3engine.kernels.matrices import Weight
from d3engine.kernels.native.model import Linear, NativeBridge, NativeBridges, NativeError, NativeLayer, NativeModel
from d3engine.kernels.quantized import Int8Weight
from d3engine.model.bridges import BridgeWeights
from d3engine.model.llama import Rope
from d3engine.model.weights import LayerWeights


def native_model(eager: EagerExecutor, head_tokens: Tensor | None = None) -> NativeModel:
    """The eager executor's model for the library, with an LM head of `head_tokens` alone or of all.

    Raises `NativeError` for one that is more than a Llama.
    """
    model, weights = eager.model, eager.model.weights
    rotations, unturned = _rotations(eager.rope), model.config.layers_without_rope
    return NativeModel(
        layers=tuple(
            _native_layer(layer, None if index in unturned else rotations[index], window)
            for index, (layer, window) in enumerate(zip(weights.layers, model.windows, strict=True))
        ),
        embedding=weights.embedding,
        final_norm=weights.final_norm,
        lm_head=weights.lm_head if head_tokens is None else _rows_of_head(weights.lm_head, head_tokens),
        pool=eager.pool,
        num_heads=model.config.num_heads,
        max_positions=eager.rope.generated_table.shape[0],
        eps=model.config.rms_norm_eps,
        scale=model.config.attention_scale,
        head_tokens=head_tokens,
        activation=model.config.activation,
        embedding_scale=model.config.embedding_scale,
        attention_cap=model.config.soft_caps.attention,
        logit_cap=model.config.soft_caps.logits,
    )


def _rotations(rope: Rope) -> list[Tensor]:
    """The contiguous table of each layer; layers of one rope share it."""
    made: dict[int, Tensor] = {}
    found = []
    for table in rope.of_layers(rope.generated_table):
        if table.data_ptr() not in made:
            made[table.data_ptr()] = table.contiguous()
        found.append(made[table.data_ptr()])
    return found


def _rows_of_head(head: Weight, tokens: Tensor) -> Weight:
    """The rows of an LM head, `HEAD_ROWS` neighbours at a time, copied in the head's own form."""
    if isinstance(head, Tensor):
        return head[tokens]
    if isinstance(head, BlockLanesWeight):
        return replace(head, cells=head.cells[tokens[::LANES] // LANES])
    if isinstance(head, BlockWeight | Int8Weight):
        return head.at(tokens)
    raise NativeError(f"no rows can be taken from an LM head of {type(head).__name__}")


_KNOWN = {
    *("attention_norm", "qkv", "qkv_bias", "head_norms", "output", "output_bias"),
    *("mlp_norm", "gate_up", "gate_up_bias", "down", "down_bias"),
    *("projection_norms", "attention_post_norm", "mlp_post_norm"),
}


def native_bridges(bridges: Iterable[BridgeWeights]) -> NativeBridges:
    """An engine's bridges for the library."""
    return NativeBridges(
        [
            NativeBridge(
                bridge.first,
                bridge.stop,
                Linear(bridge.weight, bridge.offset),
                None if bridge.down is None else Linear(bridge.down),
            )
            for bridge in bridges
        ]
    )


def _native_layer(layer: LayerWeights, rotations: Tensor | None, window: int) -> NativeLayer:
    others = {field.name for field in fields(layer) if getattr(layer, field.name) is not None} - _KNOWN
    if others:
        raise NativeError(f"the native library knows nothing of {', '.join(sorted(others))} in a layer")
    return NativeLayer(
        attention_norm=layer.attention_norm,
        qkv=Linear(layer.qkv, layer.qkv_bias),
        output=Linear(layer.output, layer.output_bias),
        mlp_norm=layer.mlp_norm,
        gate_up=Linear(layer.gate_up, layer.gate_up_bias),
        down=Linear(layer.down, layer.down_bias),
        rotations=rotations,
        head_norms=layer.head_norms,
        window=window,
        projection_norms=layer.projection_norms,
        attention_post_norm=layer.attention_post_norm,
        mlp_post_norm=layer.mlp_post_norm,
    )
