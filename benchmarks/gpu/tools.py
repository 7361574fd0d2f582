"""Races, bad accesses and the bytes that kernels move, by NVIDIA's own tools; without a tool its part is skipped."""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
from typing import Any

from benchmarks.gpu.common import LEAST_S, Round
from benchmarks.gpu.tests import ROOT, TAIL_CHARACTERS, checkout_environment
from d3engine.utils.children import python_command

CHECKS = ("memcheck", "racecheck", "initcheck")
METRICS = {
    "gpu__time_duration.sum": "time",
    "dram__bytes.sum": "memory_bytes",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "memory_percent",
    "launch__registers_per_thread": "registers",
}


def sanitized(report: dict[str, Any], current: Round) -> None:
    """Run every operation on tiny inputs under each check of compute-sanitizer; an error that it finds is a failure."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        report["skipped"] = "compute-sanitizer is not on the path"
        return
    report["checks"] = {}
    for check in CHECKS:
        if current.left() < LEAST_S:
            report["stopped"] = f"time: before {check}"
            break
        command = [program, "--tool", check, "--error-exitcode", "9", "--target-processes", "all"]
        # Without torch's own cache every tensor is an allocation whose ends the tool knows.
        found = _under(command, "operations", current, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
        count = re.search(r"(?:ERROR SUMMARY|RACECHECK SUMMARY): (\d+)", found["output"])
        report["checks"][check] = {
            "exit_code": found["exit_code"],
            "errors": int(count[1]) if count else None,
            "tail": found["output"][-TAIL_CHARACTERS:],
        }
        current.keep(report)
    failed = [check for check, found in report["checks"].items() if found["exit_code"] != 0 or found["errors"]]
    if failed:
        raise RuntimeError(f"compute-sanitizer: {', '.join(failed)} found errors or did not end; see `checks`")


def profiled(report: dict[str, Any], current: Round) -> None:
    """Bytes from memory, time and registers of each kernel of a layer, by ncu; clocks are left as they are."""
    program = shutil.which("ncu")
    if program is None:
        report["skipped"] = "ncu is not on the path"
        return
    command = [program, "--clock-control", "none", "--profile-from-start", "off", "--target-processes", "all"]
    command += ["--metrics", ",".join(METRICS), "--csv", "--print-units", "base"]
    found = _under(command, "layer", current, {})
    report["kernels"] = kernels_of(found["output"])
    if found["exit_code"] != 0 or not report["kernels"]:
        report["tail"] = found["output"][-TAIL_CHARACTERS:]
        raise RuntimeError(f"ncu ended with exit code {found['exit_code']} and {len(report['kernels'])} kernels")


def kernels_of(output: str) -> list[dict[str, Any]]:
    """The kernels in order, each with its `METRICS`, from what ncu prints as CSV behind lines of others."""
    lines = [line for line in output.splitlines() if line.startswith('"')]
    rows: dict[str, dict[str, Any]] = {}
    for line in csv.DictReader(lines):
        name = METRICS.get(line.get("Metric Name", ""))
        if name is not None:
            row = rows.setdefault(line["ID"], {"kernel": line["Kernel Name"]})
            row[name] = float(line["Metric Value"].replace(",", ""))
    return list(rows.values())


def _under(tool: list[str], what: str, current: Round, variables: dict[str, str]) -> dict[str, Any]:
    """Run the target under a tool until the part's time is up; its exit code, None where it was ended, and output."""
    command = [*tool, *python_command("-m", "benchmarks.gpu.tool_target", what)]
    limit = max(10.0, current.left() - LEAST_S)
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=checkout_environment() | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=limit,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        text = error.stdout or b""
        return {"exit_code": None, "output": text.decode(errors="replace") if isinstance(text, bytes) else text}
    return {"exit_code": done.returncode, "output": done.stdout}
