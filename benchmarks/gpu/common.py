"""What the parts of the round share: where they run, how long they may, and how a call is timed.

`eager_seconds` is what a caller sees who launches from Python on an idle queue; `device_seconds` is the device's alone,
of a CUDA graph of many calls over rotated inputs.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from d3engine.kernels.kv_pool import FP8, FP8_CAPABILITY
from d3engine.kernels.target import target_of
from d3engine.model.quantization_config import QUANTIZATION_SCHEMES
from d3engine.utils.files import write_whole

Call = Callable[[], object]
Row = dict[str, Any]
Fill = Callable[[Row], None]
MODES = ("graphs", "no-pdl", "eager", "reference")
"""How an engine is run: as by default; then without programmatic launch, without CUDA graphs as well, and with kernels
of plain torch instead of Triton's."""
LEAST_S = 3.0
"""A row is not begun with less time than this."""
ROTATED_BYTES = 256 * 2**20
"""Inputs are rotated over copies that take this together: several times the L2 cache of any GPU (50 - 126 MB)."""


@dataclass(frozen=True)
class Round:
    """One round, or one part of it: its device, whether it is only a rehearsal, and its end."""

    device: torch.device
    smoke: bool
    budget: float  # seconds
    started: float = field(default_factory=lambda: time.monotonic())
    mode: str = MODES[0]  # how the engines of this part are run
    file: Path | None = None  # where a part keeps what it has found so far
    ceilings: dict[str, float] = field(default_factory=dict)  # bytes or operations per second, as measured here

    @property
    def on_gpu(self) -> bool:
        """Whether there is a device to measure; without one, times are only a rehearsal."""
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """bfloat16; float32 on a CPU, where Triton's interpreter computes bfloat16 wrongly."""
        return torch.bfloat16 if self.on_gpu else torch.float32

    @property
    def has_triton(self) -> bool:
        """Whether Triton kernels can run: on a GPU, or in the interpreter where it was asked for."""
        return self.on_gpu or os.environ.get("TRITON_INTERPRET") == "1"

    def leaves_out(self, mode: str) -> bool:
        """Whether engines run without what the round leaves out in `mode`, now or since an earlier one."""
        return MODES.index(self.mode) >= MODES.index(mode)

    @property
    def schemes(self) -> tuple[str, ...]:
        """How weights can be quantized here: with 8-bit floats only where the device converts them."""
        converts = not self.on_gpu or target_of(self.device).has(FP8_CAPABILITY)
        return tuple(scheme for scheme in QUANTIZATION_SCHEMES if converts or scheme != "fp8")

    @property
    def blocks(self) -> tuple[str, ...]:
        """Types of blocks whose products are measured: those of Q4_K_M files and of AWQ; a small one in a rehearsal."""
        return ("Q4_K", "Q6_K", "U4_128") if self.on_gpu else ("Q4_0",)

    def left(self) -> float:
        """Seconds of the budget that are left, perhaps below zero."""
        return self.budget - (time.monotonic() - self.started)

    def keep(self, found: dict[str, Any]) -> None:
        """Write down what a part has found so far, for the case that its process dies; never half of it."""
        if self.file is not None:
            write_whole(self.file, json.dumps(found))

    def kept(self) -> dict[str, Any]:
        """What `keep` has written down, by a process before this one; nothing at the start of a part."""
        if self.file is None or not self.file.exists():
            return {}
        found: dict[str, Any] = json.loads(self.file.read_text(encoding="utf-8"))
        return found

    def share(self, num_bytes: float, seconds: float | None) -> float | None:
        """What moving `num_bytes` in `seconds` is of the measured copy rate; None where one is not known."""
        rate = self.ceilings.get("copy")
        return num_bytes / seconds / rate if rate and seconds else None


def takes_scales_of_rows() -> bool:
    """Whether torch's product of 8-bit floats takes a scale for each row on a CPU too; torch 2.11's does not."""
    ones, scales = torch.ones(16, 16).to(FP8), torch.ones(16, 1)
    try:
        torch._scaled_mm(ones, ones.t(), scale_a=scales, scale_b=scales.t(), out_dtype=torch.float32)
    except RuntimeError:
        return False
    return True


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `TimeoutError` in the block after these seconds, as soon as it is in Python; main thread only."""

    def expire(signal_number: int, frame: object) -> None:
        raise TimeoutError(f"took longer than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def synchronize(device: torch.device) -> None:
    """Wait for the device, if there is anything to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class DeviceLost(RuntimeError):
    """The device answers nothing more in this process; another process may go on."""


def require_device(current: Round) -> None:
    """Raise `DeviceLost` where an error before has ended the device's context: then every later call fails too."""
    try:
        synchronize(current.device)
    except Exception as error:
        raise DeviceLost(f"{type(error).__name__}: {error}"[:500]) from error


def fill_rows(
    report: Row, makers: Iterable[Callable[[], Iterable[tuple[Row, Fill]]]], blank: Row, current: Round
) -> None:
    """Add to the report the rows that makers begin, each with what fills it in, and keep it before and after that.

    The fields of `blank` tell rows apart; one that a process before has kept is left out. A maker that raises
    leaves `blank` itself, with its place in the first field; the next one follows.
    """
    rows: list[Row] = report.setdefault("rows", [])

    def key(row: Row) -> tuple[Any, ...]:
        return tuple(row[name] for name in blank)

    known = {key(row) for row in rows}

    def begun() -> Iterator[tuple[Row, Fill]]:
        for place, make in enumerate(makers):
            failed = blank | {next(iter(blank)): f"inputs of group {place}"}
            if key(failed) in known:  # made again, they would fail again
                continue
            try:
                yield from make()
            except Exception:
                yield failed | {"error": traceback.format_exc()}, lambda row: None

    for row, fill in begun():
        if key(row) in known:
            continue
        if current.left() < LEAST_S:
            report["stopped"] = f"time: before {', '.join(map(str, key(row)))}"
            break
        rows.append(row)
        current.keep(report | {"rows": [*rows[:-1], row | {"error": "the process ended within this one"}]})
        try:
            fill(row)
            if current.on_gpu:
                torch.cuda.empty_cache()
        except Exception:
            row.setdefault("error", traceback.format_exc())
        current.keep(report)
        if "error" in row:
            require_device(current)


def eager_seconds(call: Call, device: torch.device) -> float:
    """Median seconds of one call: `do_bench` on a GPU (L2 cleared between calls), the clock of the host elsewhere."""
    if device.type == "cuda":
        from triton.testing import do_bench

        return float(do_bench(call, warmup=10, rep=50, return_mode="median")) / 1e3
    return statistics.median(host_seconds(call, device) for _ in range(3))


def host_seconds(call: Call, device: torch.device) -> float:
    """Seconds of one call by the host's clock, the device's work included."""
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


def device_seconds(calls: Sequence[Call]) -> float:
    """Median seconds a call in a CUDA graph that runs `calls` in order, over and over; only on a GPU.

    At least 16 calls are captured, so that what starts a graph is spread thin. Raises what capturing raises.
    """
    captured = list(calls) * -(-16 // len(calls))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:  # compiles what is to be compiled, and lets libraries take their workspace
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in captured:
            call()
    for _ in range(3):
        graph.replay()
    start, stop = ([torch.cuda.Event(enable_timing=True) for _ in range(15)] for _ in range(2))
    for first, last in zip(start, stop, strict=True):
        first.record()
        graph.replay()
        last.record()
    torch.cuda.synchronize()
    milliseconds = [first.elapsed_time(last) for first, last in zip(start, stop, strict=True)]
    return statistics.median(milliseconds) / 1e3 / len(captured)


def timed(calls: Sequence[Call], current: Round) -> dict[str, Any]:
    """Both times of a call that has copies; a graph that cannot be captured is recorded, and fails nothing."""
    times: dict[str, Any] = {"eager_s": eager_seconds(calls[0], current.device), "device_s": None}
    if current.on_gpu:
        try:
            times["device_s"] = device_seconds(calls)
        except Exception as error:
            times["device_error"] = f"{type(error).__name__}: {error}"[:500]
    return times
