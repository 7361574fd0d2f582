"""Progress bars, for terminals alone, and silenced as messages are: by the level of the logger "d3engine"."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def hides_bars() -> bool | None:
    """`disable` of a tqdm bar: None hides it where stderr is no terminal, True everywhere (the logger is quiet)."""
    return None if logging.getLogger("d3engine").isEnabledFor(logging.WARNING) else True


def shows_bars() -> bool:
    """Whether a bar would be seen."""
    return sys.stderr.isatty() and not hides_bars()


def bar_columns() -> int | None:
    """`ncols` of a tqdm bar: 80 where the terminal says 0, as in some containers, of which tqdm would show nothing."""
    try:
        return None if os.get_terminal_size(sys.stderr.fileno()).columns else 80
    except (AttributeError, OSError, ValueError):  # no terminal
        return None


def progress_bar(name: str | None, unit: str, total: int | None, **more: Any) -> Any:
    """A tqdm bar that goes when it is full; `more` are further options of tqdm."""
    from tqdm import tqdm

    options = {"desc": name, "unit": unit, "disable": hides_bars(), "ncols": bar_columns(), "leave": False}
    return tqdm(total=total, **{**options, **more})


@contextmanager
def counting(name: str, unit: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar; yields the function to call after each unit."""
    with progress_bar(name, unit, total) as bar:
        yield lambda: bar.update() and None
