"""The tokenizer that a GGUF file holds, as the files that a model directory has for one.

The one idea: a GGUF file has the tokens, and for the rest the name of a program. "gpt2" is byte-level BPE, which
becomes a tokenizer.json; how it splits words before that, `tokenizer.ggml.pre` only names. "llama" is sentencepiece,
whose pieces, scores and kinds become the tokenizer.model that they came from.
"""

from __future__ import annotations

import json
import struct
from typing import Any, NoReturn

from d3engine.errors import ModelFormatError, must_be
from d3engine.model.gguf_file import GGUFFile
from d3engine.model.gguf_words import WORDS, byte_level

_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
_KINDS = range(1, 7)
"""ggml's kinds of tokens are sentencepiece's own numbers: 1 is a plain one, 5 an unused one."""

_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def gguf_tokenizer_kind(file: GGUFFile) -> str | None:
    """Which file the tokenizer becomes: tokenizer.json or tokenizer.model; None for a file without one.

    Raises `ModelFormatError` for a kind of tokenizer that is not supported.
    """
    model = file.metadata.get("tokenizer.ggml.model")
    if model is None:
        return None
    if model not in ("gpt2", "llama"):
        _refuse(file, "model", "one of 'gpt2', 'llama'")
    return "tokenizer.json" if model == "gpt2" else "tokenizer.model"


def gguf_tokenizer_config(file: GGUFFile) -> dict[str, Any]:
    """The tokenizer_config.json: which tokens are special by which names. Raises `ModelFormatError`."""
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **_named_tokens(file)}
    if gguf_tokenizer_kind(file) == "tokenizer.json":
        return config
    return config | {
        "tokenizer_class": "LlamaTokenizer",
        "legacy": False,
        "add_bos_token": _flag(file, "add_bos_token", True),
        "add_eos_token": _flag(file, "add_eos_token", False),
        "add_prefix_space": _flag(file, "add_space_prefix", True),
    }


def gguf_tokenizer_json(file: GGUFFile) -> bytes:
    """The tokenizer.json of byte-level BPE. Raises `ModelFormatError`, naming the key."""
    tokens, kinds = _tokens(file)
    pre = file.metadata.get("tokenizer.ggml.pre")
    if not isinstance(pre, str) or pre not in WORDS:
        _refuse(file, "pre", f"one of {', '.join(sorted(WORDS))} (or give the model's tokenizer.json as tokenizer)")
    words = WORDS[pre]
    merges = [merge.split(" ") for merge in _list(file, "merges", str)]
    if not merges:
        raise ModelFormatError(f"{file.path}: tokenizer.ggml.merges is missing or empty")
    if _flag(file, "add_space_prefix", False):
        _refuse(file, "add_space_prefix", "false with tokenizer.ggml.model 'gpt2'")
    if not all(len(merge) == 2 for merge in merges):
        raise ModelFormatError(f"{file.path}: tokenizer.ggml.merges must be pairs with a space between")
    added = [
        {"id": number, "content": token, "special": kind == _CONTROL, **_AS_IT_IS}
        for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    pipeline = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(words.steps)},
        "post_processor": _ends(file, begins=words.begins),
        "decoder": byte_level(use_regex=False),
        "model": {
            "type": "BPE",
            "ignore_merges": words.whole_words,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": merges,
        },
    }
    return json.dumps(pipeline, ensure_ascii=False).encode("utf-8")


_AS_IT_IS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


def _named_tokens(file: GGUFFile) -> dict[str, str]:
    """The tokens that the file has a name for, by tokenizer_config.json's name."""
    tokens, _ = _tokens(file)
    named = {}
    for field, name in _NAMED.items():
        token_id = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if token_id is None:
            continue
        if type(token_id) is not int or not 0 <= token_id < len(tokens):
            _refuse(file, f"{name}_token_id", f"the id of one of its {len(tokens):,} tokens")
        named[field] = tokens[token_id]
    return named


def _refuse(file: GGUFFile, name: str, allowed: str) -> NoReturn:
    key = f"tokenizer.ggml.{name}"
    raise ModelFormatError(must_be(f"{file.path}: {key}", file.metadata.get(key), allowed))


def _flag(file: GGUFFile, name: str, default: bool) -> bool:
    value = file.metadata.get(f"tokenizer.ggml.{name}")
    if value is not None and not isinstance(value, bool):
        _refuse(file, name, "true or false")
    return default if value is None else bool(value)


def _tokens(file: GGUFFile) -> tuple[list[str], list[int]]:
    """All tokens, which are no more than the embedding has rows, and what kind each is of."""
    tokens, embedding = _list(file, "tokens", str), file.tensors.get("token_embd.weight")
    rows = len(tokens) if embedding is None else embedding.shape[0]
    if not tokens or len(tokens) > rows or len(set(tokens)) != len(tokens):
        allowed = f"from 1 to {rows:,} different strings, since the embedding has as many rows"
        raise ModelFormatError(f"{file.path}: tokenizer.ggml.tokens must be {allowed}")
    kinds = _list(file, "token_type", int) or [1] * len(tokens)
    if len(kinds) != len(tokens) or not set(kinds) <= set(_KINDS):
        allowed = f"one number from 1 to 6 for each of the {len(tokens):,} tokens"
        raise ModelFormatError(f"{file.path}: tokenizer.ggml.token_type must be {allowed}")
    return tokens, kinds


def _list(file: GGUFFile, name: str, kind: type) -> list[Any]:
    values = file.metadata.get(f"tokenizer.ggml.{name}", [])
    if not isinstance(values, list) or not all(type(value) is kind for value in values):
        raise ModelFormatError(f"{file.path}: tokenizer.ggml.{name} must be a list of {kind.__name__}")
    return values


def _ends(file: GGUFFile, *, begins: bool) -> dict[str, Any]:
    """What puts BOS before a text and EOS behind it, as the file's two flags say."""
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
    """That token in the words of `TemplateProcessing`, where the file adds it; nothing where it does not."""
    token = named.get(f"{name}_token")
    if not _flag(file, f"add_{name}_token", default and token is not None):
        return []
    if token is None:
        _refuse(file, f"add_{name}_token", f"false without tokenizer.ggml.{name}_token_id")
    return [{"SpecialToken": {"id": token, "type_id": 0}}]


def gguf_sentencepiece(file: GGUFFile) -> bytes:
    """The tokenizer.model: sentencepiece's ModelProto, in protocol buffers' own bytes. Raises `ModelFormatError`."""
    tokens, kinds = _tokens(file)
    _named_tokens(file)  # their ids are those of tokens
    scores = _list(file, "scores", float)
    long = [number for number, kind in enumerate(kinds) if kind == 1 and len(tokens[number]) > 1]
    is_ranked = len(long) < 2 or len({scores[number] for number in long if number < len(scores)}) > 1
    if len(scores) != len(tokens) or not is_ranked or not all(abs(score) < 1e38 for score in scores):
        allowed = f"one finite float32 for each of the {len(tokens):,} tokens, and not all the same"
        raise ModelFormatError(f"{file.path}: tokenizer.ggml.scores must be {allowed}")
    pieces = b"".join(
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
    return pieces + _message(2, trainer) + _message(3, normalizer)


def _message(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])
