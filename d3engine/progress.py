"""Progress bars, shown and hidden in one way.

A bar is for a terminal, and is silenced as messages are: by the level of
the logger "d3engine".
"""

from __future__ import annotations

import logging
import os
import sys


def hides_bars() -> bool | None:
    """`disable` of a tqdm bar: None hides it where stderr is no terminal, True everywhere (the logger is quiet)."""
    return None if logging.getLogger("d3engine").isEnabledFor(logging.WARNING) else True


def bar_columns() -> int | None:
    """`ncols` of a tqdm bar: 80 where the terminal says 0, as in some containers, of which tqdm would show nothing."""
    try:
        return None if os.get_terminal_size(sys.stderr.fileno()).columns else 80
    except (AttributeError, OSError, ValueError):  # no terminal
        return None
