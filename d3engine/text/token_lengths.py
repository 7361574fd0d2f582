"""How few tokens a text can have: a bound by its length, for pipelines of `tokenizers` that drop nothing of a text."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Self

import tokenizers
from tokenizers import models, pre_tokenizers

MOST_COMPOSED = 4
"""Characters of a text, at most, that Unicode's NFC makes one of."""
_WHITESPACE = [character for character in map(chr, range(0x3001)) if character.isspace()]


@dataclass(frozen=True)
class TokenLengths:
    """The longest token of a vocabulary, in bytes, and what else of a text may stand for one token.

    Attributes:
        most_bytes: of a text in UTF-8 that one token stands for at most.
        composes: whether characters are composed before (NFC).
        strips: whether an added token may take whitespace around it with it.
    """

    most_bytes: int
    composes: bool
    strips: bool

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> Self | None:
        """Of a pipeline; None for one that may drop something of a text, or put a long stretch into one token."""
        composes = _normalizer_composes(_state(backend.normalizer))
        if composes is None or not _splits_only(_state(backend.pre_tokenizer)):
            return None
        is_byte_level = _has_byte_level(_state(backend.pre_tokenizer))
        vocabulary = backend.get_vocab(with_added_tokens=False)
        if not _has_every_byte(backend.model, vocabulary, is_byte_level):
            return None
        added = backend.get_added_tokens_decoder().values()
        sizes = [len(token) if is_byte_level else len(token.encode()) for token in vocabulary]
        sizes += [len(token.content.encode()) for token in added]
        return cls(max(sizes, default=1), composes, any(token.lstrip or token.rstrip for token in added))

    def fewest_tokens(self, text: str) -> int:
        """A number of tokens that `text` has at least."""
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
    """Whether a normalizer composes characters; None for one that may make a text shorter in another way."""
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
    """Whether a pre-tokenizer leaves all of a text there."""
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


def _has_every_byte(model: Any, vocabulary: dict[str, int], is_byte_level: bool) -> bool:
    """Whether no stretch of a text is unknown to a model: it would be dropped, or be one token however long it is."""
    if not isinstance(model, models.BPE):
        return False
    if is_byte_level:
        return all(character in vocabulary for character in pre_tokenizers.ByteLevel.alphabet())
    return bool(model.byte_fallback) and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
