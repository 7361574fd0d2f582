"""Kinds of tokens: digits, the mark before an answer, line breaks, the end, words, punctuation.

The one idea: a token's kind is read off its own text, so it is known as soon as the token is: before the step that is
fed with it, and only after the step that yields it.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from d3engine.text.token_texts import TokenTexts
from d3engine.text.tokenizer import Tokenizer


class Kind(StrEnum):
    """What a token is, in the order of tables."""

    DIGITS = "digits"
    MARK = "####"
    NEWLINE = "newline"
    END = "end"
    WORDS = "words"
    PUNCTUATION = "punctuation"
    SPACES = "spaces"
    OTHER = "other"


class TokenKinds:
    """The kinds of one tokenizer's tokens; `end_ids` are those that end an answer."""

    def __init__(self, tokenizer: Tokenizer, end_ids: Collection[int]) -> None:
        self._texts = TokenTexts(tokenizer)
        self._special = tokenizer.special_ids
        self._end = frozenset(end_ids)

    def of(self, token_id: int) -> Kind:
        """A special token that ends nothing is `OTHER`, and so is a piece of a character."""
        if token_id in self._end:
            return Kind.END
        return Kind.OTHER if token_id in self._special else kind_of(self._texts.of(token_id)[0])

    def among(self, token_ids: list[int]) -> npt.NDArray[np.str_]:
        """Str [n]: the kind of each."""
        return np.array([self.of(token).value for token in token_ids], dtype=np.str_)


def kind_of(text: str) -> Kind:
    """The kind of a token with this text; spaces around something do not count, line breaks beside spaces do.

    Digits beside letters, as in "3rd", are a word; digits beside other signs are digits. `MARK` is any run of "#",
    since a vocabulary may cut GSM8K's "####" into pieces.
    """
    seen = text.strip()
    if not seen:
        return Kind.NEWLINE if "\n" in text else Kind.SPACES if text else Kind.OTHER
    if "\N{REPLACEMENT CHARACTER}" in seen:
        return Kind.OTHER
    if not seen.strip("#"):
        return Kind.MARK
    if any(character.isalpha() for character in seen):
        return Kind.WORDS
    if any(character.isdecimal() for character in seen):
        return Kind.DIGITS
    return Kind.PUNCTUATION if seen.isprintable() else Kind.OTHER
