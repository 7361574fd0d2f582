"""Files that a command writes beside what it prints: checked before the work, written whole, no loss to the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from d3engine.errors import InvalidValueError, require
from d3engine.files import is_writable, write_whole


def check_output(option: str, path: Path | None) -> None:
    """Refuse, before the work whose result it will hold, a file that cannot be written."""
    require(path is None or is_writable(path), option, str(path), "a file that can be written, in an existing folder")


def write_output(option: str, path: Path, content: str) -> None:
    """Write a file whole or not at all; raises `InvalidValueError` that names `option` where that cannot be done."""
    try:
        write_whole(path, content)
    except OSError as error:
        raise InvalidValueError(option, str(path), f"a file that can be written ({error})") from error


@contextmanager
def printing_last(show: Callable[[], None]) -> Iterator[None]:
    """Call `show` after the block, which writes files, even when it fails: a full disk must not cost the results."""
    try:
        yield
    finally:
        show()
