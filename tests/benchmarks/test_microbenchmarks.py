"""The cases of `pytest benchmarks` run, once each; no time is judged here."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.cases import TINY, cases
from benchmarks.gpu.common import Round
from benchmarks.native_steps import NativeSteps, Sizes
from benchmarks.test_rivals import NOT_COMPILED, CompiledReference
from d3engine.kernels import reference

ROOT = Path(__file__).parents[2]
SLOW = "torch.compile or large or 256"


def test_every_microbenchmark_runs_once() -> None:
    """All but those that compile or are large, in a process of their own, as `make bench` starts them."""
    asked = ["benchmarks", "--benchmark-disable", "--small", "-k", f"not ({SLOW})"]
    process = subprocess.run(
        [sys.executable, "-m", "pytest", *asked, "-p", "no:cacheprovider", "-p", "no:xdist"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr


def test_torch_compile_takes_every_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that came later: traced, without a compiler, with the results of plain PyTorch."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compile_(function, backend="eager", **options))
    compiled = CompiledReference()
    with torch.inference_mode():
        for case in cases(TINY[0], 1, Round(torch.device("cpu"), True, 0.0)):
            if case.operation not in NOT_COMPILED:
                inputs = copy.deepcopy(case.inputs)  # an operation writes some of them
                found = case.results(compiled, case.inputs)  # type: ignore[arg-type]
                torch.testing.assert_close(found, case.results(reference, inputs), equal_nan=True, msg=case.operation)


def test_bytes_of_a_native_step_are_those_of_its_layers() -> None:
    """The skipped ones are not read."""
    sizes = Sizes(layers=3, hidden=64, intermediate=96, heads=2, kv_heads=1, head_dim=32)
    steps = NativeSteps(sizes, "float32")
    layer = 4 * 64 * (64 + 2 * 32 + 64 + 3 * 96)
    assert steps.bytes_read(2, context=10, skipped=[1]) == 2 * (layer + 2 * 10 * 2 * 32 * 4) + 4 * 32 * 64
