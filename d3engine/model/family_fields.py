"""How families of models read the fields of config.json and of a GGUF file."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from d3engine.model.family import Biases, Multipliers, SoftCaps, Windows
from d3engine.model.fields import Fields


def biases(qkv: str, output: str | None = None, mlp: str | None = None) -> Callable[[Fields], Biases]:
    """Reads each bias from the field of that name; None: no bias."""
    return lambda fields: Biases(*(name is not None and fields.boolean(name) for name in (qkv, output, mlp)))


llama_biases = biases("attention_bias", "attention_bias", "mlp_bias")
attention_biases = biases("attention_bias", "attention_bias")


def internlm3_biases(fields: Fields) -> Biases:
    """Its own spelling, or the one that transformers 5 saves; transformers too refuses unequal ones."""
    attention = "qkv_bias" if fields.get("qkv_bias") is not None else "attention_bias"
    others = "bias" if fields.get("bias") is not None else "mlp_bias"
    if fields.boolean(attention) != fields.boolean(others):
        fields.refuse(attention, f"the same as {others}={fields.boolean(others)}")
    return Biases(*[fields.boolean(attention)] * 3)


def internlm2_biases(fields: Fields) -> Biases:
    """Its own spelling, or that of a config made of a GGUF file; none at all means that there are biases."""
    name = "bias" if fields.get("attention_bias") is None else "attention_bias"
    has_bias = fields.boolean(name, default=True)
    return Biases(qkv=has_bias, output=has_bias)


def granite_multipliers(fields: Fields) -> Multipliers:
    return Multipliers(
        embedding=_multiplier(fields, "embedding_multiplier"),
        attention=_multiplier(fields, "attention_multiplier"),
        residual=_multiplier(fields, "residual_multiplier"),
        logits=_multiplier(fields, "logits_scaling"),
    )


def minicpm_multipliers(fields: Fields) -> Multipliers:
    """Those of muP: a block counts by the root of the depth, and logits by the width over that of a small model."""
    return Multipliers(
        embedding=_multiplier(fields, "scale_emb"),
        residual=_multiplier(fields, "scale_depth") / math.sqrt(fields.integer("num_hidden_layers")),
        logits=fields.integer("hidden_size") / _multiplier(fields, "dim_model_base"),
    )


def dense_minicpm(fields: Fields) -> None:
    """Refuse experts (MiniCPM-MoE), and the sparse attention that MiniCPM4 has where its config asks for it."""
    if fields.integer("num_experts", low=0, default=0):
        fields.refuse("num_experts", "0 or absent: experts are not supported")
    if fields.get("sparse_config") is not None:
        fields.refuse("sparse_config", "null or absent: attention is dense here")


def _multiplier(fields: Fields, name: str) -> float:
    # Squares and products of these must be numbers too: far beyond any real model, and still sane in float32.
    value = fields.number(name, default=1.0)
    if not 1e-6 <= value <= 1e6:
        fields.refuse(name, "a number from 1e-06 to 1,000,000")
    return value


def is_tied(fields: Fields) -> None:
    if not fields.boolean("tie_word_embeddings"):
        fields.refuse("tie_word_embeddings", "true, since a LlamaModel has no LM head of its own")


def sliding_window(fields: Fields) -> int | None:
    """The field of that name."""
    return fields.optional_integer("sliding_window")


def no_windows(fields: Fields, num_layers: int) -> Windows:
    """None for each layer, whatever `layer_types` says of a window that no text is longer than."""
    _layer_types(fields, has_window=sliding_window(fields) is not None)
    return (None,) * num_layers


def window_everywhere(fields: Fields, num_layers: int) -> Windows:
    """`sliding_window` in every layer, as transformers' class has it, which does not read `layer_types`."""
    _layer_types(fields, has_window=False)
    return (sliding_window(fields),) * num_layers


def window_by_layer(fields: Fields, num_layers: int, *, slides: Callable[[int], bool] = lambda layer: True) -> Windows:
    """`sliding_window` in the layers that `layer_types` names; without it, in those that `slides` says."""
    window = sliding_window(fields)
    kinds = _layer_types(fields, has_window=window is not None)
    if kinds is None:
        return tuple(window if slides(layer) else None for layer in range(num_layers))
    if len(kinds) != num_layers:
        fields.refuse("layer_types", f"absent, or a list of num_hidden_layers={num_layers} kinds of attention")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def qwen_windows(fields: Fields, num_layers: int) -> Windows:
    first = fields.integer("max_window_layers", low=0, default=28)
    if fields.boolean("use_sliding_window"):
        return window_by_layer(fields, num_layers, slides=lambda layer: layer >= first)
    _layer_types(fields, has_window=False)
    return (None,) * num_layers


def window_but_every(count: int, name: str | None = None) -> Callable[[Fields, int], Windows]:
    """A window in all layers but every `count`-th, or as many as the field `name` says."""

    def windows(fields: Fields, num_layers: int) -> Windows:
        period = count if name is None else fields.integer(name, default=count)
        fields.integer("sliding_window")  # layers of that kind have other rotations even where no text is longer
        return window_by_layer(fields, num_layers, slides=lambda layer: (layer + 1) % period != 0)

    return windows


def exaone4_windows(fields: Fields, num_layers: int) -> Windows:
    """Where `layer_types` names the layers, `sliding_window_pattern` has no effect, and may be a text ("LLLG")."""
    window = sliding_window(fields)
    has_kinds = window is None or fields.get("layer_types") is not None
    period = 1 if has_kinds else fields.integer("sliding_window_pattern", default=4)
    return window_by_layer(fields, num_layers, slides=lambda layer: (layer + 1) % period != 0)


def exaone4_layers_without_rope(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """The layers without a window, where there is one at all."""
    if sliding_window(fields) is None:
        return ()
    windows = exaone4_windows(fields, num_layers)
    return tuple(layer for layer, window in enumerate(windows) if window is None)


def layers_of_no_rope(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """All layers unless `position_embedding_type` is "rope"."""
    return () if fields.get("position_embedding_type") == "rope" else tuple(range(num_layers))


def dense_granite(fields: Fields) -> None:
    """Refuse mamba layers and experts, which absent fields stand for; the size of the one MLP must be named."""
    kinds, num_layers = fields.get("layer_types"), fields.integer("num_hidden_layers")
    if not isinstance(kinds, list) or len(kinds) != num_layers or not {*map(str, kinds)} <= _FULL_ATTENTION:
        fields.refuse("layer_types", f"'attention' for each of {num_layers} layers: mamba layers are not supported")
    if fields.integer("num_local_experts", low=0, default=8):
        fields.refuse("num_local_experts", "0: experts are not supported")
    fields.integer("shared_intermediate_size")
    kind = fields.get("position_embedding_type")
    if kind not in (None, "rope", "nope"):
        fields.refuse("position_embedding_type", "'rope', 'nope' or absent")


_FULL_ATTENTION = {"full_attention", "attention"}
"""The second is transformers' older name."""


def _layer_types(fields: Fields, *, has_window: bool) -> list[Any] | None:
    """The kinds of attention, where they are given; raises `ModelFormatError` for others than full and sliding."""
    allowed = ("full_attention", "sliding_attention") if has_window else ("full_attention",)
    kinds = fields.get("layer_types")
    known = _FULL_ATTENTION | {*allowed}
    if kinds is not None and (not isinstance(kinds, list) or any(str(kind) not in known for kind in kinds)):
        fields.refuse("layer_types", f"{' or '.join(map(repr, allowed))} for every layer, or absent")
    return kinds


def smollm3_layers_without_rope(fields: Fields, num_layers: int) -> tuple[int, ...]:
    flags = fields.get("no_rope_layers")
    if flags is None:
        interval = fields.integer("no_rope_layer_interval", default=4)
        return tuple(range(interval - 1, num_layers, interval))
    is_list = isinstance(flags, list) and all(type(flag) is int and flag in (0, 1) for flag in flags)
    if not is_list or len(flags) < num_layers:
        fields.refuse("no_rope_layers", f"null or a list of num_hidden_layers={num_layers} numbers, 0 or 1 (has rope)")
    return tuple(layer for layer in range(num_layers) if not flags[layer])


def gemma_scale(fields: Fields) -> Multipliers:
    return Multipliers(attention=fields.number("query_pre_attn_scalar", default=256) ** -0.5)


def soft_caps(fields: Fields) -> SoftCaps:
    return SoftCaps(
        attention=fields.optional_number("attn_logit_softcapping"),
        logits=fields.optional_number("final_logit_softcapping"),
    )


def no_cap_of_scores(fields: Fields) -> None:
    if fields.get("attn_logit_softcapping") is not None:
        fields.refuse("attn_logit_softcapping", "absent, since transformers does not apply it in Gemma 3")


def olmo3_local_theta(fields: Fields) -> float:
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


def gguf_query_scalar(num_layers: int) -> Callable[[Fields, Mapping[str, Any]], dict[str, Any]]:
    """No GGUF file has it: llama.cpp knows the 27B model, whose heads are not that long, by its number of layers."""

    def query_scalar(fields: Fields, config: Mapping[str, Any]) -> dict[str, Any]:
        of_model = config["hidden_size"] // config["num_attention_heads"]
        return {"query_pre_attn_scalar": of_model if config["num_hidden_layers"] == num_layers else config["head_dim"]}

    return query_scalar


def gguf_gemma3(fields: Fields, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **gguf_query_scalar(62)(fields, config),
        **_gguf_kinds(fields, config),
        "rope_local_base_freq": fields.number("rope.freq_base_swa", default=10_000.0),
        "final_logit_softcapping": fields.number("final_logit_softcapping", default=0, zero_allowed=True) or None,
    }


def gguf_minicpm(fields: Fields, config: Mapping[str, Any]) -> dict[str, Any]:
    """Files of 2024 have no multipliers: llama.cpp had those of the models of that time, of 1B and 2B."""
    depth, width = math.sqrt(config["num_hidden_layers"]), config["hidden_size"]
    return {
        "scale_emb": fields.number("embedding_scale", default=12.0),
        "scale_depth": fields.number("residual_scale", default=1.4 / depth) * depth,
        "dim_model_base": width / fields.number("logit_scale", default=width / 256),
    }


def gguf_ministral3(fields: Fields, config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that llama.cpp reads of this architecture alone; without YaRN they have no effect within the context."""
    rope = {"rope_type": "default", **(config["rope_scaling"] or {}), "rope_theta": config["rope_theta"]}
    if rope["rope_type"] == "yarn":
        rope |= {
            "beta_fast": fields.number("rope.scaling.yarn_beta_fast", default=32.0),
            "beta_slow": fields.number("rope.scaling.yarn_beta_slow", default=1.0),
            "mscale": 1.0,
            "mscale_all_dim": fields.number("rope.scaling.yarn_log_multiplier", default=0, zero_allowed=True),
            "llama_4_scaling_beta": fields.number("attention.temperature_scale", default=0, zero_allowed=True),
        }
    return {"rope_parameters": rope, "rope_scaling": None}


def gguf_ernie(fields: Fields, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"use_bias": config["attention_bias"]}


def gguf_exaone4(fields: Fields, config: Mapping[str, Any]) -> dict[str, Any]:
    window = fields.integer("attention.sliding_window", low=0, default=0)
    if not window:
        return {"sliding_window": None, "layer_types": ["full_attention"] * config["num_hidden_layers"]}
    return {"sliding_window": window, **_gguf_kinds(fields, config)}


def gguf_granite(fields: Fields, config: Mapping[str, Any]) -> dict[str, Any]:
    """A dense Granite 4 is a Granite; its file keeps keys of the mamba layers and experts that it has none of."""
    name, inner = "expert_shared_feed_forward_length", config["intermediate_size"]
    if fields.integer(name, low=0, default=0) not in (0, inner):
        fields.refuse(name, f"absent, or feed_forward_length={inner}")
    return {}


def gguf_olmo(fields: Fields, config: Mapping[str, Any]) -> dict[str, Any]:
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
