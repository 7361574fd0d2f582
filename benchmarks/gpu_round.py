"""One round on a GPU: the device's ceilings, the kernel tests, every kernel, and the engine, in one command.

    python -m benchmarks.gpu_round [--budget SECONDS] [--out FILE] [--parts NAMES] [--smoke]

The one idea: time on a GPU is short, so nothing that goes wrong may cost the rest. Parts run in order of importance; a
part that fails leaves its traceback and what it had found so far, the next one runs, and the file is written after
each. Every part has a process of its own, as a kernel that faults ends the process it is in. `--smoke` rehearses all of
it on a CPU with tiny shapes; its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.gpu import device, engine, kernels, tests
from benchmarks.gpu.common import Round
from benchmarks.report import environment, write_json

PARTS: dict[str, Callable[[dict[str, Any], Round], None]] = {
    "device": device.run,
    "tests": tests.run,
    "kernels": kernels.run,
    "engine": engine.run,
}
LEAST_S = 15.0
"""A part is not begun with less than this left."""
GRACE_S = 30.0
LIMITS_S = {"device": 150.0, "tests": tests.TIMEOUT_S + 30.0, "kernels": 700.0, "engine": 600.0}
"""A part that takes longer hangs, and is ended."""
ENGINE_SHARE = 0.28
"""Of the budget, what the kernels leave to the engine."""


def run_here(name: str, current: Round) -> dict[str, Any]:
    """Run one part in this process: what it found, with `status`, and `traceback` where it failed."""
    found: dict[str, Any] = {"status": "running"}
    try:
        PARTS[name](found, current)
        found["status"] = "skipped" if "skipped" in found else "done"
    except Exception:
        found.update(status="failed", traceback=traceback.format_exc())
    current.keep(found)
    return found


def run_apart(name: str, current: Round) -> dict[str, Any]:
    """Run one part in a process of its own: a kernel that faults or hangs takes no other part with it."""
    with tempfile.TemporaryDirectory() as folder:
        own = replace(current, file=Path(folder) / "found.json")
        process = get_context("spawn").Process(target=run_here, args=(name, own))
        process.start()
        limit = max(LEAST_S, min(LIMITS_S[name], current.left() + GRACE_S))
        process.join(limit)
        hangs = process.is_alive()
        if hangs:
            process.kill()
            process.join()
        assert own.file is not None
        found: dict[str, Any] = json.loads(own.file.read_text(encoding="utf-8")) if own.file.exists() else {}
    if hangs or found.get("status", "running") == "running":
        how = f"was stopped after {limit:.0f} s" if hangs else f"died with exit code {process.exitcode}"
        found.update(status="failed", traceback=f"the part's process {how}; what it had found until then is kept")
    return found


def run_parts(
    report: dict[str, Any],
    names: Sequence[str],
    current: Round,
    start: Callable[[str, Round], dict[str, Any]],
    save: Callable[[], None],
    console: Console,
) -> None:
    """Run the parts in turn by `start`; each leaves what it found in `report["parts"]`, saved at once."""
    for name in names:
        begun = time.monotonic()
        if current.left() < LEAST_S:
            found: dict[str, Any] = {"status": "skipped", "skipped": f"budget: {current.left():.0f} s left"}
        else:
            console.print(f"{name}: {current.left():.0f} s left")
            found = start(name, current)
        found["part_seconds"] = time.monotonic() - begun
        report["parts"][name] = found
        for ceiling, row in found.get("ceilings", {}).items():
            current.ceilings[ceiling] = max(row["rates"])
        if "traceback" in found:
            console.print(found["traceback"], markup=False, highlight=False)
        save()


def show(report: dict[str, Any], console: Console) -> None:
    """One table for the parts, and one for each part that has figures."""
    parts = report["parts"]
    table = Table("part", "status", "seconds", "what")
    for name, found in parts.items():
        table.add_row(name, found["status"], f"{found['part_seconds']:.1f}", _summary(name, found))
    console.print(table)
    if parts.get("kernels", {}).get("rows"):
        console.print(_kernel_table(parts["kernels"]["rows"]))
    if parts.get("engine", {}).get("batches"):
        console.print(_engine_table(parts["engine"]))
    if report["rehearsal"]:
        console.print("A rehearsal: these times say nothing of any device.")


def _summary(name: str, found: dict[str, Any]) -> str:
    if name == "device" and "ceilings" in found:
        rates = {key: max(row["rates"]) / 1e12 for key, row in found["ceilings"].items()}
        noise = max(row["noise"] for row in found["ceilings"].values())
        return (
            f"copy {rates['copy']:.3g} TB/s, read {rates['read']:.3g} TB/s, matmul {rates['matmul']:.3g} TFLOP/s;"
            f" noise {noise:.1%}"
        )
    for key in ("skipped", "stopped"):
        if key in found:
            return str(found[key])
    if name == "tests":
        return ", ".join(f"{number} {outcome}" for outcome, number in found.get("counts", {}).items())
    if name == "kernels" and "rows" in found:
        return f"{len(found['rows'])} cases, Triton {found['triton']}"
    if name == "engine" and found.get("transformers"):
        ratios = [f"{row['engine_over_transformers']:.2f}" for row in found["transformers"]["rows"]]
        return f"over transformers: {', '.join(ratios)}" if ratios else str(found["transformers"].get("skipped", ""))
    return ""


def _kernel_table(rows: list[dict[str, Any]]) -> Table:
    table = Table("shape", "rows", "operation", "error", "torch's", "us", "GB/s", "of copy", "torch us", "cuBLAS us")
    for row in rows:
        triton, reference = row.get("triton", {}), row.get("reference", {})
        table.add_row(
            row["shape"],
            str(row["rows"]),
            row["operation"] + (" [red]failed" if "error" in row or row.get("is_far") else ""),
            _error(triton),
            _error(reference),
            _microseconds(triton),
            f"{triton['gb_per_s']:,.0f}" if "gb_per_s" in triton else "-",
            _percent(triton.get("share_of_copy")),
            _microseconds(reference),
            _microseconds(row.get("cublas", {})),
        )
    return table


def _engine_table(found: dict[str, Any]) -> Table:
    table = Table("batch", "depth", "ms a step", "tok/s", "of copy", "fit: us a layer", "fixed us")
    for batch in found["batches"]:
        fit = batch.get("fit")
        for row in batch["depths"]:
            table.add_row(
                str(batch["batch"]),
                str(row["depth"]),
                f"{row['step_s']['median'] * 1e3:.3f}",
                f"{row['tokens_per_s']:.1f}",
                _percent(row["share_of_copy"]),
                f"{fit['layer_s'] * 1e6:.1f}" if fit else "-",
                f"{fit['fixed_s'] * 1e6:.1f}" if fit else "-",
            )
    return table


def _error(found: dict[str, Any]) -> str:
    if "tokens_that_differ" in found:
        return f"{found['tokens_that_differ'][0]:.0%} differ"
    return f"{max(found['relative_error']):.1e}" if "relative_error" in found else "-"


def _microseconds(found: dict[str, Any]) -> str:
    """The device's time; in brackets the eager one where there is no other."""
    if found.get("device_s"):
        return f"{found['device_s'] * 1e6:.1f}"
    return f"({found['eager_s'] * 1e6:.1f})" if "eager_s" in found else "-"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the round; 1 if a part has failed."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_round", description=__doc__.splitlines()[0])
    parser.add_argument("--budget", type=float, default=1500.0, metavar="SECONDS", help="begin no part beyond this")
    parser.add_argument("--out", default="gpu_round.json", metavar="FILE", help="where all figures go")
    parser.add_argument("--smoke", action="store_true", help="rehearse on the CPU with tiny shapes")
    parser.add_argument("--parts", default=",".join(PARTS), metavar="NAMES", help="some of these, with commas")
    options = parser.parse_args(arguments)
    names = options.parts.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if not options.smoke and not torch.cuda.is_available():
        parser.error("there is no GPU; --smoke rehearses without one")
    current = Round(
        torch.device("cpu" if options.smoke else "cuda"),
        options.smoke,
        options.budget,
        reserve=ENGINE_SHARE * options.budget if "engine" in names and not options.smoke else 0.0,
    )
    console = Console() if sys.stdout.isatty() else Console(width=132)
    report: dict[str, Any] = {
        "benchmark": "gpu_round",
        "environment": environment("benchmarks.gpu_round", arguments),
        "rehearsal": options.smoke,
        "budget_s": options.budget,
        "parts": {},
    }
    run_parts(report, names, current, run_apart, lambda: write_json(report, options.out), console)
    show(report, console)
    return int(any(found["status"] == "failed" for found in report["parts"].values()))


if __name__ == "__main__":
    sys.exit(main())
