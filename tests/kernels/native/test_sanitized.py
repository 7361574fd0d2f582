"""The native code stays within its tensors, without undefined behaviour and data races."""

from pathlib import Path

import pytest
from native_programs import go_through_odd_shapes, guarded_program, left_to_ports, needs_to_run, run

from d3engine.kernels.native import build
from d3engine.kernels.native.library import isas_here

# Line numbers in reports cost a quarter of the compile time: NATIVE_TEST_FLAGS=-g1 adds them.
MEMORY = ("-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
# The instruction set does not matter for races, and one of them compiles in a third of the time.
THREADS = ("-Og", "-g1", "-fsanitize=thread", "-DD3_PORTABLE")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The program between closed pages, with the library of an installation."""
    return guarded_program(tmp_path_factory.mktemp("guarded"))


@pytest.mark.parametrize("side", ["after", "before"])
def test_what_is_installed_touches_nothing_beyond_its_memory(guarded: str, side: str) -> None:
    """Every instruction set of this machine, every kind of weights, one to three threads, as it is shipped."""
    assert run([guarded], {"GUARDED": side}) == isas_here()


def test_odd_shapes_pass_address_and_undefined_sanitizers(tmp_path: Path) -> None:
    """Closed pages miss local arrays and undefined behaviour."""
    left_to_ports()
    compiler = build.find_compiler()
    needs_to_run(tmp_path, compiler, MEMORY)
    assert go_through_odd_shapes(tmp_path, compiler, MEMORY) == isas_here()


def test_threads_that_share_a_step_do_not_race(tmp_path: Path) -> None:
    """ThreadSanitizer ends the program at the first access that no synchronization orders."""
    left_to_ports()
    compiler = build.find_compiler()
    needs_to_run(tmp_path, compiler, THREADS)
    assert go_through_odd_shapes(tmp_path, compiler, THREADS) == ["portable"]
