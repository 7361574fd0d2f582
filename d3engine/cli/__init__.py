"""The command line, `d3engine COMMAND`: its entry point.

The one idea: nothing slow is imported before somebody is there to take a Ctrl-C, so `app` comes on first use.
"""

from __future__ import annotations

import gc
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from d3engine.cli.commands import app as app


OBJECTS_BETWEEN_COLLECTIONS = 100_000
"""Python looks for garbage after so many new objects, not after 700: importing torch makes a million that all stay, and
to look through them 370 times took an eighth of the time to the first token."""


def main() -> None:
    """Entry point of the `d3engine` script."""
    try:
        gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS, *gc.get_threshold()[1:])
        from d3engine.cli.streams import prepare_streams

        prepare_streams()
        from d3engine.cli.commands import app
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    app(prog_name="d3engine")


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module 'd3engine.cli' has no attribute {name!r}")
    return getattr(import_module("d3engine.cli.commands"), name)
