"""A tokenizer as llguidance needs it: the bytes of every token, and one id more that stands for the end.

Which tokens end a sequence is the request's own matter (several ids, stop tokens, or none at all), so the
grammar knows one end alone, behind the vocabulary, and who asks it puts the request's in its place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from d3engine.errors import MissingExtraError, require
from d3engine.text.detokenizer import TokenTexts
from d3engine.text.tokenizer import DecoderKind, Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer


def vocabulary_of(tokenizer: Tokenizer, size: int) -> LLTokenizer:
    """The tokens of a model with `size` rows in its embedding; id `size` is the end.

    Raises `MissingExtraError` without llguidance, and `InvalidValueError` for a tokenizer whose tokens have no bytes of
    their own.
    """
    try:
        from llguidance import LLTokenizer, TokenizerWrapper
    except ImportError:
        raise MissingExtraError("llguidance", "structured", "structured_outputs") from None
    allowed = "None, since no token of this model's tokenizer stands for bytes of its own"
    require(tokenizer.kind is not DecoderKind.OTHER, "structured_outputs", tokenizer.kind.value, allowed)
    texts = TokenTexts(tokenizer)
    tokens = [texts.of(token_id)[1] for token_id in range(size)]
    special = [token_id for token_id in tokenizer.special_ids if token_id < size]
    return LLTokenizer(TokenizerWrapper(_Tokens([*tokens, b"end"], [*special, size])))


class _Tokens:
    """What `TokenizerWrapper` reads."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special_token_ids: list[int]) -> None:
        self.tokens = tokens
        self.special_token_ids = special_token_ids
        self.eos_token_id = len(tokens) - 1

    def __call__(self, text: object) -> list[int]:
        return []  # asked for forced text alone, and nothing is forced
