"""Give tests the names of `test_names.toml`, with the sentences as docstrings, here and where pages name them.

    python tools/test_names.py

It may run again: names that are new already stay. The table goes when every test has a short name.
"""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAMING = ("*.md", "tools/breaks.toml")
"""Files that name tests, as FILE::NAME."""


def docstring_at(text: str, name: str) -> tuple[int, str | None]:
    """The line behind the head of a function, and its docstring."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return node.body[0].lineno, ast.get_docstring(node)
    raise KeyError(name)


def renamed(text: str, old: str, new: str, sentence: str) -> str:
    """The text of a test file with one test under its new name, and the sentence first in its docstring."""
    line, known = docstring_at(text, old)
    lines = text.splitlines(keepends=True)
    indent = re.match(r" *", lines[line - 1])
    space = indent[0] if indent else ""
    if known is None:
        lines.insert(line - 1, f'{space}"""{sentence}"""\n')
    elif not known.startswith(sentence):
        is_single = lines[line - 1].rstrip().endswith('"""') and lines[line - 1].count('"""') == 2
        rest = lines[line - 1].strip().removeprefix('"""').removesuffix('"""' if is_single else "").rstrip()
        end = f'\n{space}"""\n' if is_single else "\n"
        lines[line - 1] = f'{space}"""{sentence}\n\n{space}{rest}{end}'
    return re.sub(rf"\bdef {old}\b", f"def {new}", "".join(lines), count=1)


def main() -> None:
    table = tomllib.loads((ROOT / "tools" / "test_names.toml").read_text(encoding="utf-8"))
    for file, names in table.items():
        path = ROOT / file
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        for old, (new, sentence) in names.items():
            if re.search(rf"\bdef {old}\b", text):
                text = renamed(text, old, new, sentence)
        if text:
            path.write_text(text, encoding="utf-8")
    listed = subprocess.run(["git", "ls-files", *NAMING], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        path = ROOT / name
        text = known = path.read_text(encoding="utf-8")
        for file, names in table.items():
            for old, (new, _) in names.items():
                text = text.replace(f"{file}::{old}", f"{file}::{new}")
        if text != known:
            path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
