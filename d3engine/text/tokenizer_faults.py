"""What `tokenizers` raises, as errors of ours: it is written in Rust, and some of its faults are panics.

A panic reaches Python as a `PanicException`, which is no `Exception`: unchanged, it would pass by every handler that
keeps one request's fault from ending the engine. It cannot be imported, so it is known by its name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from d3engine.errors import TokenizerError

P = ParamSpec("P")
T = TypeVar("T")


def guarded(function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """What the library's `function` returns; raises `TokenizerError` for whatever it raises, panics included."""
    try:
        return function(*arguments, **named)
    except BaseException as fault:
        if isinstance(fault, Exception) or type(fault).__name__ == "PanicException":
            raise TokenizerError(f"the tokenizer failed: {fault}") from fault
        raise
