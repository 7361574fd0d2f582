"""The validated description of a Llama, from config.json and generation_config.json."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from d3engine.errors import ModelFormatError
from d3engine.model.families import family_of, text_config
from d3engine.model.family import NO_CAPS, Biases, Family, Multipliers, SoftCaps, TensorNames
from d3engine.model.family_fields import no_windows, sliding_window
from d3engine.model.fields import Fields
from d3engine.model.quantization_config import DEFAULT_HEAD_SCHEME, read_quantization
from d3engine.model.rope_config import PARTIAL, RopeConfig, read_rope_config
from d3engine.model.source import CONFIG_FILE, GENERATION_CONFIG_FILE, ModelSource, files_of, instead_of_a_model

DTYPES = ("float32", "bfloat16", "float16")

_NEUTRAL: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "rope_interleaved": ((False,), ", since weights must be in the half-split order of transformers"),
    PARTIAL: ((1.0,), ", since Llama rotates whole heads"),
    "is_causal": ((True,), ", since a token attends to those before it alone"),
    "use_bidirectional_attention": ((False,), ", since a token attends to those before it alone"),
    "is_encoder_decoder": ((False,), ", since there is no encoder"),
    **dict.fromkeys(("per_layer_config", "attribute_map", "fusion_config"), (({},), ", since all layers are alike")),
    **dict.fromkeys(
        ("text_config", "decoder", "generator", "text_encoder"), ((), ", since the model itself is the decoder")
    ),
    "transformers_weights": ((), ", since weights are in model.safetensors or its shards"),
    **dict.fromkeys(("attention_chunk_size", "kv_sharing_modes", "interleaved_sliding_window"), ((), "")),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "clip_qkv", "compression_config"), ((), "")),
    "logit_scale": ((1.0,), ", since logits are not scaled"),
    **dict.fromkeys(("alibi", "qk_layernorm", "use_qk_norm", "attn_temperature_tuning"), ((False,), "")),
}
"""Keys that change the result of transformers or vLLM and are not read here: the values without effect, and why.

null has no effect either. tests/model/test_config_keys.py compares this table with transformers' own sources.
"""

_NOT_APPLIED: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences"), (1,)),
    **dict.fromkeys(("min_length", "min_new_tokens", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), (0,)),
    **dict.fromkeys(("typical_p", "encoder_repetition_penalty", "guidance_scale"), (1,)),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "diversity_penalty"), (0,)),
    **dict.fromkeys(("token_healing", "renormalize_logits"), (False,)),
    **dict.fromkeys(
        ("stop_strings", "bad_words_ids", "force_words_ids", "constraints", "suppress_tokens", "sequence_bias"), ([],)
    ),
    **dict.fromkeys(("begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id"), ([],)),
    **dict.fromkeys(("exponential_decay_length_penalty", "watermarking_config", "top_h", "dola_layers"), ()),
    "penalty_alpha": (0,),
    "max_time": (),
}
"""Keys of generation_config.json that change the output and are not applied, with the values without effect."""

_SOFT_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
"""Keys of `_NEUTRAL` that families with soft caps read, as those with a `partial_rotary_factor` read that."""

_MAX_LAYERS = 10_000
"""Far above any real model, low enough that the names built from it stay harmless."""


@dataclass(frozen=True)
class ModelConfig:
    """A Llama model's sizes and constants, every field validated by `from_dict`."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float  # as the engine adds it (`Multipliers`)
    rope: RopeConfig
    layers_without_rope: tuple[int, ...]  # whose queries and keys are not rotated
    max_position_embeddings: int
    tie_word_embeddings: bool
    biases: Biases
    has_head_norms: bool  # of the queries and the keys of each head, before rope
    multipliers: Multipliers
    tensor_names: TensorNames
    windows: tuple[int | None, ...]  # of each layer: tokens that one attends to at most, itself included
    longest_text: int | None  # up to which a field that no kernel reads changes nothing (`_longest_text`)
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str | None
    quantization: str | None  # one of QUANTIZATION_SCHEMES, or FP8_GROUPS; None for float weights
    head_quantization: str | None  # the same of the LM head, and of an embedding that is the head too
    has_projection_norms: bool = False  # of all queries of a token together, and of all its keys, before rope
    norm_offset: float = 0.0  # added to the weights of all norms when they are loaded
    activation: str = "silu"  # of the gates, as kernels name it
    embedding_scale: float = 1.0  # of the embedding's rows, rounded to the dtype of activations
    soft_caps: SoftCaps = NO_CAPS
    local_rope: RopeConfig | None = None  # of the layers with a window; None: `rope`
    has_interleaved_rope: bool = False  # whether rope pairs channels 2j and 2j + 1 of the files, not j and j + D / 2

    @classmethod
    def from_directory(cls, path: ModelSource) -> ModelConfig:
        """Read config.json and, where present, generation_config.json of a model directory or GGUF file.

        Raises `ModelFormatError` naming the file and field of anything missing, malformed or not supported.
        """
        files = files_of(path)
        if not files.has(CONFIG_FILE):
            why = instead_of_a_model(files.path) or f": {CONFIG_FILE} is missing"
            raise ModelFormatError(f"there is no model in {files.path}{why}")
        generation = files.read_json_object(GENERATION_CONFIG_FILE) if files.has(GENERATION_CONFIG_FILE) else None
        config = cls.from_dict(files.read_json_object(CONFIG_FILE), generation)
        return config if config.quantization else replace(config, quantization=files.scheme_of_others())

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> ModelConfig:
        """Validate the parsed contents of config.json (and generation_config.json).

        Optional fields that are absent take the defaults of the family's config class in transformers. `eos_token_ids`
        is the union of both files', those of config.json first. Raises `ModelFormatError`.
        """
        config = text_config(config)
        family = family_of(Fields(config, CONFIG_FILE))
        own = {name: config[given] for given, name in family.own_names.fields.items() if given in config}
        fields = Fields({**family.defaults, **config, **own}, CONFIG_FILE)
        _refuse_other_models(fields, family)
        num_heads = fields.integer("num_attention_heads")
        hidden_size = fields.integer("hidden_size")
        head_dim = _head_dim(fields, hidden_size, num_heads)
        num_layers = fields.integer("num_hidden_layers", high=_MAX_LAYERS)
        max_positions = fields.integer("max_position_embeddings", default=2048)
        multipliers = family.multipliers(fields)
        is_tied = fields.boolean("tie_word_embeddings")
        quantization, head_quantization = read_quantization(fields, is_tied)
        rope, local_rope = _ropes(fields, family, head_dim, max_positions)
        return cls(
            vocab_size=fields.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=_num_kv_heads(fields, num_heads),
            head_dim=head_dim,
            rms_norm_eps=fields.number("rms_norm_eps", default=1e-6) * multipliers.on_epsilon(),
            rope=rope,
            layers_without_rope=family.layers_without_rope(fields, num_layers),
            max_position_embeddings=max_positions,
            tie_word_embeddings=is_tied,
            biases=family.biases(fields),
            has_head_norms=family.has_head_norms,
            multipliers=multipliers,
            tensor_names=family.names,
            windows=no_windows(fields, num_layers) if family.windows is None else family.windows(fields, num_layers),
            longest_text=_longest_text(fields, family, rope),
            bos_token_id=_bos_token_id(fields, generation_config, family.bos_token_id),
            eos_token_ids=_eos_token_ids(fields, generation_config, family.eos_token_ids),
            dtype=_dtype(fields),
            quantization=quantization,
            head_quantization=head_quantization,
            has_projection_norms=family.has_projection_norms,
            norm_offset=family.norm_offset,
            activation=family.activation,
            embedding_scale=math.sqrt(hidden_size) if family.scales_embedding else 1.0,
            soft_caps=NO_CAPS if family.soft_caps is None else family.soft_caps(fields),
            local_rope=local_rope,
            has_interleaved_rope=family.has_interleaved_rope,
        )

    def quantized(self, scheme: str | None) -> ModelConfig:
        """The config after `d3engine weights quantize --scheme`; None: that of float weights."""
        return replace(self, quantization=scheme, head_quantization=None if scheme is None else DEFAULT_HEAD_SCHEME)

    @property
    def max_length(self) -> int:
        """The positions that the model reaches, as in vLLM: linear and dynamic rope stretch the pretrained length.

        So does yarn where max_position_embeddings is still that length (Qwen's advice for long texts changes the rope
        alone). For every other rope type it is max_position_embeddings, and for Gemma 3, whose number is the stretched
        one.
        """
        rope, positions = self.rope, self.max_position_embeddings
        if rope.factor is None or self.local_rope is not None:
            return positions
        if rope.rope_type == "yarn":
            return max(positions, int((rope.original_max_position_embeddings or positions) * rope.factor))
        return int(positions * rope.factor) if rope.rope_type in ("linear", "dynamic") else positions

    @property
    def default_length(self) -> int:
        """The longest text where no length is asked for: of a longrope that up to which transformers agrees."""
        lengths = (self.max_length, self.rope.trained_length, self.longest_text)
        return min(length for length in lengths if length is not None)

    @property
    def rotary_dim(self) -> int:
        """The channels of a head that rope turns, its first ones."""
        return self.rope.rotary_dim or self.head_dim

    @property
    def attention_scale(self) -> float:
        """The factor of products of queries and keys."""
        given = self.multipliers.attention
        return 1.0 / math.sqrt(self.head_dim) if given is None else given

    @property
    def q_size(self) -> int:
        """Rows of the query projection: heads times head_dim (not always hidden_size)."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of the key projection, and of the value projection."""
        return self.num_kv_heads * self.head_dim

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def layer_parameters(self) -> int:
        """Matrix parameters of one layer: `p` of the FLOPs ratio (L p + h) / (mean keep * p + h)."""
        attention = self.hidden_size * (2 * self.q_size + 2 * self.kv_size)
        return attention + 3 * self.hidden_size * self.intermediate_size

    @property
    def head_parameters(self) -> int:
        """Matrix parameters of the LM head: `h` of the FLOPs ratio."""
        return self.vocab_size * self.hidden_size


def load_generation_config(model: ModelSource) -> dict[str, Any]:
    """Return the sampling defaults of generation_config.json without null values; {} without the file.

    Keys: temperature, top_p, min_p, repetition_penalty (floats), top_k, max_new_tokens (ints), do_sample (bool),
    eos_token_ids (tuple of ints). Raises `ModelFormatError` for a value of the wrong type; `SamplingParams` checks
    ranges.
    """
    files = files_of(model)
    if not files.has(GENERATION_CONFIG_FILE):
        return {}
    fields = Fields(files.read_json_object(GENERATION_CONFIG_FILE), GENERATION_CONFIG_FILE)
    number, count = partial(fields.number, zero_allowed=True), partial(fields.integer, low=0)
    readers: dict[str, Callable[[str], Any]] = {
        **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), number),
        "top_k": partial(fields.integer, low=-1),
        "max_new_tokens": count,
        "do_sample": fields.boolean,
    }
    defaults = {name: read(name) for name, read in readers.items() if fields.get(name) is not None}
    if fields.get("eos_token_id") is not None:
        defaults["eos_token_ids"] = fields.token_ids("eos_token_id")
    return defaults


def not_applied(model: ModelSource) -> dict[str, Any]:
    """The keys of generation_config.json that change transformers' output and not ours, with their values."""
    files = files_of(model)
    given = files.read_json_object(GENERATION_CONFIG_FILE) if files.has(GENERATION_CONFIG_FILE) else {}
    return {
        name: given[name]
        for name, neutral in _NOT_APPLIED.items()
        if given.get(name) is not None and given[name] not in neutral
    }


def _refuse_other_models(fields: Fields, family: Family) -> None:
    """Raise for options that make the model another than a Llama."""
    family.check(fields)
    for name in ("hidden_act", "hidden_activation"):
        if fields.get(name) not in (None, *family.activation_names):
            fields.refuse(name, " or ".join(map(repr, family.activation_names)))
    for name, (neutral, why) in _NEUTRAL.items():
        if (name == PARTIAL and family.partial_rotary_factor) or (name in _SOFT_CAPS and family.soft_caps):
            continue
        value = fields.get(name)
        if value is not None and value not in neutral:
            allowed = " or ".join(json.dumps(one).replace('"', "'") for one in neutral) or "absent"
            fields.refuse(name, allowed + why)
    # pretraining_tp > 1 made transformers 4 split matrix products into slices and sum them: the same numbers
    # but for rounding, and transformers 5 no longer does it. So it is checked and then has no effect.
    fields.integer("pretraining_tp", default=1)


def _ropes(fields: Fields, family: Family, head_dim: int, max_positions: int) -> tuple[RopeConfig, RopeConfig | None]:
    """The rope of a model, and that of its layers with a window where the family has two."""
    if family.local_theta is None:
        return read_rope_config(fields, family, head_dim, max_positions), None
    by_kind = fields.get("rope_parameters") or {}
    if not isinstance(by_kind, Mapping) or not by_kind.keys() <= {"full_attention", "sliding_attention"}:
        fields.refuse("rope_parameters", "an object with those of full_attention and of sliding_attention, or absent")
    full, local = by_kind.get("full_attention"), by_kind.get("sliding_attention")
    # The outer spelling is that of the layers without a window, where these have none of their own.
    outer = {name: value for name, value in fields.values.items() if name != "rope_theta" or not _has_theta(full)}
    plain = {name: value for name, value in fields.values.items() if name not in ("rope_theta", "rope_scaling")}
    local_theta = family.default_theta if _has_theta(local) else family.local_theta(fields)
    whole = Fields(outer | {"rope_parameters": full}, fields.source)
    windowed = Fields(plain | {"rope_parameters": local}, fields.source)
    rope = read_rope_config(whole, family, head_dim, max_positions)
    return rope, read_rope_config(windowed, family, head_dim, max_positions, local_theta)


def _has_theta(rope: Any) -> bool:
    return isinstance(rope, Mapping) and rope.get("rope_theta") is not None


def _longest_text(fields: Fields, family: Family, rope: RopeConfig) -> int | None:
    """The length from which queries grow, or a sliding_window that transformers ignores, and others do not."""
    window = sliding_window(fields) if family.windows is None else None
    growing = None if rope.query_scaling is None else rope.original_max_position_embeddings
    return min((length for length in (window, growing) if length is not None), default=None)


def _head_dim(fields: Fields, hidden_size: int, num_heads: int) -> int:
    if fields.get("head_dim") is not None:
        head_dim = fields.integer("head_dim")
    elif hidden_size % num_heads:
        fields.refuse("hidden_size", f"a multiple of num_attention_heads={num_heads} where head_dim is absent")
    else:
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise ModelFormatError(f"{fields.source}: head_dim must be an even integer; got {head_dim}")
    return head_dim


def _num_kv_heads(fields: Fields, num_heads: int) -> int:
    num_kv_heads = fields.integer("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        fields.refuse("num_key_value_heads", f"a divisor of num_attention_heads={num_heads}")
    return num_kv_heads


def _bos_token_id(fields: Fields, generation: Mapping[str, Any] | None, default: int | None) -> int | None:
    if "bos_token_id" not in fields.values and generation is not None:
        fields = Fields(generation, GENERATION_CONFIG_FILE)
    if "bos_token_id" not in fields.values:
        return default
    return fields.optional_integer("bos_token_id", low=0)


def _eos_token_ids(fields: Fields, generation: Mapping[str, Any] | None, default: tuple[int, ...]) -> tuple[int, ...]:
    ids = fields.token_ids("eos_token_id")
    if generation is not None:
        ids += Fields(generation, GENERATION_CONFIG_FILE).token_ids("eos_token_id")
    if not ids and "eos_token_id" not in fields.values:
        return default  # an explicit null means none
    return tuple(dict.fromkeys(ids))


def _dtype(fields: Fields) -> str | None:
    name = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    value = fields.get(name)
    if value is None:
        return None
    dtype = value.removeprefix("torch.") if isinstance(value, str) else value
    if dtype not in DTYPES:
        fields.refuse(name, f"one of {', '.join(DTYPES)}")
    return str(dtype)
