"""How fast a decode step would be on a GPU by what its compiled kernels say: a model, and no measurement.

    python -m benchmarks.gpu_model [--shape llama2-7b] [--weights bf16] [--batch 1] [--context 512] [--json FILE]
    python -m benchmarks.gpu_model --plot FILE --of FILES

Each kernel of a step is compiled without a GPU. Its time is the bytes that it must read, over what it can read them at:
the device's copy rate, or less where too few of its loads are under way at once (the bytes in flight that its machine
code keeps, over the latency of a load); and what a kernel's launch costs in a graph. What such models forget (tails,
the L2 cache, what rows of activations take from it where a batch is large, clocks that fall) makes devices slower than
this. Nothing here was measured on a GPU of ours. `--of` compiles nothing: it draws what `--json` has written before.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.report import environment, tell
from d3engine.kernels.quantized import GROUP

if TYPE_CHECKING:
    from d3engine.kernels.triton.launches import Launch, ModelShape

LAUNCH_US = 2.0
"""Microseconds that a kernel costs in a graph beside its bytes."""
COPY_SHARE = 0.95
"""Of the copy rate that a kernel reads at, at best."""
WEIGHT_BYTES = {"bf16": 2.0, "int8": 1.0, "int4": 0.5 + 4 / GROUP}
CONTEXT_BATCHES = (1, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True)
class Device:
    """What a GPU can do, by its maker and by published measurements of copying."""

    name: str
    arch: int
    processors: int
    copy_tbs: float  # terabytes a second that a large copy reads and writes
    clock_ghz: float
    latency: int  # cycles of a load under load

    def read_tbs(self, in_flight: float) -> float:
        """Terabytes a second at so many bytes under way a processor; near both limits neither is reached."""
        waiting = in_flight * self.processors * self.clock_ghz * 1e9 / self.latency / 1e12
        return float(((self.copy_tbs * COPY_SHARE) ** -4 + waiting**-4) ** -0.25)


DEVICES = (
    Device("H100", 90, 132, 3.0, 1.755, 800),
    Device("H200", 90, 132, 4.3, 1.755, 800),
    Device("B200", 100, 148, 7.0, 1.85, 800),
)


@dataclass(frozen=True, slots=True)
class Kernel:
    """One launch of a step: the bytes that it must read, and those that it keeps under way a processor."""

    operation: str
    is_in_layer: bool
    num_bytes: float
    in_flight: float  # 0: nothing that its time depends on

    def microseconds(self, device: Device) -> float:
        """Its time on a device."""
        reading = self.num_bytes / device.read_tbs(self.in_flight) / 1e6 if self.num_bytes and self.in_flight else 0.0
        return reading + LAUNCH_US


def step_us(kernels: list[Kernel], device: Device, layers: int) -> float:
    """Microseconds of a step that runs `layers` layers."""
    layer = sum(kernel.microseconds(device) for kernel in kernels if kernel.is_in_layer)
    return layers * layer + sum(kernel.microseconds(device) for kernel in kernels if not kernel.is_in_layer)


def limit_us(kernels: list[Kernel], device: Device, layers: int) -> float:
    """Microseconds in which the device could copy what such a step reads."""
    total = sum(kernel.num_bytes * (layers if kernel.is_in_layer else 1) for kernel in kernels)
    return total / device.copy_tbs / 1e6


def step_launches(shape: ModelShape, weights: str, batch: int, context: int) -> Iterator[tuple[str, Launch, float]]:
    """The launches of a step in bfloat16, with weights of that form, and the bytes of each: (operation, launch, bytes).

    Those of small size (adding, combining, norms of heads, both ends of a step) have 0.
    """
    from d3engine.kernels.triton import launches
    from d3engine.kernels.triton.paged_attention import AttentionInputs, attention_launches

    each = WEIGHT_BYTES[weights]
    heads, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    sizes = {
        f"qkv: rows={batch}": (heads + 2 * kv) * shape.hidden_size * each,
        f"linear_residual: output rows={batch}": heads * shape.hidden_size * each,
        f"linear_residual: down rows={batch}": shape.intermediate_size * shape.hidden_size * each,
        f"gate_up: rows={batch}": 2 * shape.intermediate_size * shape.hidden_size * each,
        f"lm_head: argmax rows={batch}": shape.vocab_size * shape.hidden_size * each,
    }
    small = {f"linear_residual: {name}, add rows={batch}" for name in ("output", "down")} | {"lm_head: best"}
    form = "" if weights == "bf16" else weights
    for operation, label, launch in launches.registered(shape, torch.bfloat16, form, launches.PROJECTIONS):
        name = f"{operation}: {label}"
        if name in sizes or name in small:
            yield operation, launch, sizes.get(name, 0.0)
    meta = launches.meta
    queries = meta(batch, shape.num_heads, shape.head_dim, dtype=torch.bfloat16)
    pool = meta(1024, 2, shape.block_size, shape.num_kv_heads, shape.head_dim, dtype=torch.bfloat16)
    integers = meta(batch + 1, dtype=torch.int32)
    tables = meta(batch, -(-context // shape.block_size), dtype=torch.int32)
    inputs = AttentionInputs(integers, integers[:batch], tables, integers[:1], context, 1, True)
    out = meta(batch, heads, dtype=torch.bfloat16)
    for launch in attention_launches(out, queries, pool, inputs, shape.head_dim**-0.5):
        yield "attention", launch, batch * context * 2 * kv * 2.0 if launch.streams else 0.0


def kernels_of_step(shape: ModelShape, weights: str, batch: int, context: int, arch: int) -> list[Kernel]:
    """The kernels of a step, compiled for one architecture."""
    from d3engine.kernels.inspect import needs

    found = [Kernel("ends of a step", False, 0.0, 0.0)] * 3  # begin, embedding, end
    for operation, launch, size in step_launches(shape, weights, batch, context):
        in_flight = needs(launch, arch)["in_flight"] if launch.streams and size else 0
        found.append(Kernel(operation, operation != "lm_head", size, in_flight))
    return found


def report_of(shape: ModelShape, layers: int, weights: str, batch: int, context: int) -> dict[str, Any]:
    """All figures, by device and depth."""
    compiled = {arch: kernels_of_step(shape, weights, batch, context, arch) for arch in {d.arch for d in DEVICES}}
    rows = []
    for device in DEVICES:
        kernels = compiled[device.arch]
        for depth in sorted({layers, *(math.floor(layers * share) for share in (0.75, 0.5, 0.25))}, reverse=True):
            time, limit = step_us(kernels, device, depth), limit_us(kernels, device, depth)
            figures = {"step_us": time, "tokens_per_second": batch * 1e6 / time, "share_of_limit": limit / time}
            rows.append({"device": device.name, "layers": depth} | figures)
    asked = {"shape": shape.name, "weights": weights, "batch": batch, "context": context}
    kernels = {str(arch): [asdict(kernel) for kernel in found] for arch, found in compiled.items()}
    return asked | {"is_model": True, "rows": rows, "kernels": kernels, "devices": [asdict(d) for d in DEVICES]}


def show(report: dict[str, Any], console: Console) -> None:
    """The table; its title says that it is a model."""
    words = "{shape}, {weights}, batch {batch}, context {context}".format(**report)
    table = Table(title=f"By a model, not measured: {words}", title_justify="left")
    for name in ("device", "layers", "ms a step", "tokens/s", "of the limit"):
        table.add_column(name, justify="left" if name == "device" else "right")
    for row in report["rows"]:
        time = f"{row['step_us'] / 1000:.2f}"
        share = f"{row['share_of_limit']:.2f}"
        table.add_row(row["device"], str(row["layers"]), time, f"{row['tokens_per_second']:.0f}", share)
    console.print(table)


def plot(reports: list[dict[str, Any]], path: str) -> None:
    """Draw milliseconds of a step over its layers, a line a device and a panel a report, to a PNG file."""
    from d3engine.pictures.colours import BLUE, INK, ORANGE
    from d3engine.pictures.plots import new_figure, save_figure

    figure = new_figure(width=3.1 * len(reports), height=3.6)
    panels = figure.subplots(1, len(reports), squeeze=False)[0]
    for axes, report in zip(panels, reports, strict=True):
        for device, colour in zip(report["devices"], (BLUE, ORANGE, INK), strict=True):
            rows = [row for row in report["rows"] if row["device"] == device["name"]]
            layers = [row["layers"] for row in rows]
            axes.plot(layers, [row["step_us"] / 1e3 for row in rows], color=colour, marker="o", label=device["name"])
            limits = [row["step_us"] / 1e3 * row["share_of_limit"] for row in rows]
            axes.plot(layers, limits, color=colour, linestyle=":")
        axes.set_title("{weights}, batch {batch}".format(**report), fontsize="medium")
        axes.set_xlabel("layers of the step")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("milliseconds a step")
    panels[0].legend(frameon=False, fontsize="small")
    words = "{shape}, context {context}".format(**reports[0])
    figure.suptitle(f"By a model, not measured: {words}; dotted: at the copy rate", fontsize="medium")
    save_figure(figure, Path(path))


def main(arguments: list[str] | None = None) -> None:
    """Compile the kernels of a step and print what the model makes of them."""
    from d3engine.kernels.triton import launches

    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_model", description=(__doc__ or "").strip())
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--shape", choices=launches.SHAPES, default="llama2-7b", help="whose sizes a layer has")
    parser.add_argument("--layers", type=int, default=32, help="of the whole model")
    parser.add_argument("--weights", choices=WEIGHT_BYTES, default="bf16")
    parser.add_argument("--batch", type=int, choices=CONTEXT_BATCHES, default=1, help="rows of a step")
    parser.add_argument("--context", type=int, default=512, help="entries of each row")
    parser.add_argument("--json", metavar="FILE", help="write all figures to this file")
    parser.add_argument("--plot", metavar="FILE", help="draw to this PNG file (needs matplotlib)")
    parser.add_argument("--of", nargs="+", metavar="FILE", help="compile nothing: draw what --json wrote to these")
    options = parser.parse_args(arguments)
    if options.of and not options.plot:
        parser.error("--of says what to draw, and needs --plot")
    if options.of:
        plot([json.loads(Path(file).read_text(encoding="utf-8")) for file in options.of], options.plot)
        return
    shape = launches.SHAPES[options.shape]
    found = report_of(shape, options.layers, options.weights, options.batch, options.context)
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
