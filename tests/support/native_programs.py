"""Builds of the native library that no installation makes, each with the program that goes through odd shapes."""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from d3engine.kernels.native import build

PROGRAM = Path(__file__).resolve().parents[1] / "kernels" / "native" / "odd_shapes.cpp"
GUARD_PAGES = PROGRAM.with_name("guard_pages.cpp")

FLAGS = "NATIVE_TEST_FLAGS"


def is_asked_for() -> bool:
    """Whether a run asks for these builds: `make ports`, and the gate for what is neither Clang's nor of threads."""
    return FLAGS in os.environ


def left_to_ports() -> None:
    """Skip a test that takes more time than every run of all tests can have."""
    if not is_asked_for():
        pytest.skip("`make ports` runs it: it takes longer than all tests have time for")


def needs(*commands: str, package: str) -> None:
    """Skip a test where one of its commands is missing, by the name of what would bring it."""
    for command in commands:
        if shutil.which(command) is None:
            pytest.skip(f"there is no {command} here; `apt-get install {package}` brings it")


def wine(folder: Path) -> dict[str, str]:
    """The environment in which Wine keeps its files in `folder`, and says nothing."""
    return {"WINEPREFIX": str(folder / "wine"), "WINEDEBUG": "-all"}


def needs_to_run(folder: Path, compiler: Sequence[str], flags: Sequence[str]) -> None:
    """Skip a test where what the compiler makes with these flags is not linked or does not run."""
    source, empty = folder / "empty.cpp", folder / "empty"
    source.write_text("int main() {}\n")
    built = subprocess.run([*compiler, *flags, str(source), "-o", str(empty)], capture_output=True)
    if built.returncode or subprocess.run([str(empty)], capture_output=True).returncode:
        pytest.skip(f"{compiler[0]} makes nothing that runs here with {' '.join(flags)}")


def go_through_odd_shapes(
    folder: Path,
    compiler: Sequence[str],
    flags: Sequence[str],
    runner: Sequence[str] = (),
    *,
    name: str = build.LIBRARY,
    environment: Mapping[str, str] | None = None,
) -> list[str]:
    """Build library and program in `folder`, any warning an error, and run them; the instruction sets that agreed."""
    # `NATIVE_TEST_FLAGS` in the environment are further flags: `make ports` asks for an installation's -O3.
    flags = [*flags, "-Werror"]
    library = folder / name
    further = os.environ.get(FLAGS, "").split()
    build.compile_library(library, compiler=compiler, flags=[*flags, *further])
    return run([*runner, str(link(library, compiler, flags, [PROGRAM]))], environment)


def guarded_program(folder: Path) -> str:
    """The program with the library of an installation, where each piece of memory lies between closed pages."""
    library = folder / build.LIBRARY
    build.compile_library(library)
    return str(link(library, build.find_compiler(), ("-Og", "-Werror"), [PROGRAM, GUARD_PAGES]))


def link(library: Path, compiler: Sequence[str], flags: Sequence[str], sources: Sequence[Path]) -> Path:
    """The program of these sources beside its library."""
    program = library.with_name("odd_shapes.exe" if library.suffix == ".dll" else "odd_shapes")
    paths = [f"-I{build.FOLDER}", *map(str, sources), str(library), f"-Wl,-rpath,{library.parent}", "-o", str(program)]
    subprocess.run([*compiler, "-std=c++17", "-Wall", "-Wextra", *flags, *paths], check=True)
    return program


def run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> list[str]:
    """The instruction sets that agreed, in each of 50 cases: shapes with each kind of weights."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=1800, env={**os.environ, **(environment or {})}
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
    *isas, cases = done.stdout.split()
    assert int(cases) == 50
    return isas
