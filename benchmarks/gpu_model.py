"""How fast a decode step would be on a GPU by what its compiled kernels say: a model, and no measurement.

    python -m benchmarks.gpu_model [--shape llama2-7b] [--weights bf16] [--batch 1] [--context 512] [--json FILE]
    python -m benchmarks.gpu_model --batch 64 --cache fp8
    python -m benchmarks.gpu_model --prompt 128 [--weights int8]
    python -m benchmarks.gpu_model --shape llama3-8b --sampled
    python -m benchmarks.gpu_model --batch-invariant
    python -m benchmarks.gpu_model --plot FILE --of FILES

Each kernel of a step is compiled without a GPU. Its time is what its launch costs in a graph, and the longest of these:
the bytes that it must read, over the device's copy rate, or less where too few of its loads are under way at once (the
bytes in flight that its machine code keeps, over the latency of a load), and where a grid ends, with too few programs
for all processors; the same with the rows of activations that each program reads, over the rate of the L2 cache; the
instructions of its loop, over what a processor issues; and what tensor cores multiply. Behind attention the splits of a
row meet. Where tokens are sampled it may be what programs add up in the L2 cache too, or the cycles of a program that
has a row for itself. What is left to torch is taken to be as good as its bytes and products allow. What such models
forget (limits that hinder each other, clocks that fall, the host) makes devices slower than this: it is an upper bound,
and the table has what others measured (`gpu/model_tables.py`). Nothing here was measured on a GPU of ours. `--of`
compiles nothing: it draws what `--json` has written before.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.model_tables import plot, show
from benchmarks.gpu.step_work import PROBES, WEIGHT_BYTES, Step, Work, step_work
from benchmarks.report import environment, tell
from d3engine.kernels.machine_code import cycles_alone, programs_a_processor
from d3engine.kernels.target import PROCESSORS, TARGETS

LAUNCH_US = 2.0
"""Microseconds that a kernel costs in a graph beside its bytes: its node, its first loads and its last."""
TURN_US = 0.5
"""Of a program that puts together the parts of 16 splits: a load from L2 and the barriers behind it."""
COPY_SHARE = 0.95
"""Of the copy rate that a kernel reads at, at best."""
ISSUE_SHARE = 0.65
"""Of one instruction a cycle on each of a processor's four schedulers, at best."""
TENSOR_SHARE = 0.6
"""Of the products that the maker names, at best."""
CONTEXT_BATCHES = (1, 8, 16, 32, 64)
PROMPTS = (128, 512)


@dataclass(frozen=True, slots=True)
class Device:
    """What a GPU can do, by its maker and by published measurements of copying."""

    name: str
    arch: int
    processors: int
    maker_tbs: float  # terabytes a second of its memory, by its maker
    copy_tbs: float  # terabytes a second that a large copy reads and writes
    clock_ghz: float
    latency: int  # cycles of a load under load
    cache_tbs: float  # terabytes a second that processors read from L2
    tensor_tflops: float  # of dense products in half precision
    additions_gs: float = 100.0  # thousand millions a second that its L2 cache adds in different places: a guess

    def read_tbs(self, in_flight: float) -> float:
        """Terabytes a second at a given number of bytes under way a processor; near both limits neither is reached."""
        waiting = in_flight * self.processors * self.clock_ghz * 1e9 / self.latency / 1e12
        return float(((self.copy_tbs * COPY_SHARE) ** -4 + waiting**-4) ** -0.25)


DEVICES = (
    Device("H100", 90, 132, 3.35, 3.0, 1.755, 800, 5.5, 989),
    Device("H200", 90, 132, 4.8, 4.3, 1.755, 800, 5.5, 989),
    Device("B200", 100, 148, 8.0, 7.0, 1.85, 800, 9.0, 2250, 150),
)


@dataclass(frozen=True, slots=True)
class Kernel:
    """One launch of a step: what it must read and do, and the bytes that it keeps under way a processor."""

    operation: str
    is_in_layer: bool
    num_bytes: float = 0.0
    in_flight: float = 0.0  # with all programs that have a place; 0: nothing that its time depends on
    pieces: int = 1  # of its work
    places: int = 1  # for programs on a processor
    turns: int = 0  # in which the splits of a row meet
    row_bytes: float = 0.0  # of activations, through the cache
    instructions: float = 0.0  # of warps
    products: float = 0.0  # operations on tensor cores
    additions: float = 0.0  # in the L2 cache
    alone: float = 0.0  # cycles of a program whose work nobody shares

    def limits_us(self, device: Device) -> dict[str, float]:
        """The microseconds that each limit takes."""
        issued = device.processors * 4 * device.clock_ghz * 1e3 * ISSUE_SHARE
        return {
            "memory": self._memory_us(device) if self.in_flight else 0.0,
            "cache": (self.num_bytes + self.row_bytes) / device.cache_tbs / 1e6,
            "instructions": self.instructions / issued,
            "products": self.products / (device.tensor_tflops * TENSOR_SHARE) / 1e6,
            "additions": self.additions / device.additions_gs / 1e3,
            "alone": self.alone / device.clock_ghz / 1e3,
        }

    def _memory_us(self, device: Device) -> float:
        """Of reading its bytes; the last pieces, fewer than there are places, have less under way together."""
        places = device.processors * self.places
        last = self.pieces % places
        parts = [(self.pieces - last, 1.0), (last, last / places)]
        rates = [(count / self.pieces, device.read_tbs(self.in_flight * share)) for count, share in parts if count]
        return sum(self.num_bytes * share / rate / 1e6 for share, rate in rates)

    def microseconds(self, device: Device) -> float:
        """Its time on a device."""
        return max(self.limits_us(device).values()) + LAUNCH_US + TURN_US * self.turns


def step_us(kernels: list[Kernel], device: Device, layers: int) -> float:
    """Microseconds of a step that runs `layers` layers."""
    layer = sum(kernel.microseconds(device) for kernel in kernels if kernel.is_in_layer)
    return layers * layer + sum(kernel.microseconds(device) for kernel in kernels if not kernel.is_in_layer)


def limit_us(kernels: list[Kernel], device: Device, layers: int) -> float:
    """Microseconds in which the device could copy what such a step reads."""
    total = sum(kernel.num_bytes * (layers if kernel.is_in_layer else 1) for kernel in kernels)
    return total / device.copy_tbs / 1e6


def kernels_of_step(step: Step, arch: int) -> list[Kernel]:
    """The kernels of a step, compiled for one architecture."""
    found = [Kernel("ends of a step", False)] * 4  # begin, embedding, the list of attention's splits, end
    return found + [_kernel(work, arch) for work in step_work(step)]


def _kernel(work: Work, arch: int) -> Kernel:
    from d3engine.kernels.ahead_of_time import machine_code_of, needs

    is_in_layer = work.operation not in ("lm_head", "sample")
    kernel = Kernel(work.operation, is_in_layer, work.num_bytes, products=work.products, additions=work.additions)
    if work.launch is None:
        return replace(kernel, in_flight=math.inf)
    if work.is_alone:
        return replace(kernel, alone=cycles_alone(machine_code_of(work.launch, arch), PROBES))
    if not work.num_bytes:
        return kernel
    launch, given = work.launch, work.launch.arguments
    found = needs(replace(launch, streams=True), arch)
    passes, row_bytes = 1, 0.0
    if "BLOCK_T" in given:  # a product: each tile of rows makes floats of all weights, each of outputs reads the rows
        passes = launch.grid[0]
        row_bytes = 2.0 * math.prod(launch.grid[:2]) * given["BLOCK_T"] * given["K"]
    programs = math.prod(launch.grid)
    room = programs_a_processor(found["registers"], found["shared"], launch.num_warps, TARGETS[arch].shared_kib * 1024)
    there = min(room, -(-programs // PROCESSORS))  # for as many `needs` says what is under way
    places = there if work.pieces else room
    return replace(
        kernel,
        in_flight=found["in_flight"] * places / there,
        pieces=work.pieces or programs,
        places=places,
        turns=work.turns,
        row_bytes=row_bytes,
        instructions=found["instructions"] * work.num_bytes * passes,
    )


def report_of(step: Step, layers: int) -> dict[str, Any]:
    """All figures of a model of a given number of layers, by device and depth."""
    compiled = {arch: kernels_of_step(step, arch) for arch in {d.arch for d in DEVICES}}
    rows = []
    for device in DEVICES:
        kernels = compiled[device.arch]
        for depth in sorted({layers, *(math.floor(layers * share) for share in (0.75, 0.5, 0.25))}, reverse=True):
            time, limit = step_us(kernels, device, depth), limit_us(kernels, device, depth)
            figures: dict[str, Any] = {
                "step_us": time,
                "tokens_per_second": step.batch * 1e6 / time,
                "share_of_limit": limit / time,
                "share_of_bandwidth": limit / time * device.copy_tbs / device.maker_tbs,
                "sampling_us": sum(kernel.microseconds(device) for kernel in kernels if kernel.operation == "sample"),
            }
            figures["bound_by"] = _longest(kernels, device)
            rows.append({"device": device.name, "layers": depth} | figures)
    asked = asdict(step) | {"shape": step.shape.name}
    kernels = {str(arch): [asdict(kernel) for kernel in found] for arch, found in compiled.items()}
    return asked | {"is_model": True, "rows": rows, "kernels": kernels, "devices": [asdict(d) for d in DEVICES]}


def _longest(kernels: list[Kernel], device: Device) -> str:
    """Which of the limits takes most of the time in a layer."""
    times: dict[str, float] = {}
    for kernel in kernels:
        limits = kernel.limits_us(device)
        name = max(limits, key=limits.__getitem__)
        if kernel.is_in_layer:
            times[name] = times.get(name, 0.0) + limits[name]
    return max(times, key=times.__getitem__)


def main(arguments: list[str] | None = None) -> None:
    """Compile the kernels of a step and print what the model makes of them."""
    from d3engine.kernels.triton import launches, products

    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_model", description=(__doc__ or "").strip())
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    known = [name for name, shape in launches.SHAPES.items() if not shape.post_norms]  # whose launches are not counted
    parser.add_argument("--shape", choices=known, default="llama2-7b", help="whose sizes a layer has")
    parser.add_argument("--layers", type=int, default=32, help="of the whole model")
    parser.add_argument("--weights", choices=WEIGHT_BYTES, default="bf16")
    parser.add_argument("--batch", type=int, choices=CONTEXT_BATCHES, default=1, help="rows of a step")
    parser.add_argument("--prompt", type=int, choices=PROMPTS, help="a step over N tokens of one prompt instead")
    parser.add_argument("--sampled", action="store_true", help="choose under top-p, not the likeliest")
    parser.add_argument("--context", type=int, default=512, help="entries of each row")
    parser.add_argument("--cache", choices=("auto", "fp8"), default="auto", help="what entries are held in")
    parser.add_argument("--batch-invariant", action="store_true", help="where no bit may depend on a row's neighbours")
    parser.add_argument(
        "--matmul-rows", type=int, help="leave products to torch of more rows alone, not of more than 64"
    )
    parser.add_argument("--json", metavar="FILE", help="write all figures to this file")
    parser.add_argument("--plot", metavar="FILE", help="draw to this PNG file (needs matplotlib)")
    parser.add_argument("--of", nargs="+", metavar="FILE", help="compile nothing: draw what --json wrote to these")
    options = parser.parse_args(arguments)
    if options.of and not options.plot:
        parser.error("--of says what to draw, and needs --plot")
    if options.of:
        plot([json.loads(Path(file).read_text(encoding="utf-8")) for file in options.of], options.plot)
        return
    if options.matmul_rows is not None:
        products.MATMUL_ROWS = options.matmul_rows
    step = Step(
        shape=launches.SHAPES[options.shape],
        weights=options.weights,
        batch=options.prompt or options.batch,
        context=options.context,
        is_prompt=options.prompt is not None,
        is_sampled=options.sampled,
        cache=options.cache,
        batch_invariant=options.batch_invariant,
    )
    found = report_of(step, options.layers)
    tell(
        {"environment": environment("benchmarks.gpu_model", arguments or [])} | found,
        show,
        width=100,
        file=options.json,
    )
    if options.plot:
        plot([found], options.plot)


if __name__ == "__main__":
    main()
