"""A program that prints what a driver is told by recipes and by Triton's own way, on a machine without a GPU.
Of each case: the launches of an operation on some tensors, by a recipe that comes from others, and those of the same
operation on the same tensors described anew. An address stands as the number of the given tensor that begins there."""

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import absent
from d3engine.kernels.quantized import quantize_int8
from d3engine.kernels.target import TARGETS

absent.install()

import d3engine.kernels.triton as kernels  # noqa: E402 (the driver comes first)
from d3engine.kernels.triton import launches, operations  # noqa: E402

ROWS, HIDDEN, HEADS, CHANNELS, BLOCKS = 20, 64, 4, 16, 4
Case = Callable[[], tuple[list[Tensor], Callable[[], Any]]]


def floats(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def residual(rows: int, *, count_at: int | None = None, width: int = HIDDEN) -> Case:
    def case() -> tuple[list[Tensor], Callable[[], Any]]:
        x, weight, hidden = floats(rows, width)[:, :HIDDEN], floats(HIDDEN, HIDDEN), floats(rows, HIDDEN)
        # A layer's count as a decode step has it: a view that begins at any multiple of 4 bytes.
        counts = torch.full((8,), ROWS, dtype=torch.int32)
        count = None if count_at is None else counts[count_at : count_at + 1]
        given = [x, weight, hidden] + ([] if count is None else [count])
        return given, lambda: kernels.linear_residual(x, weight, None, hidden, num_rows=count)

    return case


def shifted() -> tuple[list[Tensor], Callable[[], Any]]:
    """A residual stream that begins at no multiple of 16 bytes: another kernel than that of `residual(1)`."""
    x, weight, hidden = floats(1, HIDDEN), floats(HIDDEN, HIDDEN), floats(HIDDEN + 1)[1:].view(1, HIDDEN)
    return [x, weight, hidden], lambda: kernels.linear_residual(x, weight, None, hidden)


def gates() -> tuple[list[Tensor], Callable[[], Any]]:
    x, norm, weight = floats(ROWS, HIDDEN), floats(HIDDEN), quantize_int8(torch.randn(64, HIDDEN))
    return [x, norm, *weight.tensors], lambda: kernels.gate_up(x, norm, 1e-5, weight, None)


def beginning_of_a_layer() -> tuple[list[Tensor], Callable[[], Any]]:
    """Projections of a chunk beside answers, and their attention, where splits meet."""
    hidden, norm, weight = floats(ROWS, HIDDEN), floats(HIDDEN), floats(3 * HIDDEN, HIDDEN)
    pool, rotations = floats(BLOCKS, 2, 16, HEADS, CHANNELS), torch.zeros(ROWS, CHANNELS // 2, dtype=torch.complex64)
    entries, tables = torch.zeros(ROWS, 2, dtype=torch.int64), torch.zeros(1, 3, 16, dtype=torch.int64)
    (inputs,) = kernels.attention_inputs([0, 1, 2, ROWS], [200, 9, 30], tables)
    numbers = [inputs.query_starts, inputs.kv_lengths, inputs.block_tables, inputs.num_rows]

    def run() -> Any:
        inputs.room.listed.clear()  # each time the first layer of a step
        queries = kernels.qkv(hidden, norm, 1e-5, weight, None, rotations, pool, entries, HEADS)
        return kernels.paged_attention(queries, pool, inputs, 0.25)

    return [hidden, norm, weight, pool, rotations, entries, *numbers], run


def told(given: list[Tensor], run: Callable[[], Any]) -> list[list[str]]:
    """What the driver is told by `run`: the grid, the stream, the kernel, and its arguments."""
    absent.told.clear()
    run()
    numbers = {tensor.data_ptr(): f"tensor {nth}" for nth, tensor in enumerate(given)}

    def name(value: Any) -> str:
        address = value.data_ptr() if isinstance(value, Tensor) else value
        is_address = type(address) is int and address > 2**32
        return numbers.get(address, "made") if is_address else repr(address)

    launched = [(*call[:6], *call[9:]) for call in absent.told]  # what is between them are hooks of profilers
    return [[name(value) for value in call] for call in launched]


CASES: list[Case] = [
    residual(1),
    shifted,
    residual(9, count_at=0),
    residual(9, count_at=1),
    residual(9, count_at=1, width=2 * HIDDEN),
    gates,
    beginning_of_a_layer,
]

launches._target = lambda device: TARGETS[90]  # torch knows of no device
found = []
for launches.PROGRAMMATIC in (False, True):
    operations.forget()
    for case in CASES:
        told(*case())
        given, run = case()
        known = set(operations._recipes)
        by_recipe = told(given, run)
        is_known = known == set(operations._recipes)
        kept, operations._recipes = operations._recipes, {}
        found.append({"is_known": is_known, "by_recipe": by_recipe, "anew": told(given, run)})
        operations._recipes = kept
print(json.dumps(found))
