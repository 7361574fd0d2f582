"""Writes the tokenizer that a GGUF file holds as a model directory has it.

The one idea: a GGUF file has the tokens, and for the rest the name of a program. "gpt2" is byte-level BPE, which
becomes a tokenizer.json; how it splits words before that, `tokenizer.ggml.pre` only names. "llama" is sentencepiece,
whose pieces, scores and kinds become the tokenizer.model that they came from.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from d3engine.errors import ModelFormatError, TokenizerError, must_be
from d3engine.model.gguf_file import GGUFFile
from d3engine.text.tokenizer import load_tokenizer
from d3engine.text.tokenizer_faults import guarded
from d3engine.weights_tools.writing import write_json

_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
_KINDS = range(1, 7)
"""ggml's kinds of tokens are sentencepiece's own numbers: 1 is a plain one, 5 an unused one."""

_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_TEKKEN_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2, _DIGITS = "gpt2", "digits"  # `tokenizers` has these two built in
_WORDS = {
    "gpt-2": _GPT2,
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "smaug-bpe"), _LLAMA3_WORDS),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2_WORDS),
    "tekken": _TEKKEN_WORDS,
}
"""How words are split before they are merged, by `tokenizer.ggml.pre`."""
_WHOLE_WORDS = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3", "tekken"})
"""Where a word that is a token is that token, merges or not, and BOS comes first unless the file says otherwise."""

_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def add_gguf_tokenizer(file: GGUFFile, folder: Path, vocab_size: int) -> None:
    """Write tokenizer.json or tokenizer.model, tokenizer_config.json and chat_template.jinja into `folder`.

    Raises `ModelFormatError`, naming the key, for a tokenizer that is not supported or does not fit the model.
    """
    tokens, kinds = _tokens(file, vocab_size)
    config: dict[str, Any] = {}
    for field, name in _NAMED.items():
        token_id = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if token_id is not None:
            if type(token_id) is not int or not 0 <= token_id < len(tokens):
                _refuse(file, f"{name}_token_id", f"the id of one of its {len(tokens):,} tokens")
            config[field] = tokens[token_id]
    model = file.metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        content = _byte_level(file, tokens, kinds, config).encode()
        (folder / "tokenizer.json").write_bytes(content)
    elif model == "llama":
        config |= {
            "tokenizer_class": "LlamaTokenizer",
            "legacy": False,
            "add_bos_token": _flag(file, "add_bos_token", True),
            "add_eos_token": _flag(file, "add_eos_token", False),
            "add_prefix_space": _flag(file, "add_space_prefix", True),
        }
        (folder / "tokenizer.model").write_bytes(_sentencepiece(file, tokens, kinds))
    else:
        _refuse(file, "model", "one of 'gpt2', 'llama'")
    write_json(folder / "tokenizer_config.json", config)
    template = file.metadata.get("tokenizer.chat_template")
    if template is not None:
        if not isinstance(template, str):
            raise ModelFormatError(must_be(f"{file.path}: tokenizer.chat_template", template, "a string"))
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8", newline="")
    try:
        load_tokenizer(folder)
    except (ModelFormatError, TokenizerError) as error:
        raise ModelFormatError(f"{file.path}: its tokenizer cannot be loaded: {error}") from None


def _refuse(file: GGUFFile, name: str, allowed: str) -> None:
    key = f"tokenizer.ggml.{name}"
    raise ModelFormatError(must_be(f"{file.path}: {key}", file.metadata.get(key), allowed))


def _flag(file: GGUFFile, name: str, default: bool) -> bool:
    value = file.metadata.get(f"tokenizer.ggml.{name}")
    if value is not None and not isinstance(value, bool):
        _refuse(file, name, "true or false")
    return default if value is None else bool(value)


def _tokens(file: GGUFFile, vocab_size: int) -> tuple[list[str], list[int]]:
    tokens = _list(file, "tokens", str)
    if not tokens or len(tokens) > vocab_size or len(set(tokens)) != len(tokens):
        allowed = f"from 1 to {vocab_size:,} different strings, since the embedding has as many rows"
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


def _byte_level(file: GGUFFile, tokens: list[str], kinds: list[int], config: dict[str, Any]) -> str:
    """The tokenizer.json of byte-level BPE."""
    pre = file.metadata.get("tokenizer.ggml.pre")
    if pre not in _WORDS:
        _refuse(file, "pre", f"one of {', '.join(sorted(_WORDS))}")
    merges = [tuple(merge.split(" ")) for merge in _list(file, "merges", str)]
    if not all(len(merge) == 2 for merge in merges):
        raise ModelFormatError(f"{file.path}: tokenizer.ggml.merges must be pairs with a space between")
    try:
        vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
        bpe = guarded(models.BPE, vocab=vocabulary, merges=merges, ignore_merges=pre in _WHOLE_WORDS)
    except TokenizerError as error:
        raise ModelFormatError(f"{file.path}: its tokens and merges are no BPE model: {error}") from None
    backend = Tokenizer(bpe)
    words, split = _WORDS[str(pre)], pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    first: Any = pre_tokenizers.Split(Regex(words), behavior="isolated")
    if words in (_GPT2, _DIGITS):
        split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        first = pre_tokenizers.Digits(individual_digits=True) if words == _DIGITS else None
    backend.pre_tokenizer = split if first is None else pre_tokenizers.Sequence([first, split])
    backend.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, kinds, strict=True):
        if kind in (_CONTROL, _USER_DEFINED):
            backend.add_tokens([AddedToken(token, special=kind == _CONTROL, normalized=False)])
    _add_ends(file, backend, config, begins=pre in _WHOLE_WORDS)
    text: str = backend.to_str()
    return text


def _add_ends(file: GGUFFile, backend: Tokenizer, config: dict[str, Any], *, begins: bool) -> None:
    """BOS before a text and EOS behind it, as the file's two flags say."""
    byte_level = processors.ByteLevel(trim_offsets=False)
    before = [config["bos_token"]] if _flag(file, "add_bos_token", begins) and "bos_token" in config else []
    behind = [config["eos_token"]] if _flag(file, "add_eos_token", False) and "eos_token" in config else []
    backend.post_processor = byte_level
    if before or behind:
        ids = [(token, backend.token_to_id(token)) for token in dict.fromkeys([*before, *behind])]
        template = processors.TemplateProcessing(single=[*before, "$A", *behind], special_tokens=ids)
        backend.post_processor = processors.Sequence([byte_level, template])


def _sentencepiece(file: GGUFFile, tokens: list[str], kinds: list[int]) -> bytes:
    """The tokenizer.model: sentencepiece's ModelProto, in protocol buffers' own bytes."""
    scores = _list(file, "scores", float)
    if len(scores) != len(tokens) or not all(abs(score) < 1e38 for score in scores):
        allowed = f"one finite float32 for each of the {len(tokens):,} tokens"
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
