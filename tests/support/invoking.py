"""The command line in this process, for tests of what a command says."""

import io
import json
from collections.abc import Sequence
from typing import Any

from typer.testing import CliRunner

from d3engine.cli import app


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        """It is."""
        return True


def invoke(words: Sequence[str], **settings: Any) -> Any:
    """The result of `d3engine WORDS`, its stdout and its stderr apart; `settings` as typer's runner has them."""
    try:
        runner = CliRunner(mix_stderr=False)  # type: ignore[call-arg]  # before click 8.2
    except TypeError:
        runner = CliRunner()
    return runner.invoke(app, list(words), **settings)


def succeed(words: Sequence[str], **settings: Any) -> Any:
    """The result of a command that ends with exit code 0."""
    result = invoke(words, **settings)
    assert result.exit_code == 0, result.stdout + result.stderr
    return result


def report_of(words: Sequence[str]) -> Any:
    """The report of a command that ends with exit code 0, as JSON has it."""
    return json.loads(succeed([*words, "--json"]).stdout)


def refused(words: Sequence[str], **settings: Any) -> str:
    """What a command that is refused says on stderr; it prints nothing, and ends with exit code 2."""
    result = invoke(words, **settings)
    assert (result.exit_code, result.stdout) == (2, ""), result.stdout + result.stderr
    return str(result.stderr)
