"""What a family of models may say of its files, all of which is a Llama's where it says nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from d3engine.model.fields import Fields


@dataclass(frozen=True)
class LayerNorms:
    """Names of a layer's norms of hidden states: before a sublayer, and of its output; None: there is none."""

    attention: str | None = "input_layernorm"
    attention_post: str | None = None
    mlp: str | None = "post_attention_layernorm"
    mlp_post: str | None = None

    @property
    def all(self) -> tuple[str, ...]:
        """Those that there are."""
        return tuple(name for name in (self.attention, self.attention_post, self.mlp, self.mlp_post) if name)


@dataclass(frozen=True)
class TensorNames:
    """Names of tensors in safetensors files; `qkv` and `gate_up` are a module for each matrix, or one for all.

    `qkv` are modules of a layer's attention, `gate_up` and `down` of the layer.
    """

    prefix: str = "model."
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    norms: LayerNorms = LayerNorms()

    @property
    def embedding(self) -> str:
        return f"{self.prefix}embed_tokens.weight"

    @property
    def final_norm(self) -> str:
        return f"{self.prefix}norm.weight"

    def layer(self, index: int) -> str:
        """The prefix of a layer's tensor names."""
        return f"{self.prefix}layers.{index}."


@dataclass(frozen=True)
class OwnNames:
    """A family whose files name everything otherwise; also read are those by `TensorNames`, which our tools write.

    Attributes:
        fields: names of fields of config.json -> a Llama's.
        parts: parts of tensor names -> `TensorNames`', put in their place one after the other.
        grouped_qkv: the part of names of a fused matrix that holds the heads of a KV group together: its queries', its
            key's and its value's. It is read as three matrices.
        dropped: beginnings of names that a text model does not read.
    """

    fields: Mapping[str, str] = field(default_factory=dict)
    parts: Mapping[str, str] = field(default_factory=dict)
    grouped_qkv: str | None = None
    dropped: tuple[str, ...] = ()


@dataclass(frozen=True)
class Biases:
    """Which matrices of a layer have a bias: query, key and value; the attention's output; all of the MLP."""

    qkv: bool = False
    output: bool = False
    mlp: bool = False


@dataclass(frozen=True)
class Multipliers:
    """Granite's factors of the embedding, of query-key products, of a block's output, and its divisor of logits.

    `attention` None: 1 / sqrt(head_dim).
    """

    # A norm is blind to the scale of the residual stream, but for its epsilon. So the stream is held divided by
    # `residual`: blocks then add what they add in a Llama, and only the embedding, epsilon and the final norm change.

    embedding: float = 1.0
    attention: float | None = None
    residual: float = 1.0
    logits: float = 1.0

    @property
    def on_embedding(self) -> float:
        """The factor of the embedding when it is loaded."""
        return self.embedding / self.residual

    def on_final_norm(self, tied: bool) -> float:
        """The factor of the final norm; with a tied head it cancels that of the embedding."""
        return 1.0 / self.logits / (self.on_embedding if tied else 1.0)

    def on_epsilon(self) -> float:
        """The factor of all norms' epsilon, which is added to a mean of squares."""
        return self.residual**-2


@dataclass(frozen=True)
class SoftCaps:
    """Caps of attention scores and of logits, each value x of which becomes cap * tanh(x / cap); None: no cap."""

    attention: float | None = None
    logits: float | None = None


NO_CAPS = SoftCaps()

GGUF_LAYER_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Modules of a layer in GGUF files, and transformers' names of them, for families that name no others."""


@dataclass(frozen=True)
class GGUFLayout:
    """How GGUF files hold a family.

    Attributes:
        architecture: `general.architecture`, and the prefix of the family's keys.
        adjacent_pairs: whether rows of query and key heads are in llama.cpp's order (`to_adjacent_pairs`).
        modules: module of a layer -> transformers' name, where it is not that of `GGUF_LAYER_MODULES`.
        keys: keys that only this family has, all required -> fields of config.json.
        optional_keys: further keys that `more_fields` reads.
        more_fields: fields of config.json that follow from the file's keys and the fields found so far.
        pre_tokenizers: further values of `tokenizer.ggml.pre` -> the one in `gguf_metadata` with the same rules.
        has_rope_switch: whether llama.cpp takes a false `rope.scaling.finetuned` as no rope at all.
    """

    architecture: str
    adjacent_pairs: bool = False
    modules: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    optional_keys: tuple[str, ...] = ()
    more_fields: Callable[[Fields, Mapping[str, Any]], Mapping[str, Any]] = lambda fields, config: {}
    pre_tokenizers: Mapping[str, str] = field(default_factory=dict)
    has_rope_switch: bool = False


Windows: TypeAlias = tuple[int | None, ...]


@dataclass(frozen=True)
class Family:
    """One family: all that its files name otherwise than a Llama's.

    `defaults` are those of the family's config class in transformers where they are not LlamaConfig's; `check` raises
    `ModelFormatError` for an option of this family alone that the engine cannot honour.
    """

    architectures: tuple[str, ...]
    model_type: str
    names: TensorNames = TensorNames()
    own_names: OwnNames = OwnNames()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    bos_token_id: int | None = 1
    eos_token_ids: tuple[int, ...] = (2,)
    default_theta: float = 10_000.0
    rope_types: tuple[str, ...] | None = None  # None: every type that the engine knows
    has_interleaved_rope: bool = False  # whether rope pairs channels 2j and 2j + 1, not j and j + D / 2
    partial_rotary_factor: float | None = None  # where it is absent; None: transformers' class reads no such field
    layers_without_rope: Callable[[Fields, int], tuple[int, ...]] = lambda fields, num_layers: ()
    windows: Callable[[Fields, int], Windows] | None = None  # None: transformers' class reads no sliding_window
    biases: Callable[[Fields], Biases] = lambda fields: Biases()
    has_head_norms: bool = False
    has_projection_norms: bool = False  # of all queries of a token together, and of all its keys, in their place
    norm_offset: float = 0.0  # what a norm multiplies by, less its weight in safetensors files; a GGUF file has the sum
    activation: str = "silu"  # of the gates, as kernels name it
    activation_names: tuple[str, ...] = ("silu",)  # that `hidden_act` and `hidden_activation` may have for it
    scales_embedding: bool = False  # by the square root of the hidden size
    soft_caps: Callable[[Fields], SoftCaps] | None = None  # None: the fields must be absent
    local_theta: Callable[[Fields], float] | None = None  # of a rope for layers with a window; None: that of others
    multipliers: Callable[[Fields], Multipliers] = lambda fields: Multipliers()
    check: Callable[[Fields], None] = lambda fields: None
    gguf: GGUFLayout | None = None  # None: llama.cpp writes the family as a "llama"
