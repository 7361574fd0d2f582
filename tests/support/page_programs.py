"""The programs of a page that need what the gate has not: each stands behind a comment that says with what it runs."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "stacks.md"


def program_with(stack: str, addresses: dict[str, str]) -> str:
    """The program of the page of stacks, with the addresses at which a test has them."""
    (program,) = re.findall(rf"<!-- with {stack} -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    for address, here in addresses.items():
        assert address in program
        program = program.replace(address, here)
    return str(program)
