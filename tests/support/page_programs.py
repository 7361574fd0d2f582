"""The programs of the pages. What needs more than Python stands behind a comment that says with what it runs."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
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
