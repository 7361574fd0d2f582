"""Every Triton operation at real shapes: how far it is from float64, how long it takes, and the share of the ceiling.

Each case is one operation on one set of inputs that any implementation can run. The judge is `reference.py` on the same
inputs in float64; the peers are `reference.py` as it is (several launches of plain torch) and, for a product, its
matrix product alone by cuBLAS. torch.compile is not measured.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.common import ROTATED_BYTES, Round, timed
from d3engine.kernels import reference

EPS = 1e-5
BLOCK_SIZE = 16

FAR = 4.0
"""A kernel whose error is so many times that of plain torch at the same dtype is wrong."""

Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Shape:
    """The sizes of one model, and what is run at them."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    channels: int
    intermediate: int
    vocabulary: int
    rows: tuple[int, ...] = (1, 8, 64)
    context: int = 1024


SHAPES = (
    Shape("llama2-7b", 4096, 32, 32, 128, 11008, 32000),
    Shape("llama3-8b", 4096, 32, 8, 128, 14336, 128256),
)
TINY = (Shape("tiny", 64, 4, 2, 16, 96, 128, rows=(1, 3), context=32),)


@dataclass(frozen=True)
class Case:
    """One operation and its inputs.

    `rotated` names the input that stands in device memory when an engine comes to it, and so must not be found in the
    L2 cache; `written` picks what the operation has written out of the inputs; `bytes_moved` counts every byte that
    must be read or written once.
    """

    operation: str
    inputs: Inputs
    call: Callable[[ModuleType, Inputs, Any], Tensor | None]
    bytes_moved: int
    rotated: str | None = None
    written: Callable[[Inputs], Tensor] | None = None
    prepare: Callable[[ModuleType, Inputs], Any] = lambda kernels, inputs: None
    product: tuple[str, str] | None = None  # the names of rows and matrix, for cuBLAS alone

    def results(self, kernels: ModuleType, inputs: Inputs) -> list[Tensor]:
        """Everything the operation returns or writes; `inputs` are changed."""
        returned = self.call(kernels, inputs, self.prepare(kernels, inputs))
        found = [] if returned is None else [returned]
        return found if self.written is None else [*found, self.written(inputs)]


def cases(shape: Shape, rows: int, current: Round) -> Iterator[Case]:
    """All operations of one layer and the head, for `rows` sequences that decode at `shape.context` entries each."""
    device, dtype = current.device, current.dtype
    width = dtype.itemsize

    def normal(*sizes: int, deviation: float = 1.0) -> Tensor:
        return torch.empty(sizes, dtype=dtype, device=device).normal_(0.0, deviation)

    def matrix(outputs: int, columns: int) -> Tensor:
        return normal(outputs, columns, deviation=columns**-0.5)

    hidden, kv_size, q_size = shape.hidden, shape.kv_heads * shape.channels, shape.heads * shape.channels
    x, norm = normal(rows, hidden), 1 + 0.1 * normal(hidden)
    row = hidden * width

    yield Case(
        "rms_norm",
        {"x": x, "norm": norm},
        lambda kernels, i, _: kernels.rms_norm(i["x"], i["norm"], EPS),
        2 * rows * row + row,
    )

    blocks = -(-shape.context // BLOCK_SIZE)
    pool = normal(rows * blocks, 2, BLOCK_SIZE, shape.kv_heads, shape.channels)
    tables = torch.randperm(rows * blocks, device=device).view(1, rows, blocks)
    last = shape.context - 1
    keys = tables[0, :, last // BLOCK_SIZE] * 2 * BLOCK_SIZE + last % BLOCK_SIZE
    entries = torch.stack((keys, keys + BLOCK_SIZE), dim=1)
    angles = torch.rand(rows, shape.channels // 2, device=device) * 6.2831853
    rotations = torch.polar(torch.ones_like(angles), angles)
    qkv = matrix(q_size + 2 * kv_size, hidden)
    yield Case(
        "qkv",
        {"x": x, "norm": norm, "weight": qkv, "rotations": rotations, "pool": pool, "entries": entries},
        lambda kernels, i, _: kernels.qkv(
            i["x"], i["norm"], EPS, i["weight"], None, i["rotations"], i["pool"], i["entries"], shape.heads
        ),
        qkv.nbytes + rows * (row + (q_size + 2 * kv_size) * width) + rotations.nbytes,
        rotated="weight",
        written=lambda i: i["pool"].view(-1, kv_size)[i["entries"].view(-1)],
        product=("x", "weight"),
    )
    yield Case(
        "paged_attention",
        {"queries": normal(rows, shape.heads, shape.channels), "pool": pool, "tables": tables},
        lambda kernels, i, inputs: kernels.paged_attention(i["queries"], i["pool"], inputs, shape.channels**-0.5),
        rows * (2 * shape.context * kv_size + 2 * q_size) * width,
        rotated="pool",
        prepare=lambda kernels, i: kernels.attention_inputs(list(range(rows + 1)), [shape.context] * rows, i["tables"])[
            0
        ],
    )
    for name, columns in (("linear_residual o", q_size), ("linear_residual down", shape.intermediate)):
        weight = matrix(hidden, columns)
        yield Case(
            name,
            {"x": normal(rows, columns), "weight": weight, "residual": normal(rows, hidden)},
            lambda kernels, i, _: kernels.linear_residual(i["x"], i["weight"], None, i["residual"]),
            weight.nbytes + rows * (columns * width + 2 * row),
            rotated="weight",
            written=lambda i: i["residual"],
            product=("x", "weight"),
        )
    gate_up = matrix(2 * shape.intermediate, hidden)
    yield Case(
        "gate_up",
        {"x": x, "norm": norm, "weight": gate_up},
        lambda kernels, i, _: kernels.gate_up(i["x"], i["norm"], EPS, i["weight"], None),
        gate_up.nbytes + rows * (row + shape.intermediate * width),
        rotated="weight",
        product=("x", "weight"),
    )
    head = matrix(shape.vocabulary, hidden)
    yield Case(
        "lm_head",
        {"x": x, "norm": norm, "weight": head},
        lambda kernels, i, _: kernels.lm_head(i["x"], i["norm"], EPS, i["weight"]),
        head.nbytes + rows * (row + 4 * shape.vocabulary),
        rotated="weight",
        product=("x", "weight"),
    )
    yield Case(
        "lm_head_argmax",
        {"x": x, "norm": norm, "weight": head},
        lambda kernels, i, _: kernels.lm_head_argmax(i["x"], i["norm"], EPS, i["weight"])[0],
        head.nbytes + rows * (row + 12),
        rotated="weight",
        product=("x", "weight"),
    )
    order = torch.randperm(pool.shape[0] * 2 * BLOCK_SIZE, device=device)[: 2 * rows]
    yield Case(
        "copy_entries",
        {"pool": pool, "source": order[:rows], "target": order[rows:]},
        lambda kernels, i, _: kernels.copy_entries(i["pool"], i["source"], i["target"]),
        2 * rows * kv_size * width,
        written=lambda i: i["pool"].view(-1, kv_size)[i["target"]],
    )


def run(report: dict[str, Any], current: Round) -> None:
    """Fill in one row for each shape, row count and operation; a case that fails is recorded, and fails the part."""
    report["triton"] = "measured" if current.has_triton else "skipped: no GPU"
    report["torch_compile"] = "skipped"
    report["rows"] = []
    torch.manual_seed(0)
    for shape in SHAPES if current.on_gpu else TINY:
        for rows in shape.rows:
            for case in cases(shape, rows, current):
                if current.left() < current.reserve:
                    report["stopped"] = f"budget: before {case.operation} of {shape.name} at {rows} rows"
                    return
                row = {"shape": shape.name, "rows": rows, "operation": case.operation, "context": shape.context}
                report["rows"].append(row)
                try:
                    measure(row, case, current)
                except Exception:
                    row["error"] = traceback.format_exc()
                current.keep(report)
            if current.on_gpu:
                torch.cuda.empty_cache()
    failed = [row for row in report["rows"] if "error" in row or row.get("is_far")]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(report['rows'])} cases failed; see their `error` and `is_far`")


def measure(row: dict[str, Any], case: Case, current: Round) -> None:
    """Fill in errors and times of one case, reference first: it is there even if the kernel fails."""
    row["bytes_moved"] = case.bytes_moved
    exact = case.results(reference, {name: _in_float64(tensor) for name, tensor in case.inputs.items()})
    row["reference"] = _errors(case, reference, exact) | _times(case, reference, current)
    if case.product is not None:
        row["cublas"] = _rates(timed([_product(case, i) for i in _copies(case, current)], current), case, current)
    if current.has_triton:
        from d3engine.kernels import triton as kernels

        row["triton"] = _errors(case, kernels, exact)
        pairs = zip(*(row[name].get("relative_error", []) for name in ("triton", "reference")), strict=True)
        row["is_far"] = any(not error <= max(FAR * reference_error, 1e-6) for error, reference_error in pairs)
        row["triton"] |= _times(case, kernels, current)


def _in_float64(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _errors(case: Case, kernels: ModuleType, exact: list[Tensor]) -> dict[str, Any]:
    """||out - exact|| / ||exact|| of each result; for tokens, the share of rows with another token."""
    fresh = {name: tensor.clone() for name, tensor in case.inputs.items()}
    errors = []
    for out, true in zip(case.results(kernels, fresh), exact, strict=True):
        if true.is_floating_point():
            errors.append(float((out.double() - true.double()).norm() / true.double().norm()))
        else:
            errors.append(float((out != true).double().mean()))
    kind = "relative_error" if exact[0].is_floating_point() else "tokens_that_differ"
    return {kind: errors}


def _copies(case: Case, current: Round) -> list[Inputs]:
    """The inputs, as often as their rotated one must be there to fall out of the L2 cache between two uses.

    What an operation may write is copied: the next implementation must find the inputs as they were.
    """
    inputs = {name: tensor if name == case.rotated else tensor.clone() for name, tensor in case.inputs.items()}
    if case.rotated is None or not current.on_gpu:
        return [inputs]
    tensor = case.inputs[case.rotated]
    count = min(64, max(2, -(-ROTATED_BYTES // tensor.nbytes)))
    return [inputs] + [inputs | {case.rotated: tensor.clone()} for _ in range(count - 1)]


def _times(case: Case, kernels: ModuleType, current: Round) -> dict[str, Any]:
    def bind(inputs: Inputs) -> Callable[[], object]:
        prepared = case.prepare(kernels, inputs)
        return lambda: case.call(kernels, inputs, prepared)

    return _rates(timed([bind(inputs) for inputs in _copies(case, current)], current), case, current)


def _product(case: Case, inputs: Inputs) -> Callable[[], object]:
    assert case.product is not None
    rows, matrix = (inputs[name] for name in case.product)
    return lambda: F.linear(rows, matrix)


def _rates(times: dict[str, Any], case: Case, current: Round) -> dict[str, Any]:
    """The times with GB/s and the share of the copy ceiling, by the device's time where there is one."""
    seconds = times["device_s"] or times["eager_s"]
    rate = case.bytes_moved / seconds / 1e9
    return times | {"gb_per_s": rate, "share_of_copy": current.share(case.bytes_moved, seconds)}
