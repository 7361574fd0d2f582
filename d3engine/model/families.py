"""The families of models that run as a Llama: how config.json and a GGUF file name each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from d3engine.errors import ModelFormatError
from d3engine.model import family_fields
from d3engine.model.family import Biases, Family, GGUFLayout, LayerNorms, OwnNames, SoftCaps, TensorNames
from d3engine.model.fields import Fields

# After loading, every model is a Llama, with or without an optional part of a layer; no kernel knows families.

_NORMS_BEHIND_ALONE = TensorNames(
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
_GRANITE_4_KEYS = (
    "expert_shared_feed_forward_length",
    *(f"ssm.{name}" for name in ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank")),
)
_GGUF_WINDOW_KEYS = ("attention.sliding_window", "attention.sliding_window_pattern")
_MISTRAL = {"num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096}
_MINISTRAL_3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_QWEN: dict[str, Any] = {"bos_token_id": None, "eos_token_ids": (), "windows": family_fields.qwen_windows}
_OLMO: dict[str, Any] = {
    "names": _NORMS_BEHIND_ALONE,
    "bos_token_id": None,
    "eos_token_ids": (50_279,),
    "biases": family_fields.attention_biases,
    "has_projection_norms": True,
}
_GLM: dict[str, Any] = {
    "defaults": {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1.5625e-7,
        "attention_bias": True,
    },
    "bos_token_id": None,
    "eos_token_ids": (151_329, 151_336, 151_338),
    "has_interleaved_rope": True,
    "partial_rotary_factor": 0.5,
    "biases": family_fields.biases("attention_bias"),
}
_GEMMA: dict[str, Any] = {
    "bos_token_id": 2,
    "eos_token_ids": (1,),
    "biases": family_fields.attention_biases,
    "norm_offset": 1.0,
    "activation": "gelu_tanh",
    "activation_names": ("gelu_pytorch_tanh",),
    "scales_embedding": True,
}
_GEMMA_DEFAULTS: dict[str, Any] = {"head_dim": 256, "tie_word_embeddings": True}

FAMILIES = (
    Family(
        ("LlamaForCausalLM", "LLaMAForCausalLM"),
        "llama",
        biases=family_fields.llama_biases,
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
    Family(
        ("LlamaModel",),
        "llama",
        names=TensorNames(prefix=""),
        biases=family_fields.llama_biases,
        check=family_fields.is_tied,
    ),
    Family(
        ("MistralForCausalLM", "MistralModel"), "mistral", defaults=_MISTRAL, windows=family_fields.window_everywhere
    ),
    Family(("MinistralForCausalLM",), "ministral", defaults=_MISTRAL, windows=family_fields.window_by_layer),
    Family(
        ("Ministral3ForCausalLM",),
        "ministral3",
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 262_144,
            "rms_norm_eps": 1e-5,
            "rope_parameters": _MINISTRAL_3_ROPE,
        },
        windows=family_fields.window_everywhere,
        gguf=GGUFLayout(
            "mistral3",
            adjacent_pairs=True,
            optional_keys=(
                "attention.temperature_scale",
                *(f"rope.scaling.yarn_{name}" for name in ("log_multiplier", "beta_fast", "beta_slow")),
            ),
            more_fields=family_fields.gguf_ministral3,
        ),
    ),
    Family(
        ("Qwen2ForCausalLM", "Qwen2Model"),
        "qwen2",
        **_QWEN,
        defaults={"num_key_value_heads": 32, "max_position_embeddings": 32_768, "sliding_window": 4096},
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
        biases=family_fields.biases("attention_bias", "attention_out_bias", "mlp_bias"),
        gguf=GGUFLayout("seed_oss", modules={"post_attention_norm": "post_attention_layernorm"}),
    ),
    Family(
        ("GraniteForCausalLM",),
        "granite",
        biases=family_fields.llama_biases,
        multipliers=family_fields.granite_multipliers,
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
            optional_keys=_GRANITE_4_KEYS,
            more_fields=family_fields.gguf_granite,
        ),
    ),
    Family(
        ("Phi3ForCausalLM",),
        "phi3",
        names=TensorNames(qkv=("qkv_proj",), gate_up=("mlp.gate_up_proj",)),
        defaults={
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
        },
        eos_token_ids=(32_000,),
        windows=family_fields.window_everywhere,
        rope_types=("default", "longrope"),  # transformers reads "yarn" as longrope here
        partial_rotary_factor=1.0,
        gguf=GGUFLayout(
            "phi3",
            modules={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
            keys={"attention.sliding_window": "sliding_window"},
        ),
    ),
    Family(
        ("GraniteMoeHybridForCausalLM",),
        "granitemoehybrid",
        names=TensorNames(gate_up=("shared_mlp.input_linear",), down="shared_mlp.output_linear"),
        own_names=OwnNames(
            fields={"shared_intermediate_size": "intermediate_size", "layers_block_type": "layer_types"}
        ),
        layers_without_rope=family_fields.layers_of_no_rope,
        biases=family_fields.attention_biases,
        multipliers=family_fields.granite_multipliers,
        check=family_fields.dense_granite,
    ),
    Family(
        ("MiniCPMForCausalLM",),
        "minicpm",
        defaults={"tie_word_embeddings": True},
        biases=family_fields.attention_biases,
        multipliers=family_fields.minicpm_multipliers,
        check=family_fields.dense_minicpm,
        gguf=GGUFLayout(
            "minicpm",
            adjacent_pairs=True,
            optional_keys=("embedding_scale", "residual_scale", "logit_scale"),
            more_fields=family_fields.gguf_minicpm,
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
        biases=family_fields.llama_biases,
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
        biases=family_fields.internlm2_biases,
        gguf=GGUFLayout("internlm2", adjacent_pairs=True),
    ),
    Family(
        ("InternLM3ForCausalLM", "LlamaForCausalLM"),  # the second is what transformers 5 saves
        "internlm3",
        defaults={"num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 32_768, "rms_norm_eps": 1e-5},
        biases=family_fields.internlm3_biases,
    ),
    Family(
        ("Qwen3ForCausalLM", "Qwen3Model"),
        "qwen3",
        **_QWEN,
        defaults={
            "num_key_value_heads": 32,
            "head_dim": 128,
            "max_position_embeddings": 32_768,
            "sliding_window": 4096,
        },
        biases=family_fields.attention_biases,
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
        layers_without_rope=family_fields.smollm3_layers_without_rope,
        windows=family_fields.qwen_windows,
        biases=family_fields.llama_biases,
        # No GGUF file says which layers have rope: they are the family's default, as in llama.cpp.
        gguf=GGUFLayout("smollm3", adjacent_pairs=True),
    ),
    Family(
        ("Olmo2ForCausalLM",),
        "olmo2",
        **_OLMO,
        defaults={"rms_norm_eps": 1e-5},
        gguf=GGUFLayout(
            "olmo2",
            modules=_GGUF_NORMS_BEHIND,
            optional_keys=(*_GGUF_WINDOW_KEYS, "rope.scaling.attn_factor"),
            more_fields=family_fields.gguf_olmo,
            pre_tokenizers={"olmo": "gpt-2"},
        ),
    ),
    Family(
        ("Olmo3ForCausalLM",),
        "olmo3",
        **_OLMO,
        defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096},
        default_theta=500_000.0,
        rope_types=("default", "linear", "llama3", "yarn"),
        local_theta=family_fields.olmo3_local_theta,
        windows=family_fields.window_but_every(4),
    ),
    Family(
        ("Exaone4ForCausalLM",),
        "exaone4",
        names=_NORMS_BEHIND_ALONE,
        defaults={"num_key_value_heads": 32, "rms_norm_eps": 1e-5, "sliding_window": 4096},
        bos_token_id=0,
        layers_without_rope=family_fields.exaone4_layers_without_rope,
        windows=family_fields.exaone4_windows,
        has_head_norms=True,
        gguf=GGUFLayout(
            "exaone4",
            modules=_GGUF_NORMS_BEHIND,
            optional_keys=_GGUF_WINDOW_KEYS,
            more_fields=family_fields.gguf_exaone4,
            pre_tokenizers={"exaone4": "gpt-2"},
        ),
    ),
    Family(
        ("GlmForCausalLM",),
        "glm",
        names=TensorNames(gate_up=("mlp.gate_up_proj",)),
        **_GLM,
    ),
    Family(
        ("Glm4ForCausalLM",),
        "glm4",
        names=TensorNames(
            gate_up=("mlp.gate_up_proj",),
            norms=LayerNorms(attention_post="post_self_attn_layernorm", mlp_post="post_mlp_layernorm"),
        ),
        **_GLM,
        gguf=GGUFLayout(
            "glm4",
            modules={
                "ffn_up": "mlp.gate_up_proj",
                "post_attention_norm": "post_self_attn_layernorm",
                "post_ffw_norm": "post_mlp_layernorm",
            },
            pre_tokenizers=dict.fromkeys(("glm4", "chatglm-bpe"), "smaug-bpe"),
        ),
    ),
    Family(
        ("Ernie4_5ForCausalLM",),
        "ernie4_5",
        defaults={
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
        },
        default_theta=500_000.0,
        has_interleaved_rope=True,
        biases=family_fields.biases("use_bias", "use_bias", "use_bias"),
        gguf=GGUFLayout("ernie4_5", more_fields=family_fields.gguf_ernie),
    ),
    Family(
        ("GemmaForCausalLM",),
        "gemma",
        defaults=_GEMMA_DEFAULTS | {"num_key_value_heads": 16, "max_position_embeddings": 8192},
        # The second is in Google's own configs, and meant as the first.
        **_GEMMA | {"activation_names": ("gelu_pytorch_tanh", "gelu")},
        gguf=GGUFLayout("gemma"),
    ),
    Family(
        ("Gemma2ForCausalLM",),
        "gemma2",
        names=TensorNames(norms=_GEMMA_NORMS),
        **_GEMMA,
        defaults=_GEMMA_DEFAULTS
        | {"num_key_value_heads": 4, "max_position_embeddings": 8192, "sliding_window": 4096}
        | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        windows=family_fields.window_but_every(2),
        soft_caps=family_fields.soft_caps,
        multipliers=family_fields.gemma_scale,
        gguf=GGUFLayout(
            "gemma2",
            modules=_GGUF_NORMS_BEHIND | {"ffn_norm": "pre_feedforward_layernorm"},
            keys={
                "attention.sliding_window": "sliding_window",
                "attn_logit_softcapping": "attn_logit_softcapping",
                "final_logit_softcapping": "final_logit_softcapping",
            },
            more_fields=family_fields.gguf_query_scalar(46),
        ),
    ),
    Family(
        ("Gemma3ForCausalLM",),
        "gemma3_text",
        names=TensorNames(norms=_GEMMA_NORMS),
        **_GEMMA,
        defaults=_GEMMA_DEFAULTS
        | {"num_key_value_heads": 4, "max_position_embeddings": 131_072, "sliding_window": 4096}
        | {"vocab_size": 262_208, "num_attention_heads": 8},
        default_theta=1_000_000.0,
        rope_types=("default", "linear", "llama3", "yarn"),
        local_theta=lambda fields: fields.optional_number("rope_local_base_freq") or 10_000.0,
        windows=family_fields.window_but_every(6, "sliding_window_pattern"),
        has_head_norms=True,
        # transformers does not apply the cap of scores here, so that one must be absent.
        soft_caps=lambda fields: SoftCaps(logits=fields.optional_number("final_logit_softcapping")),
        multipliers=family_fields.gemma_scale,
        check=family_fields.no_cap_of_scores,
        gguf=GGUFLayout(
            "gemma3",
            modules=_GGUF_NORMS_BEHIND | {"ffn_norm": "pre_feedforward_layernorm"},
            keys={"attention.sliding_window": "sliding_window"},
            optional_keys=(*_GGUF_WINDOW_KEYS, "rope.freq_base_swa", "final_logit_softcapping"),
            more_fields=family_fields.gguf_gemma3,
        ),
    ),
)
"""In the order of preference where a config names only its architecture, or only its model_type."""

GGUF_FAMILIES = {family.gguf.architecture: (family, family.gguf) for family in FAMILIES if family.gguf is not None}
"""`general.architecture` of a GGUF file -> family and layout."""


_TEXT_MODELS = {"Gemma3ForConditionalGeneration": "gemma3_text", "Mistral3ForConditionalGeneration": "mistral"}
"""Architectures that also see images -> the model_type of a `text_config` that names none."""

BESIDE_IMAGES = OwnNames(
    parts={"language_model.model.": "model.", "language_model.lm_head.": "lm_head.", "model.language_model.": "model."},
    dropped=("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
)
"""How they name their text model, as published and by transformers 5."""


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of a model; of one of `_TEXT_MODELS`, that of its text model."""
    text, architectures = config.get("text_config"), config.get("architectures")
    seeing = architectures[0] if isinstance(architectures, list) and len(architectures) == 1 else None
    if not isinstance(seeing, str) or seeing not in _TEXT_MODELS or not isinstance(text, Mapping):
        return config
    outer = {name: value for name, value in config.items() if name != "text_config"}
    ends = {name: outer[name] for name in ("bos_token_id", "eos_token_id") if outer.get(name) is not None}
    return {**outer, "model_type": _TEXT_MODELS[seeing], **text, **ends, "architectures": None}


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
