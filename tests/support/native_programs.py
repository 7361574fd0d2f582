"""Builds of the native library that no installation makes, each with the program that goes through odd shapes."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from d3engine.kernels.native import build

PROGRAM = Path(__file__).resolve().parents[1] / "kernels" / "native" / "odd_shapes.cpp"


FLAGS = "NATIVE_TEST_FLAGS"


def is_ports() -> bool:
    """Whether `make ports` runs, which has time for everything."""
    return FLAGS in os.environ


def left_to_ports() -> None:
    """Skip a test that takes more time than every run of the gate can have."""
    if not is_ports():
        pytest.skip("`make ports` runs it: it takes longer than the gate has time for")


def needs(*commands: str, package: str) -> None:
    """Skip a test where one of its commands is missing, by the name of what would bring it."""
    for command in commands:
        if shutil.which(command) is None:
            pytest.skip(f"there is no {command} here; `apt-get install {package}` brings it")


def needs_to_run(folder: Path, compiler: Sequence[str], flags: Sequence[str]) -> None:
    """Skip a test where what the compiler makes with these flags is not linked or does not run."""
    source, empty = folder / "empty.cpp", folder / "empty"
    source.write_text("int main() {}\n")
    built = subprocess.run([*compiler, *flags, str(source), "-o", str(empty)], capture_output=True)
    if built.returncode or subprocess.run([str(empty)], capture_output=True).returncode:
        pytest.skip(f"{compiler[0]} makes nothing that runs here with {' '.join(flags)}")


def go_through_odd_shapes(
    folder: Path, compiler: Sequence[str], flags: Sequence[str], runner: Sequence[str] = (), *, every: int = 1
) -> list[str]:
    """Build library and program in `folder`, any warning an error, and run them; the instruction sets that agreed.

    Of 16 cases, four shapes with each kind of weights, one in `every` is gone through, but by `make ports` all of them.
    `NATIVE_TEST_FLAGS` in the environment are further flags: `make ports` asks for an installation's -O3.
    """
    flags = [*flags, "-Werror"]
    library, program = folder / build.LIBRARY, folder / "odd_shapes"
    further = os.environ.get(FLAGS, "").split()
    build.compile_library(library, compiler=compiler, flags=[*flags, *further])
    paths = [f"-I{build.FOLDER}", str(PROGRAM), str(library), f"-Wl,-rpath,{folder}", "-o", str(program)]
    subprocess.run([*compiler, "-std=c++17", "-Wall", "-Wextra", *flags, *paths], check=True)
    every = 1 if is_ports() else every
    done = subprocess.run([*runner, str(program), str(every)], capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    *isas, cases = done.stdout.split()
    assert int(cases) == -(-16 // every)
    return isas
