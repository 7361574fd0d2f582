"""The metadata of a GGUF file as the config and tokenizer files of a model directory."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from d3engine.errors import ModelFormatError
from d3engine.model.families import GGUF_FAMILIES
from d3engine.model.family import Family, GGUFLayout
from d3engine.model.fields import Fields
from d3engine.model.gguf_file import GGUFFile, GGUFTensor

if TYPE_CHECKING:
    from numpy.typing import NDArray


FREQ_FACTORS = "rope_freqs.weight"
"""The tensor of Llama 3.1's divisors of each channel's frequency; it belongs to no layer."""
_SHORT_FACTORS, _LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
ROPE_TENSORS = (FREQ_FACTORS, _SHORT_FACTORS, _LONG_FACTORS)
"""Tensors that are read as fields of config.json."""
GGUF_POOLINGS = {1: "mean", 2: "cls", 3: "last"}
"""llama.cpp's pooling types that are read, by our names; 0 is none."""
RANKING_HEAD, _RANKING_LABELS = "cls.output.weight", ("yes", "no")
"""The rows of a Qwen3-Reranker's head by which llama.cpp scores documents, and their tokens."""

_ATTENTION_FACTOR, _YARN_FACTOR = "rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"
_READ = frozenset(
    {
        *("block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size"),
        *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
        *("attention.layer_norm_rms_epsilon", "rope.dimension_count", "rope.freq_base", "rope.scale_linear"),
        *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"),
        *("rope.scaling.finetuned", "tensor_data_layout", "attention.layer_norm_epsilon"),
    }
)
"""The keys behind "llama." or another architecture that are read, or never change a result."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "use_parallel_residual": (False,),
    **dict.fromkeys(("expert_count", "expert_used_count", "expert_shared_count", "expert_feed_forward_length"), (0,)),
    **dict.fromkeys(("leading_dense_block_count", "nextn_predict_layers", "attention.shared_kv_layers"), (0,)),
    **dict.fromkeys(("attention.sliding_window", "attention.clamp_kqv", "attention.max_alibi_bias"), (0,)),
    **dict.fromkeys(("attention.scale", "attn_logit_softcapping", "final_logit_softcapping"), (0,)),
    "pooling_type": (0, *GGUF_POOLINGS),
    **dict.fromkeys(("logit_scale", "residual_scale", "embedding_scale", "expert_weights_scale"), (0, 1)),
    _ATTENTION_FACTOR: (1,),
    _YARN_FACTOR: (1,),
    "rope.scaling.yarn_beta_fast": (32,),
    "rope.scaling.yarn_beta_slow": (1,),
    "rope.scaling.yarn_log_multiplier": (0,),
}
"""Keys that are not read, with the values that leave llama.cpp's result as ours; others are refused."""
_EXT_FACTOR = "rope.scaling.yarn_ext_factor"
_TOKENIZER_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tokenizer.ggml.remove_extra_whitespaces": (False,),
    "tokenizer.ggml.escape_whitespaces": (True,),
    "tokenizer.ggml.add_sep_token": (False,),
    "tokenizer.ggml.normalizer.lowercase": (False,),
    "tokenizer.ggml.precompiled_charsmap": ([],),
}
"""The same for keys that change how a text is tokenized."""

_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

# Llama 3.1's and 3.2's own numbers; a GGUF file holds only the resulting divisor of each channel.
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def gguf_config(file: GGUFFile) -> dict[str, Any]:
    """The config.json of a GGUF file of one of `GGUF_FAMILIES`.

    It names a dtype where all matrices of the file are of one float type. Raises `ModelFormatError`, naming the key.
    """
    metadata = file.metadata
    family, layout = gguf_family(file)
    prefix = f"{layout.architecture}."
    _refuse_unread(file, prefix, layout)
    if is_ranking(file):
        _check_ranking_head(file)
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    fields = Fields(own, f"{file.path}: {layout.architecture}")
    num_heads = fields.integer("attention.head_count")
    hidden_size = fields.integer("embedding_length")
    head_dim = fields.integer("attention.key_length", default=max(1, hidden_size // num_heads))
    for name in ("attention.value_length", *([] if family.partial_rotary_factor else ["rope.dimension_count"])):
        if fields.integer(name, default=head_dim) != head_dim:
            fields.refuse(name, f"the length of a head, {head_dim}")
    rotary_dim = fields.integer("rope.dimension_count", high=head_dim, default=head_dim)
    if layout.has_rope_switch and fields.get("rope.scaling.finetuned") is False:
        fields.refuse("rope.scaling.finetuned", "true or absent, since llama.cpp takes false as no rope at all here")
    theta = fields.number("rope.freq_base", default=10_000.0)
    config = {
        "architectures": [family.architectures[0]],
        "model_type": family.model_type,
        "hidden_act": family.activation_names[0],
        "vocab_size": _embedding(file).shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": fields.integer("feed_forward_length"),
        "num_hidden_layers": fields.integer("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": _of_all_layers(fields, "attention.head_count_kv", default=num_heads),
        "head_dim": head_dim,
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": fields.integer("context_length"),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(file, fields, rotary_dim, theta),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "attention_out_bias": "blk.0.attn_output.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        **{field: fields.number(key, zero_allowed=True) for key, field in layout.keys.items()},
        **_ends_of_text(file),
    }
    if "sliding_window" in config:
        config["sliding_window"] = fields.integer("attention.sliding_window", low=0) or None  # 0 of Phi-4: none
    if family.partial_rotary_factor:
        config["partial_rotary_factor"] = _share(fields, rotary_dim, head_dim)
    if _LONG_FACTORS in file.tensors:  # next to the rope's fields, where transformers' Phi-3 has a default
        original = fields.integer("rope.scaling.original_context_length", default=config["max_position_embeddings"])
        config["original_max_position_embeddings"] = original
    config |= layout.more_fields(fields, config)
    dtype = _float_type(file)
    return config if dtype is None else config | {"torch_dtype": dtype}


def _of_all_layers(fields: Fields, name: str, default: int) -> int:
    """An integer, or the one of which a list has as many as there are layers."""
    given = fields.get(name)
    if not isinstance(given, list):
        return fields.integer(name, default=default)
    num_layers = fields.integer("block_count")
    if len(given) != num_layers or len(set(given)) != 1:
        fields.refuse(name, f"a number, or a list of {num_layers} equal ones, since layers are alike")
    return Fields({name: given[0]}, fields.source).integer(name)


def _share(fields: Fields, part: int, whole: int) -> float:
    """The `partial_rotary_factor` of which a head's length makes that many channels, as transformers rounds it."""
    share = part / whole
    if int(whole * share) != part:
        fields.refuse("rope.dimension_count", f"a number of channels that is a share of {whole}")
    return share


def gguf_family(file: GGUFFile) -> tuple[Family, GGUFLayout]:
    """The family of a file, and its layout in GGUF files; raises `ModelFormatError`."""
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in GGUF_FAMILIES:
        known = ", ".join(sorted(GGUF_FAMILIES))
        others = (
            "Mistral and InternLM3 are llama, OLMo 3 is olmo2; of GLM-4 9B the safetensors of its -hf repository run"
        )
        file.refuse("general.architecture", f"one of {known} ({others})")
    return GGUF_FAMILIES[architecture]


def _refuse_unread(file: GGUFFile, prefix: str, layout: GGUFLayout) -> None:
    """Raise for a key that is not read, unless its value is known to have no effect."""
    is_yarn = file.metadata.get(prefix + "rope.scaling.type") == "yarn"
    # A negative factor stands for the type's default: 1 for yarn, else 0.
    neutral = {_EXT_FACTOR: (-1, 1 if is_yarn else 0), **_NEUTRAL}
    read = _READ | layout.keys.keys() | set(layout.optional_keys)
    read |= {_ATTENTION_FACTOR} if _LONG_FACTORS in file.tensors else set()
    read |= {_YARN_FACTOR} if is_yarn else set()
    read |= {"pooling_type", "classifier.output_labels"} if is_ranking(file) else set()
    of_keys = {prefix + name: values for name, values in neutral.items() if name not in read} | _TOKENIZER_NEUTRAL
    for key, value in file.metadata.items():
        is_unread = key in of_keys or (key.startswith(prefix) and key.removeprefix(prefix) not in read)
        if is_unread and value not in of_keys.get(key, ()):
            words = " or ".join(["absent", *map(json.dumps, of_keys.get(key, ()))])
            file.refuse(key, f"{words}, since it is not supported")


def is_ranking(file: GGUFFile) -> bool:
    """Whether a file is a Qwen3-Reranker as llama.cpp writes it, which is read as the model that says yes or no."""
    labels = file.metadata.get("qwen3.classifier.output_labels")
    return labels == list(_RANKING_LABELS) and RANKING_HEAD in file.tensors


def _check_ranking_head(file: GGUFFile) -> None:
    """Raise unless the whole head is there: llama.cpp's converter leaves out one that is not the embedding."""
    if "output.weight" in file.tensors:
        return
    tokens, shape = _tokens(file)[0], (len(_RANKING_LABELS), _embedding(file).shape[1])
    found = [tokens.index(label) for label in _RANKING_LABELS if label in tokens]
    if len(found) == len(_RANKING_LABELS) and file.tensors[RANKING_HEAD].shape == shape:
        head = file.read(RANKING_HEAD)
        rows = [file.read_rows("token_embd.weight", token, 1)[0] for token in found]
        # Rounded to few bits, they still point the same way.
        if all(one @ row > 0.9 * (one @ one * (row @ row)) ** 0.5 for one, row in zip(head, rows, strict=True)):
            return
    alone = f"of its head {RANKING_HEAD!r} alone is there"
    raise ModelFormatError(f"{file.path}: {alone}: take a file with 'output.weight', or the model's safetensors")


def gguf_pooling(file: GGUFFile) -> str | None:
    """How the file says that embeddings are pooled; None where it does not."""
    found = file.metadata.get(f"{file.metadata.get('general.architecture')}.pooling_type")
    return GGUF_POOLINGS.get(found) if isinstance(found, int) else None


def _embedding(file: GGUFFile) -> GGUFTensor:
    tensor = file.tensors.get("token_embd.weight")
    if tensor is None or len(tensor.shape) != 2:
        raise ModelFormatError(f"{file.path}: the matrix 'token_embd.weight' is missing")
    return tensor


_ENDS = frozenset(
    {
        *("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>", "<|end|>", "<end_of_turn>"),
        *("<|observation|>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
    }
)
"""Special tokens that end an answer, whether or not a key names them: files name one where a model has several.

They are special even where a file calls them plain, as in llama.cpp.
"""


def _ends_of_text(file: GGUFFile) -> dict[str, Any]:
    """BOS, and every end-of-sequence id: of the text, of a turn, of a message to a tool, and those of `_ENDS`."""
    fields = Fields(file.metadata, str(file.path))
    names = [f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos", "eot", "eom")]
    given = [fields.optional_integer(name, low=0) for name in names]
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    given += [number for number, token in enumerate(tokens if isinstance(tokens, list) else ()) if token in _ENDS]
    ends = list(dict.fromkeys(end for end in given[1:] if end is not None))
    return {"bos_token_id": given[0], "eos_token_id": ends if len(ends) != 1 else ends[0]}


def _float_type(file: GGUFFile) -> str | None:
    kinds = {tensor.type_name for tensor in file.tensors.values() if len(tensor.shape) == 2}
    return _FLOATS.get(kinds.pop()) if len(kinds) == 1 else None


def _rope_scaling(file: GGUFFile, fields: Fields, rotary_dim: int, theta: float) -> dict[str, Any] | None:
    kind = fields.get("rope.scaling.type")
    if _LONG_FACTORS in file.tensors:
        if kind not in (None, "none", "longrope"):
            fields.refuse("rope.scaling.type", f"longrope or absent with {_LONG_FACTORS}")
        return _longrope(file, fields)
    if kind not in (None, "none", "linear", "yarn"):
        fields.refuse("rope.scaling.type", "one of none, linear, yarn")
    if FREQ_FACTORS in file.tensors:
        if kind in ("linear", "yarn"):
            fields.refuse("rope.scaling.type", f"none beside {FREQ_FACTORS}")
        return _llama3_scaling(file, rotary_dim, theta)
    if kind is None:  # as llama.cpp has it: linear, by either name, where 0 is no factor
        given = [name for name in ("rope.scaling.factor", "rope.scale_linear") if fields.get(name) is not None]
        if given and fields.number(given[0], zero_allowed=True) not in (0, 1):
            return {"rope_type": "linear", "factor": fields.number(given[0])}
    if kind in (None, "none"):
        return None
    scaling = {"rope_type": kind, "factor": fields.number("rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = fields.integer("rope.scaling.original_context_length")
        factor, default = fields.number(_YARN_FACTOR, default=1.0), 0.1 * math.log(scaling["factor"]) + 1
        # A converter writes transformers' attention_factor there too, which is that default.
        if factor != 1 and not math.isclose(factor, default, rel_tol=1e-5):
            scaling["attn_factor"] = factor
    return scaling


def _longrope(file: GGUFFile, fields: Fields) -> dict[str, Any]:
    """The two lists of divisors, whose length is checked with config.json's, and the factor of rotations."""
    if _SHORT_FACTORS not in file.tensors:
        raise ModelFormatError(f"{file.path}: tensor {_SHORT_FACTORS!r} is missing with {_LONG_FACTORS} there")
    lists = {"short_factor": _SHORT_FACTORS, "long_factor": _LONG_FACTORS}
    return {
        "rope_type": "longrope",
        **{field: file.read(name).flatten().tolist() for field, name in lists.items()},
        "attention_factor": fields.number(_ATTENTION_FACTOR, default=1.0),
    }


def _llama3_scaling(file: GGUFFile, head_dim: int, theta: float) -> dict[str, Any]:
    """The Llama 3 rope that gives the file's divisor of each channel; raises `ModelFormatError` for others."""
    import numpy as np

    if file.tensors[FREQ_FACTORS].shape != (head_dim // 2,):
        raise ModelFormatError(f"{file.path}: {FREQ_FACTORS} must have head_dim / 2 = {head_dim // 2} values")
    given = file.read(FREQ_FACTORS)
    largest = float(given.max())
    if (
        math.isfinite(largest)
        and largest >= 1
        and np.allclose(given, llama3_divisors(head_dim, theta, largest), rtol=1e-4, atol=0)
    ):
        return {"rope_type": "llama3", "factor": largest, **LLAMA3_ROPE}
    allowed = ", ".join(f"{name} {value:g}" for name, value in LLAMA3_ROPE.items())
    raise ModelFormatError(
        f"{file.path}: {FREQ_FACTORS} must be what Llama 3 makes of any factor with {allowed} (its safetensors run)"
    )


def llama3_divisors(head_dim: int, theta: float, factor: float) -> NDArray[Any]:
    """Llama 3.1's divisor of each channel's frequency: 1 for short wavelengths, `factor` for long ones."""
    import numpy as np

    low, high, original = LLAMA3_ROPE["low_freq_factor"], LLAMA3_ROPE["high_freq_factor"], 8192
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    turns = original * theta**-exponents / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clip(0, 1)
    divisors: NDArray[Any] = 1 / ((1 - smooth) / factor + smooth)
    return divisors


_PLAIN, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_KINDS = range(1, 7)
"""ggml's token types, which are sentencepiece's numbers: 5 is an unused one."""

_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def gguf_tokenizer_kind(file: GGUFFile) -> str | None:
    """The file that the tokenizer becomes, tokenizer.json ("gpt2") or tokenizer.model ("llama"); None without one.

    Raises `ModelFormatError` for a kind of tokenizer that is not supported.
    """
    model = file.metadata.get("tokenizer.ggml.model")
    if model is None:
        return None
    if model not in ("gpt2", "llama"):
        file.refuse("tokenizer.ggml.model", "one of 'gpt2', 'llama'")
    return "tokenizer.json" if model == "gpt2" else "tokenizer.model"


TEMPLATE, TEMPLATE_OF_TOOLS = "tokenizer.chat_template", "tokenizer.chat_template.tool_use"


def gguf_tokenizer_config(file: GGUFFile) -> dict[str, Any]:
    """The tokenizer_config.json, with the named special tokens, and two templates. Raises `ModelFormatError`."""
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **_named_tokens(file)}
    if TEMPLATE_OF_TOOLS in file.metadata and TEMPLATE in file.metadata:
        named = {"default": TEMPLATE, "tool_use": TEMPLATE_OF_TOOLS}
        config["chat_template"] = [{"name": name, "template": file.metadata[key]} for name, key in named.items()]
    if gguf_tokenizer_kind(file) == "tokenizer.json":
        return config
    pieces = enumerate(zip(*_pieces(file), strict=True))
    return config | {
        "tokenizer_class": "LlamaTokenizer",
        "legacy": False,
        "add_bos_token": _flag(file, "add_bos_token", True),
        "add_eos_token": _flag(file, "add_eos_token", False),
        "add_prefix_space": _flag(file, "add_space_prefix", True),
        # Split off before sentencepiece sees a text, so that no space comes before one.
        "added_tokens_decoder": {
            str(number): {"content": token, "special": False}
            for number, (token, kind) in pieces
            if kind == _USER_DEFINED
        },
    }


def gguf_tokenizer_json(file: GGUFFile) -> dict[str, Any]:
    """The parsed tokenizer.json of byte-level BPE. Raises `ModelFormatError`, naming the key."""
    tokens, kinds = _tokens(file)
    pre = file.metadata.get("tokenizer.ggml.pre")
    if not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        file.refuse(
            "tokenizer.ggml.pre", f"one of {known} (or give a directory with the model's tokenizer.json as tokenizer)"
        )
    splitting = PRE_TOKENIZERS[pre]
    merges = _list(file, "merges", str)
    if not merges:
        raise ModelFormatError(f"{file.path}: tokenizer.ggml.merges is missing or empty")
    if _flag(file, "add_space_prefix", False):
        file.refuse("tokenizer.ggml.add_space_prefix", "false with tokenizer.ggml.model 'gpt2'")
    if any(merge.count(" ") != 1 for merge in merges):
        raise ModelFormatError(f"{file.path}: tokenizer.ggml.merges must be pairs with a space between")
    added = [
        {"id": number, "content": token, "special": kind == _CONTROL, **_AS_IT_IS}
        for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    return {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(splitting.steps)},
        "post_processor": _ends(file, begins=splitting.begins),
        "decoder": byte_level(use_regex=False),
        "model": {
            "type": "BPE",
            "ignore_merges": splitting.whole_words,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": merges,
        },
    }


_AS_IT_IS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


def _named_tokens(file: GGUFFile) -> dict[str, str]:
    """The file's named special tokens, by tokenizer_config.json's names."""
    tokens, _ = _tokens(file)
    named = {}
    for field, name in _NAMED.items():
        token_id = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if token_id is None:
            continue
        if type(token_id) is not int or not 0 <= token_id < len(tokens):
            file.refuse(f"tokenizer.ggml.{name}_token_id", f"the id of one of its {len(tokens):,} tokens")
        named[field] = tokens[token_id]
    return named


def _flag(file: GGUFFile, name: str, default: bool) -> bool:
    value = file.metadata.get(f"tokenizer.ggml.{name}")
    if value is not None and not isinstance(value, bool):
        file.refuse(f"tokenizer.ggml.{name}", "true or false")
    return default if value is None else bool(value)


def _tokens(file: GGUFFile) -> tuple[list[str], list[int]]:
    """All tokens, at most one for each row of the embedding, and the type of each."""
    tokens, embedding = _list(file, "tokens", str), file.tensors.get("token_embd.weight")
    rows = len(tokens) if embedding is None else embedding.shape[0]
    if not tokens or len(tokens) > rows or len(set(tokens)) != len(tokens):
        allowed = f"from 1 to {rows:,} different strings, since the embedding has as many rows"
        raise ModelFormatError(f"{file.path}: tokenizer.ggml.tokens must be {allowed}")
    kinds = _list(file, "token_type", int) or [_PLAIN] * len(tokens)
    if len(kinds) != len(tokens) or not set(kinds) <= set(_KINDS):
        allowed = f"one number from 1 to 6 for each of the {len(tokens):,} tokens"
        raise ModelFormatError(f"{file.path}: tokenizer.ggml.token_type must be {allowed}")
    pairs = zip(tokens, kinds, strict=True)
    return tokens, [_CONTROL if kind == _PLAIN and token in _ENDS else kind for token, kind in pairs]


def _list(file: GGUFFile, name: str, kind: type) -> list[Any]:
    values = file.metadata.get(f"tokenizer.ggml.{name}", [])
    if not isinstance(values, list) or set(map(type, values)) - {kind}:
        raise ModelFormatError(f"{file.path}: tokenizer.ggml.{name} must be a list of {kind.__name__}")
    return values


def _ends(file: GGUFFile, *, begins: bool) -> dict[str, Any]:
    """The post-processor that adds BOS and EOS as the file's two flags say."""
    bytes_alone = byte_level(use_regex=False) | {"trim_offsets": False}
    named = _named_tokens(file)
    before, behind = _end(file, named, "bos", begins), _end(file, named, "eos", False)
    if not before and not behind:
        return bytes_alone
    template = {
        "type": "TemplateProcessing",
        "single": [*before, {"Sequence": {"id": "A", "type_id": 0}}, *behind],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            token: {"id": token, "ids": [file.metadata[f"tokenizer.ggml.{end}_token_id"]], "tokens": [token]}
            for end, token in (("bos", named.get("bos_token")), ("eos", named.get("eos_token")))
            if token is not None
        },
    }
    return {"type": "Sequence", "processors": [bytes_alone, template]}


def _end(file: GGUFFile, named: dict[str, str], name: str, default: bool) -> list[dict[str, Any]]:
    """The token as `TemplateProcessing` has it, where the file adds it; nothing where it does not."""
    token = named.get(f"{name}_token")
    if not _flag(file, f"add_{name}_token", default and token is not None):
        return []
    if token is None:
        file.refuse(f"tokenizer.ggml.add_{name}_token", f"false without tokenizer.ggml.{name}_token_id")
    return [{"SpecialToken": {"id": token, "type_id": 0}}]


def _pieces(file: GGUFFile) -> tuple[list[str], list[int]]:
    """As `_tokens`; user-defined ones have sentencepiece's mark again where llama.cpp's converter writes a space."""
    tokens, kinds = _tokens(file)
    pairs = zip(tokens, kinds, strict=True)
    return [token.replace(" ", "\u2581") if kind == _USER_DEFINED else token for token, kind in pairs], kinds


def gguf_sentencepiece(file: GGUFFile) -> bytes:
    """The tokenizer.model: a serialized sentencepiece ModelProto. Raises `ModelFormatError`."""
    tokens, kinds = _pieces(file)
    _named_tokens(file)  # their ids are those of tokens
    scores = _list(file, "scores", float)
    long = [number for number, kind in enumerate(kinds) if kind == 1 and len(tokens[number]) > 1]
    is_ranked = len(long) < 2 or len({scores[number] for number in long if number < len(scores)}) > 1
    if len(scores) != len(tokens) or not is_ranked or not all(abs(score) < 1e38 for score in scores):
        allowed = f"one finite float32 for each of the {len(tokens):,} tokens, and not all the same"
        raise ModelFormatError(f"{file.path}: tokenizer.ggml.scores must be {allowed}")
    tokens_field = b"".join(
        _message(1, _message(1, token.encode()) + b"\x15" + struct.pack("<f", score) + b"\x18" + _varint(kind))
        for token, score, kind in zip(tokens, scores, kinds, strict=True)
    )
    trainer = b"\x18\x02"  # model_type: BPE
    if _BYTE in kinds:
        trainer += _varint(35 << 3) + b"\x01"  # byte_fallback
    for number, name in ((40, "unknown"), (41, "bos"), (42, "eos"), (43, "padding")):
        token_id = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
        trainer += _varint(number << 3) + _varint((1 << 64) - 1 if token_id is None else token_id)
    if _UNKNOWN in kinds:
        trainer += _message(45, tokens[kinds.index(_UNKNOWN)].encode())
    # identity: add_dummy_prefix, not remove_extra_whitespaces, escape_whitespaces
    normalizer = _message(1, b"identity") + b"\x18\x01\x20\x00\x28\x01"
    return tokens_field + _message(2, trainer) + _message(3, normalizer)


def _message(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


@dataclass(frozen=True)
class PreTokenizer:
    """The steps of a pre-tokenizer, the last of which turns bytes into characters.

    `whole_words`: a word that is a token skips the merges (`ignore_merges`). `begins`: BOS comes first by default.
    """

    steps: tuple[dict[str, Any], ...]
    whole_words: bool = False
    begins: bool = False


def byte_level(*, use_regex: bool) -> dict[str, Any]:
    """Bytes as characters; with `use_regex` after GPT-2's splitting, which is built into `tokenizers`."""
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(*patterns: str) -> tuple[dict[str, Any], ...]:
    """Each pattern isolates its matches in what the previous one has left, and so the rest between them."""
    steps = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in patterns
    ]
    return *steps, byte_level(use_regex=False)


LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
_SEED = _QWEN2.replace(r"]+[\r\n]*|", "]+|")
_DIGITS = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}+")
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_CONTRACTION}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_CONTRACTION}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_PUNCTUATION = r"[\p{P}$+<=>^~|]+"
_EAST_ASIAN = "[\u0800-\u9fa5\uac00-\ud7ff]+"

# A name stands for the pre-tokenizer of the model's own tokenizer.json, so the table is in that file's terms. Unknown
# names are refused: a guess would give other tokens, and poor answers.
_PRE_TOKENIZERS = {
    "llama-bpe": PreTokenizer(_split(LLAMA3_PATTERN), whole_words=True, begins=True),
    "smaug-bpe": PreTokenizer(_split(LLAMA3_PATTERN)),
    "qwen2": PreTokenizer(_split(_QWEN2)),
    "seed-coder": PreTokenizer(_split(_SEED)),
    "gpt-2": PreTokenizer((byte_level(use_regex=True),)),
    "smollm": PreTokenizer(({"type": "Digits", "individual_digits": True}, byte_level(use_regex=True))),
    "tekken": PreTokenizer(_split(_TEKKEN), whole_words=True, begins=True),
    "gpt-4o": PreTokenizer(_split(_GPT4O)),
    "deepseek-coder": PreTokenizer(_split("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}")),
    "minicpm5": PreTokenizer(_split(r"\p{N}{1,3}", _DIGITS), whole_words=True),
    "default": PreTokenizer(_split(_PUNCTUATION, _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}

PRE_TOKENIZERS = _PRE_TOKENIZERS | {
    name: _PRE_TOKENIZERS[same] for _, layout in GGUF_FAMILIES.values() for name, same in layout.pre_tokenizers.items()
}
"""`tokenizer.ggml.pre` -> how byte-level BPE splits a text into words before it merges."""
