"""What a grammar of calls takes, and what is read of the calls of an answer."""

from typing import Any

from d3engine.server.requests.tools import Calling
from d3engine.server.responses.reading import CallReader


def accepts(params: Any, text: str) -> bool:
    """Whether a grammar takes a whole text, byte by byte."""
    from llguidance import LLMatcher, LLTokenizer

    from d3engine.text.structured.source import grammar_of

    matcher = LLMatcher(LLTokenizer("byte"), grammar_of(params), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    taken = matcher.try_consume_tokens(list(text.encode()))
    assert not matcher.is_error(), matcher.get_error()
    return bool(taken == len(text.encode()) and matcher.is_accepting())


def read(calling: Calling, text: str, size: int) -> tuple[str, list[tuple[str, str]], int]:
    """What comes of a text that arrives `size` characters at a time: the text, the calls, and how many pieces."""
    reader = CallReader(calling)
    parts = [text[i : i + size] for i in range(0, len(text), size)] + [""]
    pieces = [piece for nth, part in enumerate(parts) for piece in reader.read(part, is_last=nth == len(parts) - 1)]
    calls = []
    for index in range(reader.num_calls):
        own = [piece for piece in pieces if piece.index == index]
        calls.append((own[0].name or "", "".join(piece.text for piece in own)))
    return "".join(piece.text for piece in pieces if piece.index is None), calls, len(pieces)
