"""What a layer costs the host until CUDA is called, on a machine without a GPU: by recipes, and described anew.

Kernels are compiled for a GPU of compute capability 9.0 and CUDA's driver is replaced by one that does nothing: timed
are Python and Triton alone, each operation in turns by the recipes of `kernels/triton/operations.py` and without.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from tqdm import tqdm

from benchmarks.gpu import absent
from benchmarks.report import Parser, positive, print_table, ratios, spread, summary

HIDDEN, HEADS, CHANNELS = 64, 4, 16
"""A small model's sizes: what the host does depends on none."""
LAYERS = 32
CALLS = 100
"""Calls of an operation whose mean is the time of a round."""
LAYER = "a layer"

Operation = Callable[[], Any]


def operations(rows: int, answers: int) -> dict[str, Operation]:
    """A layer's operations, and all of them in a row, over a prompt's chunk and `answers` answers, `rows` in all."""
    from d3engine.kernels import triton as kernels

    def floats(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16)

    hidden, norm, pool = floats(rows, HIDDEN), floats(HIDDEN), floats(64, 2, 16, HEADS, CHANNELS)
    qkv, output = floats(3 * HIDDEN, HIDDEN), floats(HIDDEN, HIDDEN)
    gate_up, down = floats(4 * HIDDEN, HIDDEN), floats(HIDDEN, 2 * HIDDEN)
    rotations = torch.zeros(rows, CHANNELS // 2, dtype=torch.complex64)
    entries, tables = torch.zeros(rows, 2, dtype=torch.int64), torch.zeros(1, answers + 1, 64, dtype=torch.int64)
    (inputs,) = kernels.attention_inputs([*range(answers + 1), rows], [900] * answers + [rows], tables)
    queries, attended, gated = floats(rows, HEADS, CHANNELS), floats(rows, HIDDEN), floats(rows, 2 * HIDDEN)
    parts: dict[str, Operation] = {
        "qkv": lambda: kernels.qkv(hidden, norm, 1e-5, qkv, None, rotations, pool, entries, HEADS),
        "paged_attention": lambda: kernels.paged_attention(queries, pool, inputs, CHANNELS**-0.5),
        "linear_residual, output": lambda: kernels.linear_residual(attended, output, None, hidden),
        "gate_up": lambda: kernels.gate_up(hidden, norm, 1e-5, gate_up, None),
        "linear_residual, down": lambda: kernels.linear_residual(gated, down, None, hidden),
    }
    return parts | {LAYER: lambda: [call() for call in parts.values()]}


def measure(rows: int, answers: int, rounds: int) -> dict[str, Any]:
    """Microseconds of each operation both ways, in turns, and how many kernels each launches."""
    from d3engine.kernels.triton import matmul
    from d3engine.kernels.triton import operations as performing

    def nothing(*_: object) -> None:
        """In the place of what torch computes, or of a recipe."""

    found = {}
    with patch.multiple(matmul, _multiply_into=nothing, _multiply_onto=nothing):
        for name, call in tqdm(operations(rows, answers).items(), disable=None):
            call()
            absent.told.clear()
            call()
            launches = len(absent.told)
            by_recipe, anew = [], []
            for _ in range(rounds):
                performing.forget()
                by_recipe.append(_microseconds(call))
                with patch.object(performing, "_recipe", nothing):
                    performing.forget()
                    anew.append(_microseconds(call))
            times = {"by_recipe": by_recipe, "anew": anew, "ratio": ratios(anew, by_recipe)}
            found[name] = {"launches": launches} | {kind: summary(values) for kind, values in times.items()}
    return {"rows": rows, "answers": answers, "operations": found}


def _microseconds(call: Operation) -> float:
    call()
    gc.disable()  # a collection would count as part of the round in which it falls
    try:
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        seconds = time.perf_counter() - start
    finally:
        gc.enable()
    absent.told.clear()
    return seconds / CALLS * 1e6


def show(report: dict[str, Any], console: Console) -> None:
    """A row for each operation; ranges are of all rounds."""
    columns = ("operation", "kernels", "by recipe", "described anew", "ratio")
    rows = [
        (name, str(row["launches"]), *(spread(row[kind]) for kind in ("by_recipe", "anew", "ratio")))
        for name, row in report["operations"].items()
    ]
    title = f"host time in us, {report['rows']} rows, {report['answers']} of answers: median (least-most)"
    print_table(console, columns, rows, title, left=columns)
    layer = report["operations"][LAYER]
    by_recipe, anew = (layer[kind]["median"] * LAYERS / 1000 for kind in ("by_recipe", "anew"))
    console.print(
        f"{LAYERS} layers: {by_recipe:.1f} ms by recipes, {anew:.1f} ms described anew; the driver's come on top"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser("launch_time", __doc__, arguments)
    parser.add_argument(
        "--rows", type=positive, default=32, help="rows of the step; its prompt chunk has the rest (32)"
    )
    parser.add_argument("--answers", type=positive, default=8, help="rows of answers (8)")
    parser.add_argument("--rounds", type=positive, default=15, help="times that each way is timed (15)")
    options = parser.given()
    if options.answers >= options.rows:
        parser.error(f"--answers is {options.answers}; it must be less than --rows, which is {options.rows}")
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET=1 is set: interpreted kernels are not launched")
    absent.install()
    parser.publish(measure(options.rows, options.answers, options.rounds), show, width=100)
    return 0


if __name__ == "__main__":
    sys.exit(main())
