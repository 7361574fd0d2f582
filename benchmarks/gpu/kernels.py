"""Every Triton operation at real shapes: how far it is from float64, how long it takes, and the share of the ceiling.

The peers are `reference.py` as it is, cuBLAS for a product, and plain torch for a draw; quantized matrices have none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.cases import SHAPES, TINY, Case, Inputs, Shape, cases, copy_of, in_float64, quantized_cases
from benchmarks.gpu.common import ROTATED_BYTES, Fill, Round, Row, fill_rows, timed
from benchmarks.gpu.device import launched_as_in_engines
from d3engine.kernels import reference

FAR = 4.0
"""A kernel whose error is this multiple of that of plain torch at the same dtype is wrong."""


def run(report: dict[str, Any], current: Round) -> None:
    """Fill in one row for each shape, row count and operation; a case that fails is recorded, and fails the part."""
    report["triton"] = "skipped: not installed"
    if current.has_triton:
        report["triton"] = "measured" if current.on_gpu else "interpreted, not timed"
    report["schemes"], report["blocks"] = list(current.schemes), list(current.blocks)
    torch.manual_seed(0)
    with launched_as_in_engines(current) as programmatic:
        fill_rows(report, all_cases(current, programmatic), {"operation": "", "shape": "", "rows": 0}, current)
    failed = [row for row in report["rows"] if "error" in row or row.get("is_far")]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(report['rows'])} cases failed; see their `error` and `is_far`")


def all_cases(current: Round, programmatic: bool) -> Iterator[Callable[[], Iterator[tuple[Row, Fill]]]]:
    """Makers of a row for every case; quantized matrices come after the others of a shape, and blocks last."""

    def begin(make: Callable[..., Iterable[Case]], shape: Shape, rows: int, *given: Any) -> Iterator[tuple[Row, Fill]]:
        for case in make(shape, rows, *given):
            row = {"shape": shape.name, "rows": rows, "operation": case.operation, "programmatic": programmatic}
            yield row, partial(measure, case=case, current=current)

    shapes = SHAPES if current.on_gpu else TINY
    for shape in shapes:
        for rows in shape.rows:
            yield partial(begin, cases, shape, rows, current)
        for rows in shape.rows if current.on_gpu else shape.rows[-1:]:
            for scheme in current.schemes:
                yield partial(begin, quantized_cases, shape, rows, current, scheme)
    for type_name in current.blocks:
        for rows in shapes[-1].rows if current.on_gpu else shapes[-1].rows[-1:]:
            yield partial(begin, quantized_cases, shapes[-1], rows, current, type_name)


def measure(row: dict[str, Any], case: Case, current: Round) -> None:
    """Fill in errors and times of one case, reference first: it is there even if the kernel fails."""
    row["bytes_moved"] = case.bytes_moved
    exact = case.results(reference, {name: in_float64(value) for name, value in case.inputs.items()})
    is_quantized = not all(isinstance(value, Tensor) for value in case.inputs.values())
    row["reference"] = _errors(case, reference, exact)
    if not is_quantized:
        row["reference"] |= _times(case, reference, current)
        if case.product is not None:
            row["cublas"] = _rates(timed([_product(case, i) for i in _copies(case, current)], current), case, current)
        if case.by_torch is not None:
            calls = [partial(case.by_torch, inputs) for inputs in _copies(case, current)]
            row["by_torch"] = _rates(timed(calls, current), case, current)
    if current.has_triton:
        from d3engine.kernels import triton as kernels

        row["triton"] = _errors(case, kernels, exact)
        pairs = zip(*(row[name].get("relative_error", []) for name in ("triton", "reference")), strict=True)
        row["is_far"] = any(not error <= max(FAR * reference_error, 1e-6) for error, reference_error in pairs)
        if current.on_gpu:
            row["triton"] |= _times(case, kernels, current)


def _errors(case: Case, kernels: ModuleType, exact: list[Tensor]) -> dict[str, Any]:
    """||out - exact|| / ||exact|| of each result; of tokens, the share of rows with another one."""
    fresh = copies_of(case.inputs)
    errors: dict[str, Any] = {}
    for out, true in zip(case.results(kernels, fresh), exact, strict=True):
        if true.is_floating_point():
            error = float((out.double() - true.double()).norm() / true.double().norm())
            errors.setdefault("relative_error", []).append(error)
        else:
            errors.setdefault("tokens_that_differ", []).append(float((out != true).double().mean()))
    return errors


def copies_of(inputs: Inputs) -> Inputs:
    """The same inputs in memory of their own."""
    return {name: copy_of(value) for name, value in inputs.items()}


def _copies(case: Case, current: Round) -> list[Inputs]:
    """The inputs, as often as their rotated one must be there to fall out of the L2 cache between two uses.

    What an operation may write is copied: the next implementation must find the inputs as they were.
    """
    inputs = {name: value if name == case.rotated else copy_of(value) for name, value in case.inputs.items()}
    if case.rotated is None or not current.on_gpu:
        return [inputs]
    rotated = case.inputs[case.rotated]
    count = min(64, max(2, -(-ROTATED_BYTES // rotated.nbytes)))
    return [inputs] + [inputs | {case.rotated: copy_of(rotated)} for _ in range(count - 1)]


def _times(case: Case, kernels: ModuleType, current: Round) -> dict[str, Any]:
    def bind(inputs: Inputs) -> Callable[[], object]:
        prepared = case.prepare(kernels, inputs)
        return lambda: case.call(kernels, inputs, prepared)

    return _rates(timed([bind(inputs) for inputs in _copies(case, current)], current), case, current)


def _product(case: Case, inputs: Inputs) -> Callable[[], object]:
    assert case.product is not None
    rows, matrix = (inputs[name] for name in case.product)
    assert isinstance(rows, Tensor)
    assert isinstance(matrix, Tensor)
    return lambda: F.linear(rows, matrix)


def _rates(times: dict[str, Any], case: Case, current: Round) -> dict[str, Any]:
    """The times with GB/s and the share of the copy ceiling, by the device's time where there is one."""
    seconds = times["device_s"] or times["eager_s"]
    rate = case.bytes_moved / seconds / 1e9
    return times | {"gb_per_s": rate, "share_of_copy": current.share(case.bytes_moved, seconds)}
