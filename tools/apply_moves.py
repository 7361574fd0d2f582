"""Apply tools/moves: rewrite imports, dotted strings, paths and names in the whole repository, and delete aliases.

python tools/apply_moves.py
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import renames

ROOT = Path(__file__).resolve().parents[1]
MOVES = ROOT / "tools/moves"
SUFFIXES = (
    ".py",
    ".md",
    ".toml",
    ".yml",
    ".yaml",
    ".sh",
    ".html",
    ".js",
    ".cpp",
    ".h",
    ".inc",
    "Makefile",
    ".json",
    ".in",
)


def table(pattern: str) -> dict[str, str]:
    lines = [line.split() for path in sorted(MOVES.glob(pattern)) for line in path.read_text().splitlines()]
    return {line[0]: line[1] for line in lines if line}


def files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    kept = (name for name in listed if name.endswith(SUFFIXES) and not name.startswith(("tools/", "CHANGELOG")))
    return [ROOT / name for name in kept if (ROOT / name).is_file() and not (ROOT / name).is_symlink()]


def place(module: str) -> str:
    """Where a module's source is, without its suffix, in this repository."""
    return re.sub(r"^d3engine/(kernels|weights_tools)\b", r"\1", module.replace(".", "/"))


def with_modules_imported(text: str, moves: dict[str, str]) -> str:
    """`from package import module`, alone or among others, which the dotted form does not show.

    A new package stands behind a NUL, by which it is not taken for one to be rewritten.
    """

    def split(found: re.Match[str]) -> str:
        indent, package, names = found[1], found[2], found[3].strip("()").replace("\n", " ")
        kept, lines = [], []
        for name in filter(None, (part.strip() for part in names.split(","))):
            module, _, alias = name.partition(" as ")
            old = f"{package}.{module}"
            if old in moves:
                to, _, to_name = moves[old].rpartition(".")
                alias = alias or (module if module != to_name else "")
                lines.append(f"{indent}from \0{to} import {to_name}{f' as {alias}' if alias else ''}")
            else:
                kept.append(name)
        if not lines:
            return found[0]
        return "\n".join([*lines, *([f"{indent}from {package} import {', '.join(kept)}"] if kept else [])])

    return re.sub(r"^([ \t]*)from (d3engine[\w.]*) import (\([^)]*\)|[^\n(#]*)$", split, text, flags=re.M)


def rewritten(text: str, moves: dict[str, str], is_python: bool) -> str:
    spelled = dict(moves)
    if is_python:
        text = with_modules_imported(text, moves)
    for old, new in moves.items():
        path, to_path = place(old), place(new)
        spelled |= {path: to_path, f"{path}.py": f"{to_path}.py"} if "/" in path else {f"{path}.py": f"{to_path}.py"}
        short, to_short = path.removeprefix("d3engine/"), to_path.removeprefix("d3engine/")
        if "/" in short:
            spelled[f"{short}.py"] = f"{to_short}.py"
    ways = "|".join(map(re.escape, sorted(spelled, key=len, reverse=True)))
    found = re.sub(rf"(?<![\w./\0])(?:{ways})(?!\w)|(?<=\./)(?:{ways})(?!\w)", lambda found: spelled[found[0]], text)
    return found.replace("\0", "")


def main() -> None:
    moves = {old: new for old, new in table("*.txt").items() if "." in old}
    names = {old: new for old, new in table("*-names.txt").items() if "." not in old}
    for old in moves:
        for path in (ROOT / f"{place(old)}.py", ROOT / place(old) / "__init__.py"):
            if path.is_file() and "sys.modules[__name__]" in path.read_text():
                path.unlink()
    for path in files():
        old = path.read_text(encoding="utf-8")
        new = rewritten(old, moves, path.suffix == ".py")
        if names:
            new = renames.in_python(new, names) if path.suffix == ".py" else renames.in_words(new, names)
        if new != old:
            path.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
