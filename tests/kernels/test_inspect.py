"""Kernels compile for a GPU that is not there, and a spill is an error."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from d3engine.kernels import inspect
from d3engine.kernels.inspect import Usage, load_widths

USAGE = Usage(
    shape="tiny",
    operation="copy_entries",
    label="copy",
    grid=(1, 1),
    warps=4,
    registers=16,
    stack=0,
    local=0,
    shared=0,
    widest_load=16,
    wide_loads=0.5,
)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_kernels_of_a_tiny_model_compile_without_spills() -> None:
    """In a process of its own: this one may have loaded Triton with the interpreter."""
    command = [sys.executable, "-m", "d3engine.kernels.inspect", "--shapes", "tiny", "--json"]
    command += ["--operations", "rms_norm,linear_residual,copy_entries"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    usages = json.loads(result.stdout)
    assert {usage["operation"] for usage in usages} == {"rms_norm", "linear_residual", "copy_entries"}
    assert all(usage["registers"] > 0 and not usage["spills"] for usage in usages)
    (down,) = (usage for usage in usages if usage["label"] == "down rows=16")
    assert down["widest_load"] == 16
    assert down["wide_loads"] > 0.8


@pytest.mark.parametrize(("field", "code"), [("registers", 0), ("stack", 1), ("local", 1)])
def test_the_exit_code_tells_of_a_stack_or_local_memory(
    field: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = replace(USAGE, **{field: 64})  # type: ignore[arg-type]
    monkeypatch.setattr(inspect, "inspect", lambda *arguments: iter([usage]))
    assert inspect.main(["--shapes", "tiny"]) == code
    assert ("SPILLS" in capsys.readouterr().out) == bool(code)


def test_widths_of_loads_are_read_from_ptx() -> None:
    ptx = """
    @%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
    ld.global.L1::evict_first.L2::cache_hint.v2.b32 { %r1, %r2 }, [ %rd1 + 0 ], %rd2;
    ld.global.b16 { %rs1 }, [ %rd3 + 0 ];
    cp.async.cg.shared.global [ %r5 + 0 ], [ %rd4 + 0 ], 0x10, %r6;
    st.global.v4.b32 [ %rd5 + 0 ], { %r1, %r2, %r3, %r4 };
    """
    assert load_widths(ptx) == {16: 2, 8: 1, 2: 1}
