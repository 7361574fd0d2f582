"""The families of models that run as a Llama: how config.json and a GGUF file name each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from d3engine.errors import ModelFormatError
from d3engine.model.fields import Fields

# After loading, every model is a Llama, with or without an optional part of a layer; no kernel knows families.


@dataclass(frozen=True)
class TensorNames:
    """Names of tensors in safetensors files; `qkv` and `gate_up` are a module for each matrix, or one for all."""

    prefix: str = "model."
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")

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
    """

    fields: Mapping[str, str] = field(default_factory=dict)
    parts: Mapping[str, str] = field(default_factory=dict)
    grouped_qkv: str | None = None


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
        pre_tokenizers: further values of `tokenizer.ggml.pre` -> the one in `gguf_metadata` with the same rules.
        has_rope_switch: whether llama.cpp takes a false `rope.scaling.finetuned` as no rope at all.
    """

    architecture: str
    adjacent_pairs: bool = False
    modules: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    pre_tokenizers: Mapping[str, str] = field(default_factory=dict)
    has_rope_switch: bool = False


def _biases(qkv: str, output: str, mlp: str | None = None) -> Callable[[Fields], Biases]:
    """Reads each bias from the field of that name; None: no bias."""
    return lambda fields: Biases(fields.boolean(qkv), fields.boolean(output), mlp is not None and fields.boolean(mlp))


_llama_biases = _biases("attention_bias", "attention_bias", "mlp_bias")


def _internlm3_biases(fields: Fields) -> Biases:
    """Its own spelling, or the one that transformers 5 saves; transformers too refuses unequal ones."""
    attention = "qkv_bias" if fields.get("qkv_bias") is not None else "attention_bias"
    others = "bias" if fields.get("bias") is not None else "mlp_bias"
    if fields.boolean(attention) != fields.boolean(others):
        fields.refuse(attention, f"the same as {others}={fields.boolean(others)}")
    return Biases(*[fields.boolean(attention)] * 3)


def _internlm2_biases(fields: Fields) -> Biases:
    """Its own spelling, or that of a config made of a GGUF file; none at all means that there are biases."""
    name = "bias" if fields.get("attention_bias") is None else "attention_bias"
    has_bias = fields.boolean(name, default=True)
    return Biases(qkv=has_bias, output=has_bias)


def _granite_multipliers(fields: Fields) -> Multipliers:
    return Multipliers(
        embedding=_multiplier(fields, "embedding_multiplier"),
        attention=_multiplier(fields, "attention_multiplier"),
        residual=_multiplier(fields, "residual_multiplier"),
        logits=_multiplier(fields, "logits_scaling"),
    )


def _multiplier(fields: Fields, name: str) -> float:
    # Squares and products of these must be numbers too: far beyond any real model, and still sane in float32.
    value = fields.number(name, default=1.0)
    if not 1e-6 <= value <= 1e6:
        fields.refuse(name, "a number from 1e-06 to 1,000,000")
    return value


def _is_tied(fields: Fields) -> None:
    if not fields.boolean("tie_word_embeddings"):
        fields.refuse("tie_word_embeddings", "true, since a LlamaModel has no LM head of its own")


Windows: TypeAlias = tuple[int | None, ...]


def sliding_window(fields: Fields) -> int | None:
    """The field of that name."""
    return None if fields.get("sliding_window") is None else fields.integer("sliding_window")


def no_windows(fields: Fields, num_layers: int) -> Windows:
    """None for each layer, whatever `layer_types` says of a window that no text is longer than."""
    _layer_types(fields, has_window=sliding_window(fields) is not None)
    return (None,) * num_layers


def _window_everywhere(fields: Fields, num_layers: int) -> Windows:
    """`sliding_window` in every layer, as transformers' class has it, which does not read `layer_types`."""
    _layer_types(fields, has_window=False)
    return (sliding_window(fields),) * num_layers


def _window_by_layer(fields: Fields, num_layers: int, *, first: int = 0) -> Windows:
    """`sliding_window` in the layers that `layer_types` names, or from layer `first` on."""
    window = sliding_window(fields)
    kinds = _layer_types(fields, has_window=window is not None)
    if kinds is None:
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if len(kinds) != num_layers:
        fields.refuse("layer_types", f"absent, or a list of num_hidden_layers={num_layers} kinds of attention")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _qwen_windows(fields: Fields, num_layers: int) -> Windows:
    first = fields.integer("max_window_layers", low=0, default=28)
    if fields.boolean("use_sliding_window"):
        return _window_by_layer(fields, num_layers, first=first)
    _layer_types(fields, has_window=False)
    return (None,) * num_layers


def _layer_types(fields: Fields, *, has_window: bool) -> list[Any] | None:
    """The kinds of attention, where they are given; raises `ModelFormatError` for others than full and sliding."""
    allowed = ("full_attention", "sliding_attention") if has_window else ("full_attention",)
    kinds = fields.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(kind not in allowed for kind in kinds)):
        fields.refuse("layer_types", f"{' or '.join(map(repr, allowed))} for every layer, or absent")
    return kinds


def _smollm3_layers_without_rope(fields: Fields, num_layers: int) -> tuple[int, ...]:
    flags = fields.get("no_rope_layers")
    if flags is None:
        interval = fields.integer("no_rope_layer_interval", default=4)
        return tuple(range(interval - 1, num_layers, interval))
    is_list = isinstance(flags, list) and all(type(flag) is int and flag in (0, 1) for flag in flags)
    if not is_list or len(flags) < num_layers:
        fields.refuse("no_rope_layers", f"null or a list of num_hidden_layers={num_layers} numbers, 0 or 1 (has rope)")
    return tuple(layer for layer in range(num_layers) if not flags[layer])


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
    layers_without_rope: Callable[[Fields, int], tuple[int, ...]] = lambda fields, num_layers: ()
    windows: Callable[[Fields, int], Windows] | None = None  # None: transformers' class reads no sliding_window
    biases: Callable[[Fields], Biases] = lambda fields: Biases()
    has_head_norms: bool = False
    multipliers: Callable[[Fields], Multipliers] = lambda fields: Multipliers()
    check: Callable[[Fields], None] = lambda fields: None
    gguf: GGUFLayout | None = None  # None: llama.cpp writes the family as a "llama"


FAMILIES = (
    Family(
        ("LlamaForCausalLM", "LLaMAForCausalLM"),
        "llama",
        biases=_llama_biases,
        gguf=GGUFLayout(
            "llama",
            adjacent_pairs=True,
            pre_tokenizers={
                **dict.fromkeys(("llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0"), "llama-bpe"),
                **dict.fromkeys(("mellum", "trillion"), "gpt-2"),
                **dict.fromkeys(("starcoder", "command-r", "minerva-7b"), "smollm"),
                "dbrx": "smaug-bpe",
            },
        ),
    ),
    Family(("LlamaModel",), "llama", names=TensorNames(prefix=""), biases=_llama_biases, check=_is_tied),
    Family(
        ("MistralForCausalLM",),
        "mistral",
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096},
        windows=_window_everywhere,
    ),
    Family(
        ("MinistralForCausalLM",),
        "ministral",
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096},
        windows=_window_by_layer,
    ),
    Family(
        ("Qwen2ForCausalLM",),
        "qwen2",
        defaults={"num_key_value_heads": 32, "max_position_embeddings": 32_768, "sliding_window": 4096},
        bos_token_id=None,
        eos_token_ids=(),
        windows=_qwen_windows,
        biases=lambda fields: Biases(qkv=True),
        gguf=GGUFLayout("qwen2", pre_tokenizers=dict.fromkeys(("deepseek-r1-qwen", "megrez"), "qwen2")),
    ),
    Family(
        ("SeedOssForCausalLM",),
        "seed_oss",
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 524_288,
            "attention_bias": True,
        },
        bos_token_id=0,
        biases=_biases("attention_bias", "attention_out_bias", "mlp_bias"),
        gguf=GGUFLayout("seed_oss", modules={"post_attention_norm": "post_attention_layernorm"}),
    ),
    Family(
        ("GraniteForCausalLM",),
        "granite",
        biases=_llama_biases,
        multipliers=_granite_multipliers,
        gguf=GGUFLayout(
            "granite",
            adjacent_pairs=True,
            has_rope_switch=True,
            pre_tokenizers={"refact": "smollm", "granite-docling": "gpt-2"},
            keys={
                "embedding_scale": "embedding_multiplier",
                "attention.scale": "attention_multiplier",
                "residual_scale": "residual_multiplier",
                "logit_scale": "logits_scaling",
            },
        ),
    ),
    Family(
        ("Phi3ForCausalLM",),
        "phi3",
        names=TensorNames(qkv=("qkv_proj",), gate_up=("gate_up_proj",)),
        defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        eos_token_ids=(32_000,),
        windows=_window_everywhere,
        rope_types=("default",),  # transformers reads "yarn" and "su" as longrope here
        gguf=GGUFLayout(
            "phi3",
            modules={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
            keys={"attention.sliding_window": "sliding_window"},
        ),
    ),
    Family(
        ("ExaoneForCausalLM", "LlamaForCausalLM"),  # the second is what transformers 5 saves
        "exaone",
        own_names=OwnNames(
            fields={
                "num_layers": "num_hidden_layers",
                "layer_norm_epsilon": "rms_norm_eps",
                "activation_function": "hidden_act",
            },
            parts={
                "transformer.wte.": "model.embed_tokens.",
                "transformer.h.": "model.layers.",
                "transformer.ln_f.": "model.norm.",
                ".attn.attention.out_proj.": ".self_attn.o_proj.",
                ".attn.attention.": ".self_attn.",
                ".ln_1.": ".input_layernorm.",
                ".ln_2.": ".post_attention_layernorm.",
                ".mlp.c_fc_0.": ".mlp.gate_proj.",
                ".mlp.c_fc_1.": ".mlp.up_proj.",
                ".mlp.c_proj.": ".mlp.down_proj.",
            },
        ),
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        eos_token_ids=(361,),
        default_theta=500_000.0,
        biases=_llama_biases,
        gguf=GGUFLayout("exaone", pre_tokenizers={"exaone": "smollm"}),
    ),
    Family(
        ("InternLM2ForCausalLM",),
        "internlm2",
        own_names=OwnNames(
            parts={
                "model.tok_embeddings.": "model.embed_tokens.",
                ".attention_norm.": ".input_layernorm.",
                ".ffn_norm.": ".post_attention_layernorm.",
                ".attention.wo.": ".self_attn.o_proj.",
                ".feed_forward.w1.": ".mlp.gate_proj.",
                ".feed_forward.w3.": ".mlp.up_proj.",
                ".feed_forward.w2.": ".mlp.down_proj.",
                "output.": "lm_head.",
            },
            grouped_qkv=".attention.wqkv.",
        ),
        biases=_internlm2_biases,
        gguf=GGUFLayout("internlm2", adjacent_pairs=True),
    ),
    Family(
        ("InternLM3ForCausalLM", "LlamaForCausalLM"),  # the second is what transformers 5 saves
        "internlm3",
        defaults={"num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 32_768, "rms_norm_eps": 1e-5},
        biases=_internlm3_biases,
    ),
    Family(
        ("Qwen3ForCausalLM",),
        "qwen3",
        defaults={
            "num_key_value_heads": 32,
            "head_dim": 128,
            "max_position_embeddings": 32_768,
            "sliding_window": 4096,
        },
        bos_token_id=None,
        eos_token_ids=(),
        windows=_qwen_windows,
        biases=_biases("attention_bias", "attention_bias"),
        has_head_norms=True,
        gguf=GGUFLayout("qwen3"),
    ),
    Family(
        ("SmolLM3ForCausalLM",),
        "smollm3",
        defaults={"num_key_value_heads": 4, "max_position_embeddings": 32_768, "tie_word_embeddings": True},
        bos_token_id=128_000,
        eos_token_ids=(128_001,),
        default_theta=2_000_000.0,
        layers_without_rope=_smollm3_layers_without_rope,
        windows=_qwen_windows,
        biases=_llama_biases,
        # No GGUF file says which layers have rope: they are the family's default, as in llama.cpp.
        gguf=GGUFLayout("smollm3", adjacent_pairs=True),
    ),
)
"""In the order of preference where a config names only its architecture, or only its model_type."""

GGUF_FAMILIES = {family.gguf.architecture: (family, family.gguf) for family in FAMILIES if family.gguf is not None}
"""`general.architecture` of a GGUF file -> family and layout."""


def family_of(fields: Fields) -> Family:
    """The family that architectures and model_type of a config name; raises `ModelFormatError` for others."""
    architectures, model_type = fields.get("architectures"), fields.get("model_type")
    if architectures is None and model_type is None:
        raise ModelFormatError(f"{fields.source}: architectures and model_type are both missing")
    if architectures is not None and not isinstance(architectures, list):
        fields.refuse("architectures", "a list with the name of one architecture, such as 'LlamaForCausalLM'")
    named = [family for family in FAMILIES if architectures is None or _names(family, architectures)]
    if not named:
        known = sorted({name for family in FAMILIES for name in family.architectures})
        fields.refuse("architectures", f"a list with one of {', '.join(known)}")
    found = [family for family in named if model_type in (None, family.model_type)]
    if not found:
        allowed = " or ".join(dict.fromkeys(repr(family.model_type) for family in named))
        fields.refuse("model_type", allowed if architectures is None else f"{allowed} beside these architectures")
    return found[0]


def _names(family: Family, architectures: list[Any]) -> bool:
    return any(name in architectures for name in family.architectures)
