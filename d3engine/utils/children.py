"""Child processes of this Python, which search neither the working directory for modules nor get the server's keys."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from d3engine.utils.environment import API_KEY

_BOOT = """
import sys
own, *others = {paths}
sys.path[:0] = [own] if own not in sys.path else []
sys.path += [path for path in others if path not in sys.path]
from {module} import main
main()
"""
_FOLDER = str(Path(__file__).absolute().parents[2])


def python_command(*arguments: str) -> list[str]:
    """A command of this Python; PYTHONPATH counts in it, the working directory does not (`-P`)."""
    return [sys.executable or "python3", "-P", *arguments]


def main_command(module: str, *arguments: str) -> list[str]:
    """A command that calls the `main` of a module of this d3engine, with what this process can import."""
    return python_command("-c", _BOOT.format(paths=ascii(_import_paths()), module=module), *arguments)


def child_environment() -> dict[str, str]:
    """This process's environment variables without the server's keys."""
    return {name: value for name, value in os.environ.items() if name != API_KEY.name}


def _import_paths() -> list[str]:
    """Where d3engine lies, then `sys.path` without the working directory."""
    here = os.path.realpath(os.curdir)
    return [_FOLDER, *(path for path in sys.path if path and os.path.realpath(path) != here)]
