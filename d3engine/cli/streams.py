"""Stdin, stdout and stderr in UTF-8, usable whatever the process was started with."""

from __future__ import annotations

import os
import sys
from typing import Any


def prepare_streams() -> None:
    """Make stdin, stdout and stderr safe to use; imports nothing slow."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller: its number must not go to the next file opened
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w", encoding="utf-8"))  # noqa: SIM115
    _reconfigure(sys.stdin, **({"encoding": "utf-8"} if _is_ascii(sys.stdin) else {}), errors="surrogateescape")
    for stream in (sys.stdout, sys.stderr):
        _reconfigure(stream, errors="backslashreplace")


def _is_ascii(stream: Any) -> bool:
    return str(stream.encoding).lower() in ("ascii", "us-ascii", "ansi_x3.4-1968")


def _reconfigure(stream: Any, **settings: str) -> None:
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(**settings)


def discard_stdout() -> None:
    """Let what is still to be written to stdout go nowhere, so that the interpreter does not fail on it at its end."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    except (OSError, ValueError):  # no real file, as under a test
        pass


def given_text(text: str) -> str:
    """A text of the command line as UTF-8, also where the locale took its bytes for something else."""
    return text if is_unicode(text) else os.fsencode(text).decode("utf-8", "surrogateescape")


def is_unicode(text: str) -> bool:
    """Whether a text holds no byte that is no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
