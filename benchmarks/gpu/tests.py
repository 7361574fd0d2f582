"""The tests that want a GPU in a pytest of their own: kernels, compiled, and the engine on it."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.common import Round

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 400.0
TAIL_CHARACTERS = 12_000
_COUNT = re.compile(r"(\d+) (passed|failed|skipped|errors?|xfailed|xpassed|deselected)\b")


def run(report: dict[str, Any], current: Round) -> None:
    """Run the tests and record counts and the end of the output; a failed test fails this part."""
    # A rehearsal runs one quick file: CI runs the others for themselves, and kernels take minutes in the interpreter.
    targets = ["tests/gpu", "tests/kernels"] if current.on_gpu else ["tests/kernels/test_reference_rows.py"]
    command = [sys.executable, "-m", "pytest", *targets, "-p", "no:cacheprovider", "-ra", "--tb=short"]
    if not current.on_gpu:
        command += ["--noconftest"]  # that file needs none, and importing transformers takes longer than all of it
    if current.on_gpu:
        command += ["-k", "not cpu"]  # tests of the engine run on both; here the other one would only take time
        if importlib.util.find_spec("xdist"):
            command += ["-n", "8"]  # most of the time is compiling, on the host
    environment = dict(os.environ)
    if current.on_gpu:
        environment.pop("TRITON_INTERPRET", None)
    timeout = max(10.0, min(TIMEOUT_S, current.left() - 3.0))
    report.update(command=["python", *command[1:]], timeout_s=timeout, timed_out=False)
    start = time.monotonic()
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # pytest and its workers: none may go on beside the next part
        output, _ = process.communicate()
        report["timed_out"] = True
    report["exit_code"] = process.returncode
    text = output.decode(errors="replace")
    report.update(seconds=time.monotonic() - start, counts=counts(text), tail=text[-TAIL_CHARACTERS:])
    if report["exit_code"] != 0:
        raise RuntimeError(f"the tests did not pass: {report['counts']}, exit code {report['exit_code']}")


def counts(output: str) -> dict[str, int]:
    """How many tests passed, failed and so on, by pytest's last line that counts any."""
    for line in reversed(output.splitlines()):
        found = _COUNT.findall(line)
        if found and " in " in line:
            return {name.rstrip("s") if name == "errors" else name: int(number) for number, name in found}
    return {}
