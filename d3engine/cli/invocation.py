"""Our own commands, spelled so that they work in the shell that called us.

The one idea: a command that a user is told to type must exist there. After `make demo` the script lies in `.venv/bin`,
where no shell looks, so the way we were called ourselves is repeated.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

PROGRAM = "d3engine"


def as_typed(*words: str) -> str:
    """The command `d3engine` with these words, quoted for a shell."""
    return shlex.join([*_program(), *words])


def _program() -> list[str]:
    called = Path(sys.argv[0])
    if called.name == PROGRAM and called.is_file():
        return [_shortest(called)]
    return [_shortest(Path(sys.executable)), "-m", PROGRAM]


def _shortest(file: Path) -> str:
    """The name alone where the shell finds this very file by it; otherwise its path, from here if it lies below.

    Links are not followed: a virtual environment's python is a link to one without our package.
    """
    path = os.path.abspath(file)
    found = shutil.which(file.name)
    if found is not None and os.path.abspath(found) == path:
        return file.name
    below = os.path.relpath(path)
    return path if below.startswith(os.pardir) else os.path.join(os.curdir, below) if os.sep not in below else below
