"""The programs of the pages. What needs more than Python stands behind a comment that says with what it runs."""

import re
import shlex
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
SHELL = re.compile(r"```sh\n(.*?)```", re.DOTALL)
PRINTED = re.compile(r"print\(.*\)  # (?:.*: )?(.*\d.*)$", re.MULTILINE)


def program_with(stack: str, addresses: dict[str, str], page: str = "reference/stacks.md") -> str:
    """The program of a page, with the addresses at which a test has them."""
    (program,) = re.findall(rf"<!-- with {stack} -->\n```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    for address, here in addresses.items():
        assert address in program
        program = program.replace(address, here)
    return str(program)


def printed(program: str) -> list[re.Pattern[str]]:
    """What a program prints by its own comments, those with a figure: `print(x)  # maybe words: [16, 14, ...]`."""
    return [re.compile(".*".join(map(re.escape, said.split("...")))) for said in PRINTED.findall(program)]


def run_program(program: str, num_printed: int, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a program, which must print what its comments say; what it has printed."""
    exec(compile(program, "page.md", "exec", dont_inherit=True), {})
    shown = capsys.readouterr().out
    said = printed(program)
    assert len(said) == num_printed
    for pattern in said:
        assert pattern.search(shown), shown
    return shown


def curls(page: str) -> list[list[str]]:
    """The words of a page's curl commands."""
    text = "\n".join(SHELL.findall((DOCS / page).read_text())).replace("\\\n", "")
    return [shlex.split(line) for line in text.splitlines() if line.startswith("curl ")]
