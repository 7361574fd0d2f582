"""Child processes of benchmarks, which import from this checkout."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from d3engine.utils.children import child_environment, python_command


def checkout_environment() -> dict[str, str]:
    """The environment of a child that imports `benchmarks`, wherever it is started."""
    environment = child_environment()
    paths = [str(Path(__file__).parent.parent), environment.get("PYTHONPATH", "")]
    return environment | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def ask(process: subprocess.Popen[str], given: object) -> Any:
    """What a process answers to a line of JSON: another one."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(given) + "\n")
    process.stdin.flush()
    line = process.stdout.readline()
    assert line, "the process has ended; its own message stands above"
    return json.loads(line)


class Child:
    """A module of benchmarks in a separate process, which answers one line of JSON with another."""

    def __init__(self, module: str, *arguments: str, **options: Any) -> None:
        """`options` are further ones of `Popen`."""
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        command = python_command("-m", f"benchmarks.{module}", *arguments)
        self._process = subprocess.Popen(command, env=checkout_environment(), **pipes | options)

    def ask(self, given: object) -> Any:
        """What the process answers."""
        return ask(self._process, given)

    def close(self) -> None:
        """End the process."""
        self._process.communicate()
