"""The families of models that run as a Llama: how config.json and a GGUF file name each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from d3engine.errors import ModelFormatError
from d3engine.model.family import (
    Biases,
    Family,
    GGUFLayout,
    LayerNorms,
    Multipliers,
    OwnNames,
    SoftCaps,
    TensorNames,
    Windows,
)
from d3engine.model.fields import Fields

# After loading, every model is a Llama, with or without an optional part of a layer; no kernel knows families.


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


def _window_by_layer(fields: Fields, num_layers: int, *, slides: Callable[[int], bool] = lambda layer: True) -> Windows:
    """`sliding_window` in the layers that `layer_types` names; without it, in those that `slides` says."""
    window = sliding_window(fields)
    kinds = _layer_types(fields, has_window=window is not None)
    if kinds is None:
        return tuple(window if slides(layer) else None for layer in range(num_layers))
    if len(kinds) != num_layers:
        fields.refuse("layer_types", f"absent, or a list of num_hidden_layers={num_layers} kinds of attention")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _qwen_windows(fields: Fields, num_layers: int) -> Windows:
    first = fields.integer("max_window_layers", low=0, default=28)
    if fields.boolean("use_sliding_window"):
        return _window_by_layer(fields, num_layers, slides=lambda layer: layer >= first)
    _layer_types(fields, has_window=False)
    return (None,) * num_layers


def _window_but_every(count: int, name: str | None = None) -> Callable[[Fields, int], Windows]:
    """A window in all layers but every `count`-th, or as many as the field `name` says."""

    def windows(fields: Fields, num_layers: int) -> Windows:
        period = count if name is None else fields.integer(name, default=count)
        fields.integer("sliding_window")  # layers of that kind have other rotations even where no text is longer
        return _window_by_layer(fields, num_layers, slides=lambda layer: (layer + 1) % period != 0)

    return windows


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


def _gemma_scale(fields: Fields) -> Multipliers:
    return Multipliers(attention=fields.number("query_pre_attn_scalar", default=256) ** -0.5)


def _soft_caps(fields: Fields) -> SoftCaps:
    return SoftCaps(
        attention=fields.optional_number("attn_logit_softcapping"),
        logits=fields.optional_number("final_logit_softcapping"),
    )


def _no_cap_of_scores(fields: Fields) -> None:
    if fields.get("attn_logit_softcapping") is not None:
        fields.refuse("attn_logit_softcapping", "absent, since transformers does not apply it in Gemma 3")


def _olmo3_local_theta(fields: Fields) -> float:
    """transformers gives `rope_theta` to layers without a window alone; llama.cpp gives it to all."""
    if fields.optional_number("rope_theta") not in (None, 500_000.0):
        fields.refuse("rope_theta", "500000, or in rope_parameters for both kinds of layers")
    return 500_000.0


def _gguf_kinds(fields: Fields, config: Mapping[str, Any]) -> dict[str, Any]:
    """Which layers have a window, where a file says it: a flag for each, or the period of those without one."""
    name, num_layers = "attention.sliding_window_pattern", config["num_hidden_layers"]
    given = fields.get(name)
    if given is None:
        return {}
    if isinstance(given, list):
        if len(given) != num_layers or any(type(flag) is not bool for flag in given):
            fields.refuse(name, f"a list with a flag for each of {num_layers} layers, or a number")
        slides = given
    else:
        period = fields.integer(name)
        slides = [(layer + 1) % period != 0 for layer in range(num_layers)]
    return {"layer_types": ["sliding_attention" if flag else "full_attention" for flag in slides]}


def _gguf_query_scalar(num_layers: int) -> Callable[[Fields, Mapping[str, Any]], dict[str, Any]]:
    """No GGUF file has it: llama.cpp knows the 27B model, whose heads are not that long, by its number of layers."""

    def query_scalar(fields: Fields, config: Mapping[str, Any]) -> dict[str, Any]:
        of_model = config["hidden_size"] // config["num_attention_heads"]
        return {"query_pre_attn_scalar": of_model if config["num_hidden_layers"] == num_layers else config["head_dim"]}

    return query_scalar


def _gguf_gemma3(fields: Fields, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_gguf_query_scalar(62)(fields, config),
        **_gguf_kinds(fields, config),
        "rope_local_base_freq": fields.number("rope.freq_base_swa", default=10_000.0),
        "final_logit_softcapping": fields.number("final_logit_softcapping", default=0, zero_allowed=True) or None,
    }


def _gguf_olmo(fields: Fields, config: Mapping[str, Any]) -> dict[str, Any]:
    """An OLMo 3 is an "olmo2" with a window, and its layers with one have plain rope."""
    scaling = config["rope_scaling"] or {}
    default = 0.1 * math.log(scaling["factor"]) + 1 if scaling.get("rope_type") == "yarn" else 1.0
    given = fields.number("rope.scaling.attn_factor", default=1.0)
    if not any(math.isclose(given, allowed, rel_tol=1e-5) for allowed in (1.0, default)):
        fields.refuse("rope.scaling.attn_factor", f"absent, 1, or {default:g} as yarn has it for its factor")
    window = fields.integer("attention.sliding_window", low=0, default=0)
    if not window:
        return {}
    plain = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    ropes = {"sliding_attention": plain, "full_attention": plain | scaling}
    return {
        **_gguf_kinds(fields, config),
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "sliding_window": window,
        "rope_parameters": ropes,
        "rope_scaling": None,
    }


_OLMO_NAMES = TensorNames(
    norms=LayerNorms(
        attention=None,
        attention_post="post_attention_layernorm",
        mlp=None,
        mlp_post="post_feedforward_layernorm",
    )
)
_GEMMA_NORMS = LayerNorms(
    attention_post="post_attention_layernorm",
    mlp="pre_feedforward_layernorm",
    mlp_post="post_feedforward_layernorm",
)
_GGUF_NORMS_BEHIND = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GGUF_WINDOW_KEYS = ("attention.sliding_window", "attention.sliding_window_pattern")
_GEMMA: dict[str, Any] = {"head_dim": 256, "tie_word_embeddings": True}

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
    Family(
        ("Olmo2ForCausalLM",),
        "olmo2",
        names=_OLMO_NAMES,
        defaults={"rms_norm_eps": 1e-5},
        bos_token_id=None,
        eos_token_ids=(50_279,),
        biases=_biases("attention_bias", "attention_bias"),
        has_projection_norms=True,
        gguf=GGUFLayout(
            "olmo2",
            modules=_GGUF_NORMS_BEHIND,
            optional_keys=(*_GGUF_WINDOW_KEYS, "rope.scaling.attn_factor"),
            more_fields=_gguf_olmo,
            pre_tokenizers={"olmo": "gpt-2"},
        ),
    ),
    Family(
        ("Olmo3ForCausalLM",),
        "olmo3",
        names=_OLMO_NAMES,
        defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096},
        bos_token_id=None,
        eos_token_ids=(50_279,),
        default_theta=500_000.0,
        rope_types=("default", "linear", "llama3", "yarn"),
        local_theta=_olmo3_local_theta,
        windows=_window_but_every(4),
        biases=_biases("attention_bias", "attention_bias"),
        has_projection_norms=True,
    ),
    Family(
        ("GemmaForCausalLM",),
        "gemma",
        defaults=_GEMMA | {"num_key_value_heads": 16, "max_position_embeddings": 8192},
        bos_token_id=2,
        eos_token_ids=(1,),
        biases=_biases("attention_bias", "attention_bias"),
        norm_offset=1.0,
        activation="gelu_tanh",
        activation_names=("gelu_pytorch_tanh", "gelu"),  # the second in Google's own configs, and meant as the first
        scales_embedding=True,
        gguf=GGUFLayout("gemma", ends=("<end_of_turn>",)),
    ),
    Family(
        ("Gemma2ForCausalLM",),
        "gemma2",
        names=TensorNames(norms=_GEMMA_NORMS),
        defaults=_GEMMA
        | {"num_key_value_heads": 4, "max_position_embeddings": 8192, "sliding_window": 4096}
        | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        bos_token_id=2,
        eos_token_ids=(1,),
        windows=_window_but_every(2),
        biases=_biases("attention_bias", "attention_bias"),
        norm_offset=1.0,
        activation="gelu_tanh",
        activation_names=("gelu_pytorch_tanh",),
        scales_embedding=True,
        soft_caps=_soft_caps,
        multipliers=_gemma_scale,
        gguf=GGUFLayout(
            "gemma2",
            modules=_GGUF_NORMS_BEHIND | {"ffn_norm": "pre_feedforward_layernorm"},
            keys={
                "attention.sliding_window": "sliding_window",
                "attn_logit_softcapping": "attn_logit_softcapping",
                "final_logit_softcapping": "final_logit_softcapping",
            },
            more_fields=_gguf_query_scalar(46),
            ends=("<end_of_turn>",),
        ),
    ),
    Family(
        ("Gemma3ForCausalLM",),
        "gemma3_text",
        names=TensorNames(norms=_GEMMA_NORMS),
        defaults=_GEMMA | {"num_key_value_heads": 4, "max_position_embeddings": 131_072, "sliding_window": 4096},
        bos_token_id=2,
        eos_token_ids=(1,),
        default_theta=1_000_000.0,
        rope_types=("default", "linear", "llama3", "yarn"),
        local_theta=lambda fields: fields.optional_number("rope_local_base_freq") or 10_000.0,
        windows=_window_but_every(6, "sliding_window_pattern"),
        biases=_biases("attention_bias", "attention_bias"),
        has_head_norms=True,
        norm_offset=1.0,
        activation="gelu_tanh",
        activation_names=("gelu_pytorch_tanh",),
        scales_embedding=True,
        # transformers does not apply the cap of scores here, so that one must be absent.
        soft_caps=lambda fields: SoftCaps(logits=fields.optional_number("final_logit_softcapping")),
        multipliers=_gemma_scale,
        check=_no_cap_of_scores,
        gguf=GGUFLayout(
            "gemma3",
            modules=_GGUF_NORMS_BEHIND | {"ffn_norm": "pre_feedforward_layernorm"},
            keys={"attention.sliding_window": "sliding_window"},
            optional_keys=(*_GGUF_WINDOW_KEYS, "rope.freq_base_swa", "final_logit_softcapping"),
            more_fields=_gguf_gemma3,
            ends=("<end_of_turn>",),
        ),
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
