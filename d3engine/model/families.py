"""The architectures that are a Llama under another name: what each means by its config.json, and its tensors' names.

The one idea: a family is one entry of `FAMILIES`, read while loading. What it has of its own is a name, a default, a
number or a part of its layers there; a loaded model is a Llama, with or without that part, and no kernel knows of
families.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from d3engine.errors import ModelFormatError
from d3engine.model.fields import Fields


@dataclass(frozen=True)
class TensorNames:
    """What the files call the tensors; `qkv` and `gate_up` are one module for each part, or one that holds all rows."""

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
        """What the names of a layer's tensors begin with."""
        return f"{self.prefix}layers.{index}."


@dataclass(frozen=True)
class Biases:
    """Which products of a layer have a bias: query, key and value; the attention's output; all of the MLP."""

    qkv: bool = False
    output: bool = False
    mlp: bool = False


@dataclass(frozen=True)
class Multipliers:
    """Granite's four numbers: of the embedding, of query-key products (None: 1 / sqrt(head_dim)), of what a block adds
    to the residual stream, and what logits are divided by.

    A norm does not see the size of the residual stream, but for its epsilon. So with the stream divided by `residual`
    all through, blocks add what they add in a Llama; the embedding, epsilon and the final norm take up the rest, and no
    matrix of a layer has to be touched.
    """

    embedding: float = 1.0
    attention: float | None = None
    residual: float = 1.0
    logits: float = 1.0

    @property
    def on_embedding(self) -> float:
        """What the embedding is multiplied by as it is loaded."""
        return self.embedding / self.residual

    def on_final_norm(self, tied: bool) -> float:
        """What the final norm is multiplied by; with a tied head it takes back what the embedding got."""
        return 1.0 / self.logits / (self.on_embedding if tied else 1.0)

    def on_epsilon(self) -> float:
        """What the epsilon of all norms, which is added to a mean of squares, is multiplied by."""
        return self.residual**-2


@dataclass(frozen=True)
class GGUFForm:
    """How a GGUF file holds a family, whose architecture there is its model_type: what differs from Qwen2's.

    `adjacent_pairs`: rows of query and key heads are in llama.cpp's order (`head_order.py`). `modules` are names of a
    layer's tensors, and what transformers calls them. `keys` are those behind the architecture's name that only this
    family has, each of which must be there, and the fields of config.json that they become.
    """

    adjacent_pairs: bool = False
    modules: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)


def _llama_biases(fields: Fields) -> Biases:
    attention = fields.boolean("attention_bias")
    return Biases(qkv=attention, output=attention, mlp=fields.boolean("mlp_bias"))


def _seed_oss_biases(fields: Fields) -> Biases:
    return Biases(fields.boolean("attention_bias"), fields.boolean("attention_out_bias"), fields.boolean("mlp_bias"))


def _qwen3_biases(fields: Fields) -> Biases:
    attention = fields.boolean("attention_bias")
    return Biases(qkv=attention, output=attention)


def _internlm3_biases(fields: Fields) -> Biases:
    """Its own spelling, or the one that transformers 5 saves; unequal ones are not read by transformers either."""
    attention = "qkv_bias" if fields.get("qkv_bias") is not None else "attention_bias"
    others = "bias" if fields.get("bias") is not None else "mlp_bias"
    if fields.boolean(attention) != fields.boolean(others):
        fields.refuse(attention, f"the same as {others}={fields.boolean(others)}")
    return Biases(*[fields.boolean(attention)] * 3)


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


def _anything(fields: Fields) -> None:
    """For families whose fields are all checked by `ModelConfig` itself."""


def _is_tied(fields: Fields) -> None:
    if not fields.boolean("tie_word_embeddings"):
        fields.refuse("tie_word_embeddings", "true, since a LlamaModel has no LM head of its own")


def _uses_window(fields: Fields) -> bool:
    return fields.boolean("use_sliding_window") and fields.get("sliding_window") is not None


def _is_full_attention(fields: Fields) -> None:
    need_layer_types(fields, ("full_attention",))


def need_layer_types(fields: Fields, allowed: tuple[str, ...]) -> None:
    """Raise `ModelFormatError` unless `layer_types` is absent or names these kinds of attention alone."""
    kinds = fields.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(kind not in allowed for kind in kinds)):
        fields.refuse("layer_types", f"{' or '.join(map(repr, allowed))} for every layer, or absent")


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
    """One way to say "a Llama" in a config.json.

    `defaults` are those of the family's config class in transformers where they are not LlamaConfig's; `check` raises
    `ModelFormatError` for what only this family could ask for and the engine cannot do.
    """

    architectures: tuple[str, ...]
    model_type: str
    names: TensorNames = TensorNames()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    bos_token_id: int | None = 1
    eos_token_ids: tuple[int, ...] = (2,)
    default_theta: float = 10_000.0
    rope_types: tuple[str, ...] | None = None  # None: every type that the engine knows
    layers_without_rope: Callable[[Fields, int], tuple[int, ...]] = lambda fields, num_layers: ()
    has_window: Callable[[Fields], bool] = lambda fields: True  # reads sliding_window, where it is there
    biases: Callable[[Fields], Biases] = lambda fields: Biases()
    has_head_norms: bool = False
    multipliers: Callable[[Fields], Multipliers] = lambda fields: Multipliers()
    check: Callable[[Fields], None] = _anything
    gguf: GGUFForm | None = None  # None: llama.cpp writes the family as a "llama"


FAMILIES = (
    Family(
        ("LlamaForCausalLM", "LLaMAForCausalLM"),
        "llama",
        biases=_llama_biases,
        gguf=GGUFForm(adjacent_pairs=True),
    ),
    Family(("LlamaModel",), "llama", names=TensorNames(prefix=""), biases=_llama_biases, check=_is_tied),
    Family(
        ("MistralForCausalLM",),
        "mistral",
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096},
        check=_is_full_attention,
    ),
    Family(
        ("Qwen2ForCausalLM",),
        "qwen2",
        defaults={"num_key_value_heads": 32, "max_position_embeddings": 32_768, "sliding_window": 4096},
        bos_token_id=None,
        eos_token_ids=(),
        has_window=_uses_window,
        biases=lambda fields: Biases(qkv=True),
        gguf=GGUFForm(),
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
        biases=_seed_oss_biases,
        gguf=GGUFForm(modules={"post_attention_norm": "post_attention_layernorm"}),
    ),
    Family(
        ("GraniteForCausalLM",),
        "granite",
        biases=_llama_biases,
        multipliers=_granite_multipliers,
        gguf=GGUFForm(
            adjacent_pairs=True,
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
        rope_types=("default",),  # transformers reads "yarn" and "su" as longrope here
        gguf=GGUFForm(
            modules={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
            keys={"attention.sliding_window": "sliding_window"},
        ),
    ),
    Family(
        ("InternLM3ForCausalLM", "LlamaForCausalLM"),  # the second is what transformers 5 saves
        "internlm3",
        defaults={
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 32_768,
            "rms_norm_eps": 1e-5,
        },
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
        has_window=_uses_window,
        biases=_qwen3_biases,
        has_head_norms=True,
        gguf=GGUFForm(),
    ),
    Family(
        ("SmolLM3ForCausalLM",),
        "smollm3",
        defaults={"num_key_value_heads": 4, "max_position_embeddings": 32_768, "tie_word_embeddings": True},
        bos_token_id=128_000,
        eos_token_ids=(128_001,),
        default_theta=2_000_000.0,
        layers_without_rope=_smollm3_layers_without_rope,
        has_window=_uses_window,
        biases=_llama_biases,
        gguf=GGUFForm(adjacent_pairs=True),  # which layers have rope no file says: the family's default, as llama.cpp
    ),
)
"""In the order of preference where a config names only its architecture, or only its model_type."""

GGUF_FAMILIES = {family.model_type: (family, family.gguf) for family in FAMILIES if family.gguf is not None}
"""By the name of the architecture in a GGUF file."""


def family_of(fields: Fields) -> Family:
    """The family that a config's architectures and model_type name; raises `ModelFormatError` for any other."""
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
