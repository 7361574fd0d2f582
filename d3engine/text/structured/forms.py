"""The forms that requests bring, checked and compiled once each."""

from __future__ import annotations

from functools import cached_property, lru_cache
from threading import Lock
from typing import TYPE_CHECKING

from d3engine.errors import InvalidValueError, MissingExtraError, require
from d3engine.request.constraint import Form
from d3engine.request.params import StructuredOutputsParams
from d3engine.text.detokenizer import TokenTexts
from d3engine.text.limited_process import LimitError, ProcessEndedError, ProcessLimits, ask
from d3engine.text.structured.checker import MOST, in_words
from d3engine.text.structured.free_text import FreeForm, FreeText
from d3engine.text.structured.grammar import Grammar, MaskTime
from d3engine.text.structured.source import grammar_of
from d3engine.text.tokenizer import DecoderKind, Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

NUM_KEPT = 64
"""Compiled forms to remember: most requests share a few."""

LIMITS = ProcessLimits(seconds=2.0, memory_bytes=512 * 1024**2)
"""What compiling one may take."""


class Forms:
    """Of one engine; threads may share it. Nothing is loaded before the first request that has a form."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._vocabulary: LLTokenizer | None = None
        self._loading = Lock()
        self._mask_time = MaskTime()
        self._compiled = lru_cache(NUM_KEPT)(self._compile)

    def compile(self, params: StructuredOutputsParams) -> Form:
        """The form that a request asks for.

        Raises `InvalidValueError` for one that cannot be compiled, that allows no answer, or that takes too much time
        or memory, and `MissingExtraError`.
        """
        return self._compiled(params)

    def _compile(self, params: StructuredOutputsParams) -> Form:
        vocabulary = self._loaded()
        from llguidance import LLMatcher
        from llguidance._lib import LLParserLimits

        source = grammar_of(params)
        _check(params, source)

        def matcher() -> LLMatcher:
            made = LLMatcher(vocabulary, source, log_level=0, limits=LLParserLimits(**MOST))
            if made.is_error():
                raise _refused(params, in_words(made.get_error()))
            return made

        made: Form = Grammar(matcher, self._vocab_size, self._mask_time)
        if params.reasoning is not None or params.openings is not None:
            made = FreeForm(made, self._free_text(params))
        return made

    def _free_text(self, params: StructuredOutputsParams) -> FreeText:
        assert self._tokenizer is not None
        marks = params.reasoning
        closing = "" if marks is None or params.reasoning_tokens is None else marks[1]
        return FreeText(
            reasoning=None if marks is None else (marks[0].encode(), marks[1].encode()),
            openings=None if params.openings is None else tuple(one.encode() for one in params.openings),
            special_ids=self._tokenizer.special_ids,
            bytes_of=self._bytes_of,
            most_reasoning=params.reasoning_tokens,
            closing_ids=tuple(self._tokenizer.encode(closing, add_special_tokens=False)) if closing else (),
            vocab_size=self._vocab_size,
        )

    @cached_property
    def _texts(self) -> TokenTexts:
        assert self._tokenizer is not None
        return TokenTexts(self._tokenizer)

    def _bytes_of(self, token: int) -> bytes:
        return self._texts.of(token)[1]

    def _loaded(self) -> LLTokenizer:
        none = "None, since the engine has no tokenizer (skip_tokenizer_init)"
        require(self._tokenizer is not None, "structured_outputs", "a form", none)
        assert self._tokenizer is not None
        with self._loading:
            if self._vocabulary is None:
                self._vocabulary = vocabulary_of(self._tokenizer, self._vocab_size)
        return self._vocabulary


def _check(params: StructuredOutputsParams, source: str) -> None:
    """Refuse what cannot be compiled within the limits, without compiling it here."""
    try:
        reply = ask("d3engine.text.structured.checker:answer", {"source": source}, LIMITS)
    except LimitError as error:
        raise _refused(params, f"to compile it takes more than {error}") from None
    except ProcessEndedError:
        raise _refused(params, "to compile it takes more stack than there is") from None
    if "failed" in reply:
        raise _refused(params, reply["failed"])


def _refused(params: StructuredOutputsParams, why: str) -> InvalidValueError:
    kinds = {
        "json": "a JSON schema",
        "regex": "a regular expression",
        "choice": "texts",
        "grammar": "a grammar",
        "json_object": "True",
    }
    return InvalidValueError(params.form, getattr(params, params.form), f"{kinds[params.form]} to answer by ({why})")


def vocabulary_of(tokenizer: Tokenizer, size: int) -> LLTokenizer:
    """The tokens of a model with `size` rows in its embedding; id `size` is the end.

    Raises `MissingExtraError` without llguidance, and `InvalidValueError` for a tokenizer whose tokens have no bytes of
    their own.
    """
    # Which tokens end a sequence is the request's own matter (several ids, stop tokens, or none at all): the grammar
    # knows one end alone, and the mask of a request has its own in place of that.
    try:
        from llguidance import LLTokenizer, TokenizerWrapper
    except ImportError:
        raise MissingExtraError("llguidance", "structured", "structured_outputs") from None
    allowed = "None, since no token of this model's tokenizer stands for single bytes"
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
