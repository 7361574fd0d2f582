"""The native code reads and writes nothing beyond its tensors, and does nothing that C++ leaves undefined."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from d3engine.kernels.native import build
from d3engine.kernels.native.library import isas_here

SANITIZED = ("-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def test_odd_shapes_stay_within_their_memory(tmp_path: Path) -> None:
    """Every instruction set of this machine, every kind of weights, one to three threads."""
    compiler = build.find_compiler()
    empty = tmp_path / "empty.cpp"
    empty.write_text("int main() {}\n")
    if subprocess.run(
        [*compiler, *SANITIZED, str(empty), "-o", str(tmp_path / "empty")], capture_output=True
    ).returncode:
        pytest.skip(f"{compiler[0]} has no sanitizers here")
    library, program = tmp_path / build.LIBRARY, tmp_path / "odd_shapes"
    build.compile_library(library, flags=SANITIZED)
    source = Path(__file__).parent / "odd_shapes.cpp"
    paths = [f"-I{build.FOLDER}", str(source), str(library), f"-Wl,-rpath,{tmp_path}", "-o", str(program)]
    subprocess.run([*compiler, "-std=c++17", *SANITIZED, *paths], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{4 * 4 * len(isas_here())} runs\n"
