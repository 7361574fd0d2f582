"""Building the library, and the messages where that fails."""

import os
import platform
import re
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


WITH_SPACES = r"C:\Program Files\mingw64\bin\g++.exe"


@pytest.mark.parametrize(
    ("installed", "named", "taken"),
    [
        (("c++", "g++", "clang++"), None, ["c++"]),
        (("g++", "clang++"), None, ["g++"]),
        (("clang++",), None, ["clang++"]),
        (("c++", "clang++"), "clang++ -stdlib=libc++", ["clang++", "-stdlib=libc++"]),
        (("c++", WITH_SPACES), WITH_SPACES, [WITH_SPACES]),
    ],
)
def test_compiler_is_cxx_or_the_first_that_is_installed(
    monkeypatch: pytest.MonkeyPatch, installed: tuple[str, ...], named: str | None, taken: list[str]
) -> None:
    """$CXX wins, with its options or a path of Windows; otherwise c++, g++ and clang++ are looked for in this order."""
    monkeypatch.setattr(shutil, "which", lambda name: name if name in installed else None)
    monkeypatch.setenv("CXX", named or "")
    assert build.find_compiler() == taken


@pytest.mark.parametrize(("named", "missing"), [("", "c++"), ("icpx -O2", "icpx")])
def test_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch, named: str, missing: str) -> None:
    """Where none is installed the error names `c++`, or what $CXX asks for."""
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setenv("CXX", named)
    with pytest.raises(build.BuildError, match=re.escape(f"there is no C++ compiler {missing!r}")):
        build.find_compiler()


class MadeUpCompiler:
    """In the place of `build._run`: makes code for `triple`, empty files, and keeps its commands."""

    def __init__(self, triple: str) -> None:
        self._triple = triple
        self.compiled: dict[str, list[str]] = {}
        self.linked: list[str] = []

    def __call__(self, command: list[str]) -> str:
        if command[-1] == "-dumpmachine":
            return f"{self._triple}\n"
        Path(command[-1]).touch()
        if "-c" in command:
            self.compiled[Path(command[command.index("-c") + 1]).name] = command
        else:
            self.linked = command
        return ""


UNALIGNED = "-Wa,-muse-unaligned-vector-move"


@pytest.mark.parametrize(
    ("triple", "flags", "absent", "linking"),
    [
        ("x86_64-w64-mingw32", {UNALIGNED, "-mavx2"}, {"-fPIC"}, {"-static"}),
        ("x86_64-w64-windows-gnu", {"-mavx2"}, {"-fPIC", UNALIGNED}, {"-static"}),
        ("arm64-apple-darwin23.6.0", {"-fPIC"}, {"-mavx2", UNALIGNED}, set()),
        ("x86_64-apple-darwin23.6.0", {"-fPIC", "-mavx2"}, {UNALIGNED}, set()),
        ("riscv64-linux-gnu", {"-fPIC"}, {"-mavx2", UNALIGNED}, set()),
    ],
)
def test_flags_are_those_of_the_compilers_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, triple: str, flags: set[str], absent: set[str], linking: set[str]
) -> None:
    """MinGW by GCC and by Clang, macOS on both processors, another Linux: no library of this machine is taken."""
    compiler = MadeUpCompiler(triple)
    monkeypatch.setattr(build, "_run", compiler)
    build.compile_library(tmp_path / "library", compiler=["made-up"])
    command = compiler.compiled["avx2.cpp"]
    assert set(compiler.compiled) == {path.name for path in build.sources() if path.suffix == ".cpp"}
    assert {*build.FLAGS, "-O3", *flags} <= set(command)
    assert absent.isdisjoint(command)
    assert "-mavx2" not in compiler.compiled["portable.cpp"]
    assert {"-shared", "-pthread"} <= set(compiler.linked)
    assert linking == {"-static"} & set(compiler.linked)
    assert (tmp_path / "library").read_bytes() == b""


@pytest.mark.parametrize(
    ("command", "triple"),
    [
        ("cl", ""),
        ("CL.EXE", ""),
        ("/opt/llvm/bin/clang-cl.exe", ""),
        ("clang++", "x86_64-pc-windows-msvc"),
        ("clang++", "x86_64-pc-windows-msvc19.40.33811"),
    ],
)
def test_microsofts_compilers_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, triple: str
) -> None:
    """The error says what to install instead, and nothing is compiled."""
    compiler = MadeUpCompiler(triple)
    monkeypatch.setattr(build, "_run", compiler)
    with pytest.raises(build.BuildError, match=r"compiles for Microsoft's runtime.*MinGW-w64") as error:
        build.compile_library(tmp_path / "library", compiler=[command])
    assert str(error.value).startswith(command)
    assert compiler.compiled == {}


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
