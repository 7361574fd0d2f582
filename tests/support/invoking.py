"""The command line in this process, for tests of what a command says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typer.testing import CliRunner

from d3engine.cli import app


def invoke(words: Sequence[str], **settings: Any) -> Any:
    """The result of `d3engine WORDS`, its stdout and its stderr apart; `settings` as typer's runner has them."""
    try:
        runner = CliRunner(mix_stderr=False)  # type: ignore[call-arg]  # before click 8.2
    except TypeError:
        runner = CliRunner()
    return runner.invoke(app, list(words), **settings)
