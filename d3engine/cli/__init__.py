"""The command line, `d3engine COMMAND`: its entry point."""

from __future__ import annotations

import os
import sys
from _thread import interrupt_main
from importlib import import_module
from threading import Timer
from typing import TYPE_CHECKING, Any

from d3engine.utils.garbage import collect_seldom

if TYPE_CHECKING:
    from d3engine.cli.commands import app as app


def main() -> None:
    """Entry point of the `d3engine` script."""
    sys.unraisablehook = _deliver_again
    os.environ["PYTHONSAFEPATH"] = "1"  # no Python that a library starts searches the working directory for modules
    try:
        collect_seldom()
        from d3engine.cli.streams import prepare_streams

        prepare_streams()
        from d3engine.cli.commands import app
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    app(prog_name="d3engine")


def _deliver_again(swallowed: Any) -> None:
    """Let a Ctrl-C end the command that came in a callback, such as imports run: Python drops what is raised there."""
    if swallowed.exc_type is KeyboardInterrupt:
        Timer(0.01, interrupt_main).start()  # in a thread, since a signal of this one would be raised here again
    else:
        sys.__unraisablehook__(swallowed)


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module 'd3engine.cli' has no attribute {name!r}")
    return getattr(import_module("d3engine.cli.commands"), name)
