"""Text to token ids and back, by a model's own tokenizer files."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from itertools import groupby
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import sentencepiece
import tokenizers

from d3engine.errors import InvalidValueError, ModelFormatError, TokenizerError
from d3engine.model.source import ModelFiles, ModelSource, files_of
from d3engine.text.tokenizer_files import (
    TokenLengths,
    added_tokens,
    byte_level_bpe,
    is_tiktoken,
    missing_in,
    named_special_tokens,
    read_tiktoken,
    read_tokenizer_config,
    special_tokens,
)

SPACE_MARK = "\u2581"  # what sentencepiece writes for a space
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# A second normalizer_spec (field 3) holding add_dummy_prefix = false (field 3). Protocol buffers merge a
# message field that occurs twice, so these four bytes behind a model are the same model without the space
# before the text.
_NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"


LONG_TEXT = 4096
"""Characters, or token ids, from which on `tokenizers` is called by functions that release the GIL."""


class DecoderKind(Enum):
    """How a tokenizer's tokens become text; streaming needs one rule for each."""

    BYTE_LEVEL = "byte_level"
    """Every character of a token stands for one byte (GPT-2's table; Llama 3)."""
    BYTE_FALLBACK = "byte_fallback"
    """Tokens are text, U+2581 a space; `<0xNN>` tokens are bytes, a run of them one unit (Llama 2)."""
    OTHER = "other"
    """Anything else: only `decode` applies the rule."""


class Tokenizer(ABC):
    """The engine's interface of a tokenizer. Immutable once loaded, so threads may share it."""

    kind: DecoderKind
    vocab_size: int
    """The highest id + 1. The embedding may have more rows than this (padding)."""
    special_ids: frozenset[int]
    special_tokens: Mapping[str, str]
    """`bos_token`, `eos_token`, `unk_token`, `pad_token` as text, where the directory names them."""
    strips_first_space: bool
    """Whether decoding drops one space at the very start (it was added by encoding)."""
    bos_token_id: int | None
    eos_token_id: int | None

    @abstractmethod
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`. Special tokens written out in it become their ids, as in transformers.

        `add_special_tokens=False` is for text that carries its own BOS: the output of a chat template.
        Raises `InvalidValueError` for text that is no valid Unicode (a lone surrogate), and `TokenizerError` where
        the tokenizer's own library fails on it.
        """

    def encode_all(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Return the ids of each text, as `encode` does."""
        return [self.encode(text, add_special_tokens) for text in texts]

    def fewest_tokens(self, text: str) -> int:
        """Return a lower bound of the tokens of `text`, much faster than encoding it."""
        return 0

    @abstractmethod
    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text; ids outside the vocabulary (padding rows of the embedding) give none.

        Raises `TokenizerError` where the tokenizer's own library fails on them.
        """

    @abstractmethod
    def convert_id_to_token(self, token_id: int) -> str | None:
        """Return the token as the vocabulary spells it, None outside the vocabulary."""

    @abstractmethod
    def is_byte_fallback(self, token_id: int) -> bool:
        """Return whether the id is a `<0xNN>` token that decodes to one byte."""


def load_tokenizer(model: ModelSource) -> Tokenizer:
    """Return the tokenizer of a model: `tokenizer.json` if there, else `tokenizer.model`, of either kind.

    Raises `ModelFormatError` naming the file, when neither is there, one is broken, or
    `tokenizer_config.json` asks for something that is not supported.
    """
    files = files_of(model)
    config = read_tokenizer_config(files)
    if files.has("tokenizer.json"):
        backend, decoder, vocabulary = _read_tokenizer_json(files)
        return FastTokenizer(files.place("tokenizer.json"), backend, decoder, config, vocabulary)
    if files.has("tokenizer.model"):
        content = files.read_bytes("tokenizer.model")
        if not is_tiktoken(content):
            return SentencePieceTokenizer(files, content, config)
        path = files.place("tokenizer.model")
        backend, names = read_tiktoken(path, content, config)
        return FastTokenizer(path, backend, {"type": "ByteLevel"}, {**config, **names})
    raise ModelFormatError(f"{files.path}: has neither tokenizer.json nor tokenizer.model")


class FastTokenizer(Tokenizer):
    """A `tokenizer.json`, or another file read into the same pipeline, run by the `tokenizers` package.

    Its post-processor alone decides on BOS and EOS, as in transformers 5: `add_bos_token` and `add_eos_token`
    of tokenizer_config.json are for tokenizer.model, which has none.
    """

    def __init__(
        self,
        path: Path,
        backend: tokenizers.Tokenizer,
        decoder: object,
        config: Mapping[str, Any],
        vocabulary: Mapping[str, int] | None = None,
    ) -> None:
        self._tokenizer = backend
        # The file may have the padding and truncation of a training run.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.special_tokens = named_special_tokens(config)
        self.bos_token_id, self.eos_token_id = _ends(path, self.special_tokens, backend.token_to_id)
        _add_special_tokens(backend, config)
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        if vocabulary is None:
            vocabulary = backend.get_vocab(with_added_tokens=False)
        self.vocab_size = max([*vocabulary.values(), *added], default=-1) + 1
        self.kind, self.strips_first_space = _classify_decoder(decoder)
        self._has_byte_fallback = "ByteFallback" in json.dumps(decoder)
        self._lengths = TokenLengths.of(backend, vocabulary)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if len(text) >= LONG_TEXT:
            return self.encode_all([text], add_special_tokens)[0]
        _require_unicode(text)
        ids: list[int] = guarded(self._tokenizer.encode, text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_all(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        if sum(map(len, texts)) < LONG_TEXT:
            return [self.encode(text, add_special_tokens) for text in texts]
        for text in texts:
            _require_unicode(text)
        # Unlike `encode`, it releases the GIL.
        found = guarded(self._tokenizer.encode_batch_fast, list(texts), add_special_tokens=add_special_tokens)
        return [one.ids for one in found]

    def fewest_tokens(self, text: str) -> int:
        return 0 if self._lengths is None else self._lengths.fewest_tokens(text)

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        known = [int(token_id) for token_id in token_ids if 0 <= token_id < self.vocab_size]
        if len(known) < LONG_TEXT:
            text: str = guarded(self._tokenizer.decode, known, skip_special_tokens=skip_special_tokens)
        else:  # releases the GIL
            (text,) = guarded(self._tokenizer.decode_batch, [known], skip_special_tokens=skip_special_tokens)
        return text

    def convert_id_to_token(self, token_id: int) -> str | None:
        if not 0 <= token_id < self.vocab_size:
            return None
        token: str | None = guarded(self._tokenizer.id_to_token, int(token_id))
        return token

    def is_byte_fallback(self, token_id: int) -> bool:
        token = self.convert_id_to_token(token_id) if self._has_byte_fallback else None
        return token is not None and byte_of_token(token) is not None


class SentencePieceTokenizer(Tokenizer):
    """A `tokenizer.model`, encoded by `sentencepiece` between the special tokens of the text.

    The space that sentencepiece puts before a text goes before the first stretch of text only, or before every stretch
    if tokenizer_config.json says `legacy: true`; `add_prefix_space: false` puts none. sentencepiece itself is the
    reference: transformers 5 converts the model to BPE merges and then splits runs of spaces otherwise than in training
    (it gives the two-space token, which has the lowest score, the highest rank).
    """

    kind = DecoderKind.BYTE_FALLBACK

    def __init__(self, files: ModelFiles, model: bytes, config: Mapping[str, Any]) -> None:
        path = files.place("tokenizer.model")
        self._prefixing = _load_sentencepiece(path, model)
        self._plain = _load_sentencepiece(path, model + _NO_DUMMY_PREFIX)
        if config.get("add_prefix_space") is False:
            self._prefixing = self._plain
        self._later = self._prefixing if config.get("legacy") else self._plain
        self.strips_first_space = self._prefixing.normalize("a").startswith(SPACE_MARK)
        tokens = {i: self._plain.id_to_piece(i) for i in range(self._plain.piece_size())}
        special = {i for i in tokens if self._plain.is_control(i) or self._plain.is_unknown(i)}
        added = _added_tokens(files, config, tokens)
        self._tokens = tokens | {i: token["content"] for i, token in added.items()}
        self.special_ids = frozenset(special | {i for i, token in added.items() if token.get("special", True)})
        self.vocab_size = max(self._tokens) + 1
        self._whole = {self._tokens[i]: i for i in special | added.keys()}
        longest_first = sorted(self._whole, key=len, reverse=True)
        self._split = re.compile("(" + ("|".join(map(re.escape, longest_first)) or "(?!)") + ")")
        self._name_special_tokens(path, config)
        self._prefix = [self.bos_token_id] if config.get("add_bos_token") is not False else []
        self._suffix = [self.eos_token_id] if config.get("add_eos_token") else []

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        _require_unicode(text)
        ids: list[int] = []
        for index, stretch in enumerate(self._split.split(text)):
            if stretch in self._whole:
                ids.append(self._whole[stretch])
            elif stretch:
                ids.extend(guarded((self._later if index else self._prefixing).encode, stretch))
        if not add_special_tokens:
            return ids
        return [i for i in (*self._prefix, *ids, *self._suffix) if i is not None]

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        shown = (i for i in token_ids if i in self._tokens)
        tokens = (self._tokens[i] for i in shown if not (skip_special_tokens and i in self.special_ids))
        text = join_byte_fallback_tokens(tokens)
        return text.removeprefix(" ") if self.strips_first_space else text

    def convert_id_to_token(self, token_id: int) -> str | None:
        return self._tokens.get(token_id)

    def is_byte_fallback(self, token_id: int) -> bool:
        return token_id in self._tokens and byte_of_token(self._tokens[token_id]) is not None

    def _name_special_tokens(self, path: Path, config: Mapping[str, Any]) -> None:
        """Take BOS and EOS from tokenizer_config.json, else from the model itself."""
        ids = {token: i for i, token in self._tokens.items()}
        own = {"bos_token": self._plain.bos_id(), "eos_token": self._plain.eos_id(), "unk_token": self._plain.unk_id()}
        from_model = {field: self._tokens[i] for field, i in own.items() if i >= 0}
        self.special_tokens = from_model | named_special_tokens(config)
        self.bos_token_id, self.eos_token_id = _ends(path, self.special_tokens, ids.get)


def byte_of_token(token: str) -> int | None:
    """Return the byte that a `<0xNN>` token stands for, None for every other token."""
    match = _BYTE_TOKEN.fullmatch(token) if token.startswith("<0x") else None  # as few do
    return int(match[1], 16) if match else None


def text_of_byte_run(run: bytes) -> str:
    """Return the text of a run of byte tokens: as UTF-8 if valid, otherwise one U+FFFD for each byte.

    The rule is the ByteFallback decoder's of `tokenizers`; one bad byte spoils its whole run.
    """
    try:
        return run.decode("utf-8")
    except UnicodeDecodeError:
        return "\ufffd" * len(run)


def join_byte_fallback_tokens(tokens: Iterable[str]) -> str:
    """Return the text of sentencepiece tokens: U+2581 is a space, runs of `<0xNN>` are bytes."""
    parts = []
    for is_run, group in groupby(((byte_of_token(token), token) for token in tokens), lambda pair: pair[0] is not None):
        if is_run:
            parts.append(text_of_byte_run(bytes(byte for byte, _ in group if byte is not None)))
        else:
            parts.extend(token.replace(SPACE_MARK, " ") for _, token in group)
    return "".join(parts)


def _read_tokenizer_json(files: ModelFiles) -> tuple[tokenizers.Tokenizer, object, dict[str, int] | None]:
    """Return the pipeline of a tokenizer.json, its decoder section, and its vocabulary where that has the ids.

    Raises `ModelFormatError`.
    """
    path, pipeline = files.place("tokenizer.json"), files.byte_level_bpe()
    source = "" if pipeline is not None else files.read_text("tokenizer.json")
    try:
        if pipeline is not None:
            backend = guarded(byte_level_bpe, pipeline)
        else:
            pipeline = json.loads(source)
            backend = guarded(tokenizers.Tokenizer.from_str, json.dumps(pipeline) if _mend(pipeline) else source)
        missing = missing_in(pipeline)
    except Exception as error:
        raise ModelFormatError(f"{path}: is no valid tokenizer.json: {error}") from error
    if missing is not None:
        raise ModelFormatError(f"{path}: {missing}")
    vocabulary = pipeline["model"]["vocab"]
    return backend, pipeline.get("decoder"), vocabulary if isinstance(vocabulary, dict) else None


def _mend(pipeline: Mapping[str, Any]) -> bool:
    """Whether it has special tokens that are normalized, as Llama 2's first tokenizer.json; no longer has them.

    Its normalizer puts a space mark before each of them too, so that none is found after another one ("</s><s>").
    """
    torn = [token for token in pipeline.get("added_tokens") or () if token.get("special") and token.get("normalized")]
    for token in torn:
        token["normalized"] = False
    return bool(torn)


def _add_special_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Make every special token that the config names one that is never split, as transformers does."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for content, flags in special_tokens(config).items():
        if content not in known:
            backend.add_tokens([tokenizers.AddedToken(content, special=True, normalized=False, **flags)])


def _classify_decoder(decoder: Any) -> tuple[DecoderKind, bool]:
    """Return the kind of a tokenizer.json's decoder section, and whether it strips one space at the start."""
    if not isinstance(decoder, dict):
        return DecoderKind.OTHER, False
    if decoder.get("type") == "ByteLevel":
        return DecoderKind.BYTE_LEVEL, False
    steps = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else []
    replace = {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    llama = [replace, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if steps in (llama, [*llama, strip]):
        return DecoderKind.BYTE_FALLBACK, len(steps) > len(llama)
    return DecoderKind.OTHER, False


def _load_sentencepiece(path: Path, model: bytes) -> Any:
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(model)
    except (RuntimeError, OSError) as error:
        raise ModelFormatError(f"{path}: is no valid sentencepiece model: {error}") from error
    if processor.piece_size() == 0:
        raise ModelFormatError(f"{path}: is no valid sentencepiece model: it has no pieces")
    return processor


def _added_tokens(files: ModelFiles, config: Mapping[str, Any], tokens: Mapping[int, str]) -> dict[int, dict[str, Any]]:
    """Return the tokens added to the model's own, by id; raises `ModelFormatError` where one contradicts the model.

    A named token without an id gets the next one, as in transformers; BOS and EOS must have one.
    """
    added = added_tokens(files, config)
    ids = {token: i for i, token in tokens.items()} | {token["content"]: i for i, token in added.items()}
    ends = [config.get(field) for field in ("bos_token", "eos_token")]
    for content, flags in special_tokens(config).items():
        is_end = any(content == (end.get("content") if isinstance(end, dict) else end) for end in ends)
        if content not in ids and not is_end:
            ids[content] = max(ids.values()) + 1
        if content in ids:
            added.setdefault(ids[content], {"content": content, **flags})
    for token_id, token in added.items():
        where = f"{files.place('tokenizer_config.json')}: added token {token_id}"
        for flag in ("lstrip", "rstrip", "single_word"):
            if token.get(flag):
                raise ModelFormatError(f"{where}: {flag} is not supported with tokenizer.model")
        if tokens.get(token_id, token["content"]) != token["content"]:
            raise ModelFormatError(f"{where} is {token['content']!r}, tokenizer.model has {tokens[token_id]!r}")
    return added


def _ends(path: Path, named: Mapping[str, str], id_of: Callable[[str], int | None]) -> tuple[int | None, int | None]:
    """The ids of BOS and EOS; raises `ModelFormatError` where one is named and not in the vocabulary."""
    ids = {field: id_of(named[field]) for field in ("bos_token", "eos_token") if field in named}
    for field, token_id in ids.items():
        if token_id is None:
            said = f"names {field} {named[field]!r}, which is not in the vocabulary"
            raise ModelFormatError(f"{path}: tokenizer_config.json {said}")
    return ids.get("bos_token"), ids.get("eos_token")


def _require_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidValueError("prompt", text, "text without lone surrogates") from None


P = ParamSpec("P")
T = TypeVar("T")


def guarded(function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Call a function of `tokenizers`; raises `TokenizerError` for any of its errors, panics included."""
    # A panic in Rust becomes a `PanicException`, which is no `Exception`: handlers that keep one request's fault from
    # ending the engine would miss it. It cannot be imported, so it is recognised by name.
    try:
        return function(*arguments, **named)
    except BaseException as fault:
        if isinstance(fault, Exception) or type(fault).__name__ == "PanicException":
            raise TokenizerError(f"the tokenizer failed: {fault}") from fault
        raise
