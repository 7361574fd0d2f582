"""The forms that requests bring, checked and compiled once each."""

from __future__ import annotations

from functools import lru_cache
from threading import Lock
from typing import TYPE_CHECKING

from d3engine.errors import InvalidValueError, require
from d3engine.request.constraint import Form
from d3engine.request.params import StructuredOutputsParams
from d3engine.structured.checker import MOST, in_words
from d3engine.structured.grammar import Grammar
from d3engine.structured.mask_time import MaskTime
from d3engine.structured.source import grammar_of
from d3engine.structured.vocabulary import vocabulary_of
from d3engine.text.limited_process import LimitError, ProcessEndedError, ProcessLimits, ask
from d3engine.text.tokenizer import Tokenizer

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

        return Grammar(matcher, self._vocab_size, self._mask_time)

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
        reply = ask("d3engine.structured.checker:answer", {"source": source}, LIMITS)
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
