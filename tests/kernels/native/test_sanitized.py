"""The native code reads and writes nothing beyond its tensors, does nothing undefined, and its threads do not race."""

from __future__ import annotations

from pathlib import Path

import pytest
from native_programs import go_through_odd_shapes, is_ports, left_to_ports, needs_to_run

from d3engine.kernels.native import build
from d3engine.kernels.native.library import isas_here

# Numbers of lines in a report cost a quarter of the time that this takes to compile: NATIVE_TEST_FLAGS=-g1 adds them.
MEMORY = ("-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
# Who writes what when is the same whatever the instruction set, and one of them is built in a third of the time.
THREADS = ("-Og", "-g1", "-fsanitize=thread", "-DD3_PORTABLE")


def test_odd_shapes_stay_within_their_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every instruction set of this machine, every kind of weights, one to three threads.

    What else is undefined is looked for in the portable code, of the same templates as the instruction sets, and by
    `make ports` in all of them.
    """
    if not is_ports():
        isa_flags = {name: (*flags, "-fno-sanitize=undefined") for name, flags in build.ISA_FLAGS.items()}
        monkeypatch.setattr(build, "ISA_FLAGS", isa_flags)
    compiler = build.find_compiler()
    needs_to_run(tmp_path, compiler, MEMORY)
    assert go_through_odd_shapes(tmp_path, compiler, MEMORY) == isas_here()


def test_threads_that_share_a_step_do_not_race(tmp_path: Path) -> None:
    """ThreadSanitizer ends the program at the first access that no synchronization orders."""
    left_to_ports()
    compiler = build.find_compiler()
    needs_to_run(tmp_path, compiler, THREADS)
    assert go_through_odd_shapes(tmp_path, compiler, THREADS) == ["portable"]
