"""Which device this is and what it can do at most: copy, read and matrix-product rates, each measured twice."""

from __future__ import annotations

import platform
import shutil
import statistics
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.gpu.common import Round, eager_seconds
from benchmarks.report import version_of
from d3engine.engine.device import settle_programmatic_launch
from d3engine.executor.graph_shapes import CudaGraphs, Repeats
from d3engine.kernels.target import target_of

FACTS = (
    "name",
    "driver_version",
    "memory.total",
    "memory.used",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "power.limit",
    "power.draw",
    "temperature.gpu",
    "mig.mode.current",
)
SAMPLED = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "clocks_throttle_reasons.active")
REHEARSED_PROGRAMS = 4


def run(report: dict[str, Any], current: Round) -> None:
    """Fill in facts and ceilings; of two measurements of one rate the faster is the ceiling."""
    report["facts"] = facts(current)
    report["versions"] = {name: version_of(name) for name in ("torch", "triton", "transformers", "numpy")}
    report["versions"] |= {"python": platform.python_version(), "cuda": torch.version.cuda}
    report["programmatic_launch"] = programmatic_launch(current)
    report["ceilings"] = ceilings(current)


def facts(current: Round) -> dict[str, Any]:
    """What nvidia-smi and torch say of the device; the clocks are those of an idle device."""
    found: dict[str, Any] = {"device": str(current.device)}
    if current.on_gpu:
        properties = torch.cuda.get_device_properties(current.device)
        found |= {
            "name": properties.name,
            "processors": properties.multi_processor_count,
            "capability": f"{properties.major}.{properties.minor}",
            "memory_bytes": properties.total_memory,
            "l2_bytes": properties.L2_cache_size,
        }
    if current.on_gpu and shutil.which("nvidia-smi"):
        command = ["nvidia-smi", f"--query-gpu={','.join(FACTS)}", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        values = [value.strip() for value in done.stdout.split("\n")[0].split(",")]
        known = done.returncode == 0 and len(values) == len(FACTS)
        found["nvidia_smi"] = dict(zip(FACTS, values, strict=True)) if known else done.stdout + done.stderr
    return found


def programmatic_launch(current: Round) -> str:
    """What came of the trial that engines make before kernels begin early."""
    if not current.has_triton:
        return "not tried: Triton runs on a GPU, or in its interpreter (TRITON_INTERPRET=1)"
    from d3engine.kernels.triton import launches, programmatic

    if current.on_gpu and not target_of(current.device).has_programmatic_launch:
        return "not tried: this device does not have it"
    recorder = CudaGraphs(current.device) if current.on_gpu else Repeats()
    # The interpreter runs one program after another: all those of a device would take it more than a minute.
    programs = programmatic.PROGRAMS if current.on_gpu else REHEARSED_PROGRAMS
    with patch.object(launches, "PROGRAMMATIC", True), patch.object(programmatic, "PROGRAMS", programs):
        return programmatic.fault(current.device, recorder.record) or "passed"


@contextmanager
def launched_as_in_engines(current: Round) -> Iterator[bool]:
    """Within it kernels are launched as an engine of this mode does; whether by programmatic launch.

    Tiles, registers and what a kernel does first depend on it.
    """
    if not current.has_triton:
        yield False
        return
    from d3engine.kernels.triton import launches

    with patch.object(launches, "PROGRAMMATIC", False):
        if current.leaves_out("no-pdl"):
            pass
        elif current.on_gpu:
            settle_programmatic_launch(current.device, lambda: CudaGraphs(current.device))
        else:
            launches.PROGRAMMATIC = programmatic_launch(current) == "passed"
        yield launches.PROGRAMMATIC


@contextmanager
def sampled() -> Iterator[dict[str, Any]]:
    """Fill in, at its end, the clocks, power and reasons to throttle that nvidia-smi has seen each second within it."""
    found: dict[str, Any] = {}
    program = shutil.which("nvidia-smi")
    if program is None:
        yield found
        return
    command = [program, f"--query-gpu={','.join(SAMPLED)}", "--format=csv,noheader,nounits", "-l", "1"]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.DEVNULL)
        try:
            yield found
        finally:
            process.kill()
            process.wait()
            output.seek(0)
            rows = [[value.strip() for value in line.split(",")] for line in output if line.endswith("\n")]
            if rows := [row for row in rows if len(row) == len(SAMPLED)]:
                found.update(zip(SAMPLED, map(_spread, zip(*rows, strict=True)), strict=True))


def _spread(values: Sequence[str]) -> Any:
    """Least, median and most of numbers; of anything else how often each was seen."""
    try:
        numbers = [float(value) for value in values]
    except ValueError:
        return dict(Counter(values))
    return {"min": min(numbers), "median": statistics.median(numbers), "max": max(numbers)}


def ceilings(current: Round) -> dict[str, dict[str, Any]]:
    """Rates of a copy, a read and a product of matrices, on random data (zeros draw less power, and run faster)."""
    device, dtype = current.device, current.dtype
    size = 2**31 if current.on_gpu else 2**20  # elements: 4 GiB in bfloat16
    side = 8192 if current.on_gpu else 128
    source = torch.empty(size, dtype=dtype, device=device).normal_()
    target = torch.empty_like(source)
    words = source.view(torch.int32)
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(left)
    return {
        "copy": _twice(lambda: target.copy_(source), 2 * source.nbytes, "bytes read and written", current),
        "read": _twice(lambda: words.amax(), source.nbytes, "bytes read by torch.amax", current),
        "matmul": _twice(lambda: torch.mm(left, right, out=product), 2 * side**3, "operations", current),
    }


def _twice(call: Any, amount: int, unit: str, current: Round) -> dict[str, Any]:
    """The rate of a call that does `amount`, measured twice in a row; `noise` is how far the two lie apart."""
    call()
    seconds = [eager_seconds(call, current.device) for _ in range(2)]
    noise = abs(seconds[0] - seconds[1]) / min(seconds)
    return {"unit": unit, "amount": amount, "seconds": seconds, "rates": [amount / s for s in seconds], "noise": noise}
