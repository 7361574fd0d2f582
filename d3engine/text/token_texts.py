"""What a single token contributes to a text in its place: bytes, and the text that they are.

The one idea: the bytes of the tokens that a text shows, joined, are the bytes of that text, whatever characters the
tokens cut in halves. `Tokenizer.decode` of one id alone says something else: it drops the space at a text's beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from d3engine.text.byte_level import bytes_of_piece
from d3engine.text.tokenizer import SPACE_MARK, DecoderKind, Tokenizer, byte_of_token

TokenText: TypeAlias = tuple[str, bytes]
"""A token's text and its bytes; the text has U+FFFD for what is no whole character."""


class TokenTexts:
    """The texts of one tokenizer's tokens, each found once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._within: dict[int, TokenText] = {}
        self._first: dict[int, TokenText] = {}

    def of(self, token_id: int, *, is_first: bool = False) -> TokenText:
        """What the token adds to a text, or what it is where no other one stands before it (`is_first`).

        Special tokens read as they are spelled, and ids beyond the vocabulary are empty. Where only `decode` itself
        knows how tokens become text (`DecoderKind.OTHER`), half a character has the bytes of U+FFFD.

        Raises `TokenizerError` where the tokenizer's own library fails on the id.
        """
        known = self._first if is_first else self._within
        if token_id not in known:
            found = self._bytes(token_id, is_first)
            known[token_id] = found.decode("utf-8", errors="replace"), found
        return known[token_id]

    def placed(self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> PlacedTexts:
        """The texts of tokens in the places of this prompt and of its answer."""
        hidden = self._tokenizer.special_ids if skip_special_tokens else frozenset()
        return PlacedTexts(self, prompt_token_ids, hidden)

    def _bytes(self, token_id: int, is_first: bool) -> bytes:
        tokenizer = self._tokenizer
        piece = tokenizer.convert_id_to_token(token_id)
        if piece is None:
            return b""
        if tokenizer.kind is DecoderKind.BYTE_LEVEL:
            return bytes_of_piece(piece)
        byte = byte_of_token(piece) if tokenizer.is_byte_fallback(token_id) else None
        if byte is not None or tokenizer.kind is DecoderKind.BYTE_FALLBACK:
            text = piece.replace(SPACE_MARK, " ").encode("utf-8") if byte is None else bytes([byte])
            return text.removeprefix(b" ") if is_first and tokenizer.strips_first_space else text
        alone = tokenizer.decode([token_id], skip_special_tokens=False)
        twice = tokenizer.decode([token_id, token_id], skip_special_tokens=False)
        return (alone if is_first or not twice.startswith(alone) else twice[len(alone) :]).encode("utf-8")


class PlacedTexts:
    """What tokens read as in the places of one prompt and its answer, of which `hidden` ids are in no text."""

    def __init__(self, texts: TokenTexts, prompt_token_ids: Sequence[int], hidden: frozenset[int]) -> None:
        self._texts = texts
        self._hidden = hidden
        shown = (place for place, token in enumerate(prompt_token_ids) if token not in hidden)
        self._begins = next(shown, len(prompt_token_ids))

    def at(self, place: int, token_id: int) -> TokenText:
        """A token's text at this place, counted from the prompt's first token."""
        return self._texts.of(token_id, is_first=place <= self._begins)

    def grow(self, token_id: int, place: int) -> None:
        """The answer has this token at this place."""
        if place == self._begins and token_id in self._hidden:
            self._begins += 1
