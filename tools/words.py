"""Find words that docs, docstrings, comments and help of this repository do without, and test names that are sentences.

    python tools/words.py          # exit status 1 and a line for each

docs/reference/glossary.md has the words of the field for what these stand for. The actor is the subject of a sentence.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BANNED = re.compile(
    r"\b(so many|whoever|somebody|nobody|comes to|(?:is|are) told|reads? along|that is so|the one idea)\b",
    re.IGNORECASE,
)
CHECKED = ("d3engine/*.py", "kernels/*.py", "weights_tools/*.py", "tools/*.py", "README.md", "docs/*.md")
SAID = ("require(", "allowed = ", "'copy' or", "This server", '"description"')
"""What lines of texts for users have, which a release does not reword."""

LONG_NAME = re.compile(r"def (test_\w{56,})")


def listed(*patterns: str) -> list[str]:
    """The files that git keeps under these names."""
    command = ["git", "ls-files", *patterns]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


def main() -> int:
    found = 0
    for name in listed("tests/*.py"):
        for test in LONG_NAME.findall((ROOT / name).read_text(encoding="utf-8")):
            print(f"{name}: {test} has {len(test)} characters: 60 are the most, the sentence is the docstring")
            found += 1
    for name in listed(*CHECKED):
        for number, line in enumerate((ROOT / name).read_text(encoding="utf-8").splitlines(), 1):
            for word in () if any(mark in line for mark in SAID) or name == "tools/words.py" else BANNED.findall(line):
                print(f"{name}:{number}: {word!r}: name the actor, or use the term of docs/reference/glossary.md")
                found += 1
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
