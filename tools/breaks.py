"""Break the product on purpose, one place after the other, and say whether the named tests fail.

    python tools/breaks.py [NAME ...]     # all breaks, or those whose name has one of these words

The breaks are made in a copy of the tree, in which the named tests must first pass. Exit status 1 where a break is
unseen. A test of the gate holds the table to the code.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NATIVE = "kernels/native"
BUILT = (f"{NATIVE}/libd3native.so", "d3engine/server/page/vendor")
"""What the tests read and git does not keep."""
FAILED = 1
"""pytest's exit status where a test has failed; others are errors of the run, such as a module without a test."""


@dataclass(frozen=True)
class Break:
    """A text of `file`, which occurs there once, what stands in its place, and tests that must see it."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def is_compiled(self) -> bool:
        """Whether the native library is to be built again."""
        return self.file.endswith((".cpp", ".h", ".inc"))


def table() -> list[Break]:
    """The breaks of `breaks.toml`, in its order."""
    found = tomllib.loads((ROOT / "tools" / "breaks.toml").read_text(encoding="utf-8"))
    return [Break(name, one["file"], one["old"], one["new"], tuple(one["tests"])) for name, one in found.items()]


def copy_tree(to: Path) -> None:
    """Copy what git keeps, what it would not ignore, and what is built."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for name in listed.splitlines():
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, to / name)
    for name in BUILT:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, to / name, dirs_exist_ok=True)
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, to / name)


def run_tests(tree: Path, tests: Sequence[str]) -> tuple[int, str]:
    """The exit status of pytest over these tests of a tree, and what it has said."""
    options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--timeout", "600"]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "NO_SHRINKING": "1"}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def build(tree: Path) -> None:
    """Compile the native library without optimization, which takes a fifth of the time and changes no bit."""
    program = "import runpy; b = runpy.run_path({!r}); b['compile_library'](b['FOLDER'] / b['LIBRARY'], flags=('-O0',))"
    subprocess.run([sys.executable, "-c", program.format(f"{NATIVE}/build.py")], cwd=tree, check=True)


@contextmanager
def broken(tree: Path, one: Break) -> Iterator[None]:
    """A tree with a break in it; the library before it is kept."""
    file, library = tree / one.file, tree / BUILT[0]
    whole = file.read_text(encoding="utf-8")
    assert whole.count(one.old) == 1, f"{one.name}: its old text does not stand once in {one.file}"
    kept = library.read_bytes() if one.is_compiled else b""
    try:
        file.write_text(whole.replace(one.old, one.new), encoding="utf-8")
        if one.is_compiled:
            build(tree)
        yield
    finally:
        file.write_text(whole, encoding="utf-8")
        if kept:
            library.with_suffix(".kept").write_bytes(kept)
            library.with_suffix(".kept").replace(library)


def is_seen(tree: Path, one: Break) -> bool:
    """Whether the tests of a break fail with it, or end the process."""
    with broken(tree, one):
        status, said = run_tests(tree, one.tests)
    if status > FAILED:
        sys.exit(f"{one.name}: pytest ends with {status}\n{said}")
    return status != 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", help="words; breaks whose name has one of them are made [default: all]")
    names = parser.parse_args().names
    chosen = [one for one in table() if not names or any(name in one.name for name in names)]
    if not chosen:
        parser.error(f"no break has a name with {' or '.join(names)}")
    with tempfile.TemporaryDirectory(prefix="breaks-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        build(tree)
        status, said = run_tests(tree, sorted({test for one in chosen for test in one.tests}))
        if status:
            print(said)
            sys.exit("the tests must pass before anything is broken")
        unseen = []
        for one in chosen:
            begun = time.monotonic()
            seen = is_seen(tree, one)
            unseen += [] if seen else [one.name]
            print(f"{'seen' if seen else 'UNSEEN':6} {one.name} ({time.monotonic() - begun:.0f} s)", flush=True)
    print(f"{len(chosen) - len(unseen)} of {len(chosen)} breaks are seen" + "".join(f"\n  {name}" for name in unseen))
    return 1 if unseen else 0


if __name__ == "__main__":
    sys.exit(main())
