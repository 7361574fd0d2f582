"""One operation by every implementation there is for the device: the rivals of an operation stand in one group.

On a GPU: Triton, plain torch and torch.compile of it at the shape of Llama-2-7B; what is timed is a call and the wait
for it, so small operations show the launch. Elsewhere: plain torch at a small shape, and torch.compile where there is a
compiler for it. `gpu_round` measures the device alone.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.gpu.cases import SHAPES, TINY, Case, Shape, cases
from benchmarks.gpu.common import Round, synchronize
from d3engine.kernels import reference

ON_GPU = torch.cuda.is_available()
HERE = Round(torch.device("cuda" if ON_GPU else "cpu"), not ON_GPU, budget=0.0)
SHAPE: Shape = SHAPES[0] if ON_GPU else replace(TINY[0], name="small", hidden=256, intermediate=512, vocabulary=4096)
OPERATIONS = [
    case.operation
    for case in cases(replace(TINY[0], contexts=SHAPE.contexts), 1, Round(torch.device("cpu"), True, 0.0))
]


def implementations() -> dict[str, Callable[[], Any]]:
    """What makes each implementation's module of operations."""
    found: dict[str, Callable[[], Any]] = {"plain torch": lambda: reference}
    if ON_GPU or shutil.which("g++"):
        found["torch.compile"] = compiled_reference
    if ON_GPU:
        found["Triton"] = triton_kernels
    return found


def triton_kernels() -> Any:
    from d3engine.kernels import triton

    return triton


def compiled_reference() -> Any:
    """The reference's operations, each under torch.compile."""
    names = (
        "rms_norm",
        "qkv",
        "paged_attention",
        "linear_residual",
        "gate_up",
        "lm_head",
        "lm_head_argmax",
        "copy_entries",
    )
    operations = {name: torch.compile(getattr(reference, name), dynamic=False) for name in names}
    return SimpleNamespace(attention_inputs=reference.attention_inputs, **operations)


def case_of(operation: str, rows: int) -> Case:
    torch.manual_seed(0)
    return next(case for case in cases(SHAPE, rows, HERE) if case.operation == operation)


@pytest.mark.parametrize("implementation", implementations())
@pytest.mark.parametrize("rows", [1, 8, 64] if ON_GPU else [1])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_operation(benchmark: BenchmarkFixture, operation: str, rows: int, implementation: str) -> None:
    benchmark.group = f"{operation}, {SHAPE.name}, {rows} rows"
    case, kernels = case_of(operation, rows), implementations()[implementation]()
    prepared = case.prepare(kernels, case.inputs)

    def call() -> None:
        case.call(kernels, case.inputs, prepared)
        synchronize(HERE.device)

    with torch.inference_mode():
        call()
        benchmark(call)
