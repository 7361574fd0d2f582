"""The tests that want a GPU in a pytest of their own: kernels, compiled, and the engine on it."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.gpu.common import Round
from d3engine.children import python_command

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 400.0
TAIL_CHARACTERS = 12_000
_OUTCOME = re.compile(r"\b(PASSED|FAILED|SKIPPED|ERROR)\b")
_COUNT = re.compile(r"(\d+) (passed|failed|skipped|errors?|xfailed|xpassed|deselected)\b")


def run(report: dict[str, Any], current: Round) -> None:
    """Run the tests and record counts and the end of the output; a failed test fails this part."""
    # A rehearsal runs one quick file: CI runs the others for themselves, and kernels take minutes in the interpreter.
    targets = ["tests/gpu", "tests/kernels"] if current.on_gpu else ["tests/kernels/test_reference_rows.py"]
    command = python_command("-m", "pytest", *targets, "-p", "no:cacheprovider", "-vv", "-ra", "--tb=short")
    command.append("--no-header")  # it names folders of the machine
    environment = dict(os.environ)
    if current.on_gpu:
        environment.pop("TRITON_INTERPRET", None)
        command += ["-k", "not cpu"]  # tests of the engine run on both; here the other one would only take time
        if importlib.util.find_spec("xdist"):
            command += ["-n", "14"]  # most of the time is compiling, on the host
    else:
        command += ["--noconftest"]  # that file needs none, and importing transformers takes longer than all of it
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
    report["not_passed"] = [line[:300] for line in text.splitlines() if re.search(r"\b(FAILED|ERROR)\b", line)][:60]
    if report["exit_code"] != 0:
        raise RuntimeError(f"the tests did not pass: {report['counts']}, exit code {report['exit_code']}")


def counts(output: str) -> dict[str, int]:
    """How many tests passed, failed and so on, by pytest's last line that counts any, else by each test's own line."""
    for line in reversed(output.splitlines()):
        found = _COUNT.findall(line)
        if found and " in " in line:
            return {name.rstrip("s") if name == "errors" else name: int(number) for number, name in found}
    return dict(Counter(outcome.lower() for outcome in _OUTCOME.findall(output)))
