"""The native library on another machine and by another compiler: no warnings, and the portable code's results.
Each is skipped by name where its compiler is missing. Among all tests Arm's compiler only reads what is for Arm; the
gate and `make ports` build the library with it, and run it."""

import subprocess
from pathlib import Path

import pytest
from native_programs import go_through_odd_shapes, left_to_ports, needs, wine

from d3engine.kernels.native import build
from d3engine.kernels.native.library import isas_here

ARM = "aarch64-linux-gnu-g++"
MINGW = "x86_64-w64-mingw32-g++-posix"


@pytest.mark.parametrize("source", ["isa/neon.cpp", "isa/portable.cpp"])
def test_what_arm_runs_compiles_without_a_warning(source: str) -> None:
    needs(ARM, package="g++-aarch64-linux-gnu")
    flags = [*build.FLAGS, f"-I{build.FOLDER}", "-Werror", "-fsyntax-only"]
    done = subprocess.run([ARM, *flags, str(build.FOLDER / source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_neon_finds_what_the_portable_code_finds(tmp_path: Path) -> None:
    """Built for 64-bit Arm and run by an emulator."""
    left_to_ports()
    needs(ARM, "qemu-aarch64", package="g++-aarch64-linux-gnu qemu-user")
    loader = subprocess.check_output([ARM, "-print-file-name=ld-linux-aarch64.so.1"], text=True).strip()
    runner = ["qemu-aarch64", "-L", str(Path(loader).parents[1])]
    assert go_through_odd_shapes(tmp_path, [ARM], ["-O2"], runner) == ["neon", "portable"]


def test_clang_builds_without_warnings_and_agrees(tmp_path: Path) -> None:
    left_to_ports()
    needs("clang++", package="clang")
    assert go_through_odd_shapes(tmp_path, ["clang++"], ["-O0"]) == isas_here()


@pytest.mark.parametrize("source", ["threading/process.cpp", "threading/thread_pool.cpp", "threading/runner.cpp"])
def test_what_knows_the_system_compiles_for_windows(source: str) -> None:
    needs(MINGW, package="g++-mingw-w64-x86-64-posix")
    flags = [*build.FLAGS, f"-I{build.FOLDER}", "-Werror", "-fsyntax-only"]
    done = subprocess.run([MINGW, *flags, str(build.FOLDER / source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_windows_finds_what_the_portable_code_finds(tmp_path: Path) -> None:
    """A DLL built by MinGW and run by Wine, its 32-byte and 64-byte vectors on a stack of Windows."""
    left_to_ports()
    needs(MINGW, "wine", package="g++-mingw-w64-x86-64-posix wine wine64")
    found = go_through_odd_shapes(
        tmp_path, [MINGW], ["-O1", "-static"], ["wine"], name="libd3native.dll", environment=wine(tmp_path)
    )
    assert found == [isa for isa in isas_here() if isa != "amx"]  # Linux alone has to be asked for AMX
