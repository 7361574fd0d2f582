"""Whether a grammar compiles within limits of time and stack, asked in a process that can
be killed; llguidance's own limits miss some. Imports little."""

from __future__ import annotations

import re
import threading
from typing import Any

from d3engine.errors import cut

MOST: dict[str, Any] = {"max_lexer_states": 30_000, "max_grammar_size": 100_000, "verbose_errors": False}
"""llguidance's own limits, for compiling and for every step, where its defaults are too generous for a server."""

_STACK_BYTES = 1 << 20
"""Less than any thread has that compiles a grammar to use it."""


_SPECIAL = re.compile(r"^(special_\d+:) <\[\d+\]>$", re.MULTILINE)
"""A rule that is one special token, by its id."""


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Why the grammar `source` allows no answer: {"failed": why}, or nothing."""
    failed: list[str] = []
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=lambda: failed.append(_fault(request["source"])))
    thread.start()
    thread.join()
    return {"failed": failed[0]} if failed[0] else {}


def _fault(source: str) -> str:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import LLParserLimits

    source = _SPECIAL.sub(r"\1 /\\x00/", source)  # this tokenizer has bytes alone
    matcher = LLMatcher(LLTokenizer("byte"), source, log_level=0, limits=LLParserLimits(**MOST))
    if not matcher.is_error():
        matcher.compute_bitmask()  # the first one compiles the rest
    return in_words(matcher.get_error())


def in_words(error: str) -> str:
    """The sentence in an error of llguidance's, cut to size and without the source that it quotes."""
    sentence = re.split(r"\n +\d+ \|", error)[0].replace("\n<non-verbose/>", "").strip()
    if sentence.startswith("NoExtension"):
        return "it allows no answer"
    if "regex parse error" in sentence:
        sentence = sentence.rpartition("error: ")[2]
    return cut(re.sub(r"^at 1\(8\): (failed to compile JSON schema: )?", "", sentence))
