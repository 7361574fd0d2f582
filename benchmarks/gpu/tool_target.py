"""What runs under compute-sanitizer and ncu: every operation on tiny inputs, or the launches of one layer.

    python -m benchmarks.gpu.tool_target operations | layer

Between `cudaProfilerStart` and its end stands one layer that has run before, so that a profiler sees no compiling.
"""

from __future__ import annotations

import sys

import torch

from benchmarks.gpu.cases import SHAPES, TINY, cases
from benchmarks.gpu.common import Round, synchronize
from benchmarks.gpu.device import launched_as_in_engines
from benchmarks.gpu.kernels import copies_of

LAYER_ROWS = (1, 8)


def operations(current: Round) -> int:
    """Run all operations on tiny inputs once; how many there are."""
    from d3engine.kernels import triton as kernels

    count = 0
    for rows in TINY[0].rows:
        for case in cases(TINY[0], rows, current):
            case.results(kernels, copies_of(case.inputs))
            count += 1
    return count


def layer(current: Round) -> int:
    """Run a layer's launches twice at each number of rows, the second time for the profiler."""
    from benchmarks.gpu.switches import _layer
    from d3engine.kernels import triton as kernels

    for rows in LAYER_ROWS if current.on_gpu else LAYER_ROWS[:1]:
        case = _layer(SHAPES[0] if current.on_gpu else TINY[0], rows, current)
        inputs = case.prepare(kernels, case.inputs)
        case.call(kernels, case.inputs, inputs)
        synchronize(current.device)
        if current.on_gpu:
            torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
        case.call(kernels, case.inputs, inputs)
        synchronize(current.device)
        if current.on_gpu:
            torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
    return len(LAYER_ROWS)


def main(what: str) -> None:
    """Run what is named on a GPU, or interpreted where there is none."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    current = Round(device, smoke=device.type == "cpu", budget=1e6)
    torch.manual_seed(0)
    with launched_as_in_engines(current):
        count = {"operations": operations, "layer": layer}[what](current)
    synchronize(device)
    print(f"{count} done")


if __name__ == "__main__":
    main(sys.argv[1])
