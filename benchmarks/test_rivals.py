"""One operation by every implementation there is for the device: the rivals of an operation stand in one group.

Timed is a call and the wait for it, so small operations show the launch; `gpu_round` measures the device alone.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
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
CASES = list(cases(replace(TINY[0], contexts=SHAPE.contexts), 1, Round(torch.device("cpu"), True, 0.0)))
BY_TORCH = "torch's own draw"
NOT_COMPILED = ("begin_step", "end_step")
"""Their reference looks at counts on the host: torch.compile has little to do there."""


def implementations() -> dict[str, Callable[[], Any]]:
    """What makes each implementation's module of operations."""
    found: dict[str, Callable[[], Any]] = {"plain torch": lambda: reference}
    if ON_GPU or shutil.which("g++"):
        found["torch.compile"] = CompiledReference
    if ON_GPU:
        found["Triton"] = triton_kernels
    return found


def triton_kernels() -> Any:
    from d3engine.kernels import triton

    return triton


class CompiledReference:
    """The reference's operations, each under torch.compile from its first call on."""

    attention_inputs = staticmethod(reference.attention_inputs)
    TABLE_DTYPE = reference.TABLE_DTYPE

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        compiled = torch.compile(getattr(reference, operation), dynamic=False)
        setattr(self, operation, compiled)
        return compiled


def case_of(operation: str, rows: int) -> Case:
    torch.manual_seed(0)
    return next(case for case in cases(SHAPE, rows, HERE) if case.operation == operation)


def rivals() -> list[tuple[str, str]]:
    """Every operation with every implementation that it has."""
    found = []
    for case in CASES:
        names = [n for n in implementations() if n != "torch.compile" or case.operation not in NOT_COMPILED]
        found += [(case.operation, name) for name in names + [BY_TORCH] * (case.by_torch is not None)]
    return found


@pytest.mark.parametrize("rows", [1, 8, 64] if ON_GPU else [1])
@pytest.mark.parametrize(("operation", "implementation"), rivals())
def test_operation(benchmark: BenchmarkFixture, operation: str, rows: int, implementation: str) -> None:
    benchmark.group = f"{operation}, {SHAPE.name}, {rows} rows"
    case = case_of(operation, rows)
    if implementation == BY_TORCH:
        assert case.by_torch is not None
        run = partial(case.by_torch, case.inputs)
    else:
        kernels = implementations()[implementation]()
        run = partial(case.call, kernels, case.inputs, case.prepare(kernels, case.inputs))

    def call() -> None:
        run()
        synchronize(HERE.device)

    with torch.inference_mode():
        call()
        benchmark(call)
