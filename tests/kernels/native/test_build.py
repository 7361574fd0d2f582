"""Building the library, and the messages where that fails."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from d3engine.kernels.native import build
from d3engine.kernels.native.library import LibraryMissing, load

ROOT = Path(__file__).resolve().parents[3]


def test_install_without_a_compiler_warns_and_goes_on(tmp_path: Path) -> None:
    """The warning says what is missing and what that costs."""
    setup = [sys.executable, "setup.py", "build_ext", "--build-lib", str(tmp_path)]
    done = subprocess.run(
        setup, cwd=ROOT, env=os.environ | {"CXX": "no-such-compiler"}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert "there is no C++ compiler 'no-such-compiler'" in done.stderr
    assert done.stderr.count("two to fifty times slower") == 1
    assert not list(tmp_path.rglob("*.so"))


def test_a_compiler_that_refuses_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(build.BuildError, match=r"false -dumpmachine failed:\nin silence"):
        build.compile_library(tmp_path / build.LIBRARY)
    monkeypatch.setenv("CXX", "no-such-compiler -O1")
    with pytest.raises(build.BuildError, match="no C\\+\\+ compiler 'no-such-compiler'"):
        build.find_compiler()


def test_a_library_of_the_very_sources_is_not_compiled_again(tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\ntest "$1" = -dumpmachine && echo {platform.machine()}-linux\n')
    compiler.chmod(0o755)
    build.compile_library(tmp_path / "again.so", compiler=[str(compiler)])
    assert (tmp_path / "again.so").read_bytes() == (build.FOLDER / build.LIBRARY).read_bytes()
    with pytest.raises(build.BuildError, match="in silence"):
        build.compile_library(tmp_path / "other.so", compiler=[str(compiler)], flags=["-O1"])
    compiler.write_text('#!/bin/sh\ntest "$1" = -dumpmachine && echo riscv64-linux\n')
    with pytest.raises(build.BuildError, match="in silence"):  # it is for this machine only
        build.compile_library(tmp_path / "other.so", compiler=[str(compiler)])


def test_a_library_that_was_built_of_other_sources_is_not_used(tmp_path: Path) -> None:
    built = build.FOLDER / build.LIBRARY
    with pytest.raises(LibraryMissing, match="was not built"):
        load(tmp_path / build.LIBRARY)
    for path in (*build.sources(), built):
        copied = tmp_path / path.relative_to(build.FOLDER)
        copied.parent.mkdir(exist_ok=True)
        shutil.copy(path, copied)
    load(tmp_path / build.LIBRARY)
    with (tmp_path / "abi.h").open("a") as file:
        file.write("// another\n")
    with pytest.raises(LibraryMissing, match="older than its sources"):
        load(tmp_path / build.LIBRARY)
    broken = tmp_path / "broken.so"
    broken.write_text("no library")
    with pytest.raises(LibraryMissing, match="cannot be loaded"):
        load(broken)


def test_cpp_lines_are_no_longer_than_python_lines() -> None:
    """120 characters, the linter's limit for Python."""
    files = [*build.sources(), *Path(__file__).parent.glob("*.cpp")]
    lines = [(file.name, nth, line) for file in files for nth, line in enumerate(file.read_text().split("\n"), 1)]
    assert [line for line in lines if len(line[2]) > 120 or line[2] != line[2].rstrip()] == []
