"""Special tokens, Meta's tiktoken file, and checks of tokenizer.json pipelines."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, TypeGuard

import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from d3engine.errors import ModelFormatError, must_be
from d3engine.model.gguf_metadata import LLAMA3_PATTERN
from d3engine.model.source import ModelFiles, ModelSource, files_of

# Meta's tokenizer.model of Llama 3 (llama-models, models/llama3/tokenizer.py): byte strings with ranks, in base64, as
# tiktoken reads it. The special tokens have the names of Llama 3.1's tokenizer.json.
_FIRST_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\s")
_LONGEST_TOKEN = 1024  # bytes; the longest of Llama 3 has 128
_SPECIAL_TOKENS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>",
    "<|reserved_special_token_2|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
    *(f"<|reserved_special_token_{i}|>" for i in range(3, 248)),
)
_NAMES = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}


def is_tiktoken(content: bytes) -> bool:
    """Whether a tokenizer.model is tiktoken's format, not sentencepiece's."""
    return _FIRST_LINE.match(content) is not None


def read_tiktoken(path: Path, content: bytes, config: Mapping[str, Any]) -> tuple[Tokenizer, dict[str, str]]:
    """Return the tokenizer of a file, and the names of its special tokens.

    The special tokens are those of tokenizer_config.json (`added_tokens_decoder`), without it the 256 of Llama 3.
    Raises `ModelFormatError` naming the line that is wrong.
    """
    ranks = _read_ranks(path, content)
    text = _texts(ranks)
    merges = [(text[left], text[right]) for left, right in _merges(ranks)]
    vocabulary = {text[token]: rank for token, rank in ranks.items()}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(LLAMA3_PATTERN), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    names = _add_special_tokens(path, tokenizer, len(ranks), config)
    bos = tokenizer.token_to_id(names.get("bos_token", ""))
    if bos is not None and config.get("add_bos_token") is not False:
        single = f"{names['bos_token']} $A"
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=[(names["bos_token"], bos)]
        )
    return tokenizer, names


def _read_ranks(path: Path, content: bytes) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        token, _, rank = line.partition(b" ")
        try:
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (binascii.Error, ValueError):
            raise ModelFormatError(f"{path}: line {number} must be a token in base64 and its rank") from None
    if sorted(ranks.values()) != list(range(len(content.splitlines()))):
        raise ModelFormatError(f"{path}: its tokens must have the ranks from 0 on, each once")
    if max(map(len, ranks)) > _LONGEST_TOKEN or b"" in ranks:
        raise ModelFormatError(f"{path}: a token must have 1 to {_LONGEST_TOKEN} bytes")
    if any(bytes([byte]) not in ranks for byte in range(256)):
        raise ModelFormatError(f"{path}: each of the 256 bytes must be a token")
    return ranks


def _merges(ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """Every split of a token into two others, in the order of ranks: BPE joins the pair of the lowest rank."""
    for token in sorted(ranks, key=ranks.__getitem__):
        splits = ((token[:i], token[i:]) for i in range(1, len(token)))
        known = [(left, right) for left, right in splits if left in ranks and right in ranks]
        yield from sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))


def _texts(ranks: Mapping[bytes, int]) -> dict[bytes, str]:
    character = {byte: char for char, byte in byte_of_character().items()}
    return {token: "".join(character[byte] for byte in token) for token in ranks}


def _add_special_tokens(path: Path, tokenizer: Tokenizer, first: int, config: Mapping[str, Any]) -> dict[str, str]:
    added = added_tokens(path.parent, config)
    names = named_special_tokens(config)
    if not added:
        added = {first + i: {"content": content} for i, content in enumerate(_SPECIAL_TOKENS)}
        names = _NAMES | names
    for token_id, token in sorted(added.items()):
        flags = {flag: bool(token.get(flag)) for flag in _FLAGS}
        is_special = bool(token.get("special", True))
        tokenizer.add_tokens([AddedToken(token["content"], special=is_special, normalized=False, **flags)])
        if tokenizer.token_to_id(token["content"]) != token_id:
            raise ModelFormatError(f"{path}: {token['content']!r} cannot have the id {token_id}: ids leave no gap")
    return names


_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
_ALL_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_SWITCHES = ("add_bos_token", "add_eos_token", "add_prefix_space", "legacy")
_FLAGS = ("lstrip", "rstrip", "single_word")


def read_tokenizer_config(model: ModelSource) -> dict[str, Any]:
    """Return tokenizer_config.json over special_tokens_map.json; missing files count as empty.

    Raises `ModelFormatError` when one is no JSON object, and for a switch that is neither true nor false.
    """
    files, config = files_of(model), dict[str, Any]()
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if files.has(name):
            config.update(files.read_json_object(name))
    for name in _SWITCHES:
        if not (config.get(name) is None or isinstance(config[name], bool)):
            raise ModelFormatError(must_be(f"tokenizer_config.json: {name}", config[name], "true, false or null"))
    return config


def named_special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return `{"bos_token": "<s>", ...}` for the tokens a config names (a string or an AddedToken)."""
    named = {field: _content(field, config.get(field)) for field in _NAMED_TOKENS}
    return {field: content for field, content in named.items() if content is not None}


def special_tokens(config: Mapping[str, Any]) -> dict[str, dict[str, bool]]:
    """Return every special token that a config names, with those of its flags (lstrip, ...) that are set, in order."""
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    if not isinstance(extra, list | dict):
        raise ModelFormatError(
            f"tokenizer_config.json: extra_special_tokens must be a list or an object, not {extra!r}"
        )
    values = [(field, config.get(field)) for field in _ALL_NAMED_TOKENS]
    values += [("extra_special_tokens", value) for value in (extra.values() if isinstance(extra, dict) else extra)]
    found: dict[str, dict[str, bool]] = {}
    for field, value in values:
        content = _content(field, value)
        if content:
            flags = value if isinstance(value, dict) else {}
            found.setdefault(content, {flag: True for flag in _FLAGS if flags.get(flag)})
    return found


def added_tokens(model: ModelSource, config: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Return the tokens added to the vocabulary by id: `added_tokens_decoder`, else added_tokens.json.

    Each is an AddedToken's fields. Raises `ModelFormatError` for what is malformed.
    """
    files = files_of(model)
    path = files.place("tokenizer_config.json")
    entries = config.get("added_tokens_decoder") or {}
    if not isinstance(entries, dict):
        raise ModelFormatError(f"{path}: added_tokens_decoder must be an object")
    if not entries and files.has("added_tokens.json"):
        return dict(_legacy_tokens(files, special_tokens(config)))
    added = {}
    for key, token in entries.items():
        content = token.get("content") if isinstance(token, dict) else None
        if not (_is_text(content) and content and str(key).isdecimal() and len(key) < 10):
            raise ModelFormatError(f"{path}: added_tokens_decoder must map ids to objects with a non-empty content")
        added[int(key)] = token
    return added


def _legacy_tokens(files: ModelFiles, special: Mapping[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    path = files.place("added_tokens.json")
    for content, token_id in files.read_json_object("added_tokens.json").items():
        if not (content and _is_text(content) and type(token_id) is int and token_id >= 0):
            raise ModelFormatError(f"{path}: must map non-empty tokens to ids, not {content!r} to {token_id!r}")
        yield token_id, {"content": content, "special": content in special, **special.get(content, {})}


def _content(field: str, value: object) -> str | None:
    content = value.get("content") if isinstance(value, dict) else value
    if content is not None and not _is_text(content):
        raise ModelFormatError(f"tokenizer_config.json: {field} must be a string, not {content!r}")
    return content


def _is_text(value: object) -> TypeGuard[str]:
    """Whether a value is a string without lone surrogates, which JSON can express and no text has."""
    return isinstance(value, str) and not any("\ud800" <= char <= "\udfff" for char in value)


_RARE = {*range(0x20), 0x7F, 0xC0, 0xC1, *range(0xF1, 0x100)} - set(b"\t\n")
"""Bytes that real tokenizers may lack: control characters, rare ones, and those that UTF-8 never has."""
_BYTES, _SPACE_MARK = '"ByteLevel"', "\u2581"
_FEW = 16
"""Tokens of several characters that may lack a merge: they may have been added later."""


def byte_level_bpe(pipeline: Mapping[str, Any]) -> Tokenizer:
    """As `Tokenizer.from_str` of this tokenizer.json, whose tokens need not be written as text and parsed again."""
    model = pipeline["model"]
    shell = {**pipeline, "added_tokens": [], "model": {**model, "vocab": {}, "merges": []}}
    tokenizer = Tokenizer.from_str(json.dumps(shell))
    merges = [tuple(merge.split(" ")) for merge in model["merges"]]
    tokenizer.model = models.BPE(model["vocab"], merges, ignore_merges=model["ignore_merges"])
    flags = ("special", "single_word", "lstrip", "rstrip", "normalized")
    added = [
        AddedToken(token["content"], **{flag: token[flag] for flag in flags}) for token in pipeline["added_tokens"]
    ]
    tokenizer.add_tokens(added)
    return tokenizer


def missing_in(pipeline: Mapping[str, Any]) -> str | None:
    """What a parsed tokenizer.json lacks, as the end of a sentence; None where nothing is missing.

    Without it texts become other tokens than in training.
    """
    model = pipeline["model"]
    vocabulary = {token[0] if isinstance(token, list) else token for token in model["vocab"]}
    if not vocabulary:
        return "has no tokens"
    before = json.dumps([pipeline.get("normalizer"), pipeline.get("pre_tokenizer")], ensure_ascii=False)
    behind = json.dumps(pipeline.get("decoder"), ensure_ascii=False)
    for mark in (_BYTES, _SPACE_MARK):
        if mark in behind and mark not in before:
            return f"has {mark} in its decoder, but neither in its normalizer nor in its pre_tokenizer"
    if _BYTES in before and _BYTES not in behind:
        return f"has {_BYTES} in its normalizer or pre_tokenizer, but not in its decoder"
    if _BYTES in before and model.get("unk_token") is None and not model.get("byte_fallback"):
        table = byte_of_character()
        absent = [byte for char, byte in table.items() if char not in vocabulary and byte not in _RARE]
        if absent:
            return f"has no token for {len(absent)} of the bytes of texts, such as {min(absent)}"
    if model.get("byte_fallback") and model.get("unk_token") is None:
        absent = [byte for byte in range(256) if f"<0x{byte:02X}>" not in vocabulary]
        if absent:
            return f"has no byte token <0x{absent[0]:02X}>"
    if model.get("type", "BPE") == "BPE":
        added = {token.get("content") for token in pipeline.get("added_tokens") or ()}
        return _missing_merges(model, vocabulary, added)
    return None


def _missing_merges(model: Mapping[str, Any], vocabulary: Collection[str], added: Collection[str]) -> str | None:
    """That most tokens of several characters have no merge, as the end of a sentence; else None."""
    merges = model.get("merges") or ()
    made = {merge.replace(" ", "", 1) if isinstance(merge, str) else "".join(merge) for merge in merges}
    long = {token for token in vocabulary if len(token) > 1 and not token.startswith("<0x")}.difference(added)
    unmade = len(long - made)
    if unmade <= max(_FEW, len(long) // 2):
        return None
    return f"has no merge for {unmade:,} of its {len(long):,} tokens of several characters"


MOST_COMPOSED = 4
"""Most characters of a text that Unicode's NFC composes into one."""
_WHITESPACE = [character for character in map(chr, range(0x3001)) if character.isspace()]


@dataclass(frozen=True)
class TokenLengths:
    """A bound of the tokens of a text, for pipelines of `tokenizers` that drop nothing of a text.

    Attributes:
        most_bytes: of a text in UTF-8 that one token stands for at most.
        composes: whether characters are composed first (NFC).
        strips: whether an added token may absorb whitespace around it.
    """

    most_bytes: int
    composes: bool
    strips: bool

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer, vocabulary: Mapping[str, int] | None = None) -> Self | None:
        """The bound of a pipeline; None if it may drop text, or put a long stretch into one token.

        `vocabulary` is its model's, where it is at hand: a quarter of a second otherwise.
        """
        composes = _normalizer_composes(_state(backend.normalizer))
        if composes is None or not _splits_only(_state(backend.pre_tokenizer)):
            return None
        is_byte_level = _has_byte_level(_state(backend.pre_tokenizer))
        if vocabulary is None:
            vocabulary = backend.get_vocab(with_added_tokens=False)
        if not _has_every_byte(backend.model, vocabulary, is_byte_level):
            return None
        added = backend.get_added_tokens_decoder().values()
        sizes = [len(token) if is_byte_level else len(token.encode()) for token in vocabulary]
        sizes += [len(token.content.encode()) for token in added]
        return cls(max(sizes, default=1), composes, any(token.lstrip or token.rstrip for token in added))

    def fewest_tokens(self, text: str) -> int:
        """A lower bound of the tokens of `text`."""
        if text.isascii():
            size = len(text)
        elif self.composes:
            size = len(text) // MOST_COMPOSED
        else:
            size = len(text.encode("utf-8", "surrogatepass"))
        if self.strips:
            size = max(0, size - sum(text.count(space) * len(space.encode()) for space in _WHITESPACE))
        return -(-size // self.most_bytes)


def _state(part: Any) -> Any:
    return None if part is None else json.loads(part.__getstate__())


def _normalizer_composes(normalizer: Any) -> bool | None:
    """Whether a normalizer composes characters; None if it may shorten a text in another way."""
    kind = None if normalizer is None else normalizer["type"]
    if kind in (None, "Prepend"):
        return False
    if kind == "NFC":
        return True
    if kind == "Replace":
        pattern = normalizer["pattern"].get("String")
        grows = pattern is not None and len(normalizer["content"].encode()) >= len(pattern.encode())
        return False if grows else None
    if kind == "Sequence":
        inner = [_normalizer_composes(one) for one in normalizer["normalizers"]]
        return None if None in inner else any(inner)
    return None


def _splits_only(part: Any) -> bool:
    """Whether a pre-tokenizer drops nothing of a text."""
    kind = None if part is None else part["type"]
    if kind == "Sequence":
        return all(map(_splits_only, part["pretokenizers"]))
    if kind in ("Split", "Punctuation"):
        return bool(part["behavior"] != "Removed")
    return kind in (None, "ByteLevel", "Metaspace", "Digits", "UnicodeScripts")


def _has_byte_level(part: Any) -> bool:
    if part is None:
        return False
    return part["type"] == "ByteLevel" or any(map(_has_byte_level, part.get("pretokenizers", ())))


def _has_every_byte(model: Any, vocabulary: Mapping[str, int], is_byte_level: bool) -> bool:
    """Whether a model knows every text: an unknown stretch would be dropped, or be one token of any length."""
    if not isinstance(model, models.BPE):
        return False
    if is_byte_level:
        return all(character in vocabulary for character in pre_tokenizers.ByteLevel.alphabet())
    return bool(model.byte_fallback) and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))


@cache
def byte_of_character() -> Mapping[str, int]:
    """Return GPT-2's table: printable Latin-1 characters are themselves, other bytes follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return MappingProxyType(table | {chr(0x100 + i): byte for i, byte in enumerate(others)})


def bytes_of_token(token: str) -> bytes:
    """Return the bytes that a byte-level token stands for.

    An added token may have characters outside the table; it is then plain text, as in `tokenizers`.
    """
    table = byte_of_character()
    if all(char in table for char in token):
        return bytes(table[char] for char in token)
    return token.encode("utf-8")
