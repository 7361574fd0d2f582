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
from d3engine.utils.children import python_command

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 400.0
TAIL_CHARACTERS = 12_000
_OUTCOME = re.compile(r"\b(PASSED|FAILED|SKIPPED|ERROR)\b")
_COUNT = re.compile(r"(\d+) (passed|failed|skipped|errors?|xfailed|xpassed|deselected)\b")


def pytest_arguments(on_gpu: bool) -> list[str]:
    """What Python runs in this part; a rehearsal runs one quick file, as kernels take minutes in the interpreter."""
    if not on_gpu:  # that file needs no conftest, and importing transformers takes longer than all of it
        targets, own = ["tests/kernels/test_reference_rows.py"], ["--noconftest"]
    else:
        # The native library is no part of a checkout and runs on the CPU. Tests of the engine run on both devices.
        targets, own = ["tests/gpu", "tests/kernels"], ["--ignore=tests/kernels/native", "-k", "not cpu"]
        if importlib.util.find_spec("xdist"):
            own += ["-n", "14"]  # most of the time is compiling, on the host
    # A header would name folders of the machine.
    usual = ["-p", "no:cacheprovider", "-vv", "-ra", "--tb=short", "--no-header"]
    return ["-m", "pytest", *targets, *usual, *own]


def checkout_environment() -> dict[str, str]:
    """This process's variables, and PYTHONPATH with the checkout: nothing is installed, and `-P` searches no folder."""
    paths = (str(ROOT), os.environ.get("PYTHONPATH"))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def run(report: dict[str, Any], current: Round) -> None:
    """Run the tests and record counts and the end of the output; a failed test fails this part."""
    command = python_command(*pytest_arguments(current.on_gpu))
    variables = checkout_environment()
    if current.on_gpu:
        variables.pop("TRITON_INTERPRET", None)
    timeout = max(10.0, min(TIMEOUT_S, current.left() - 3.0))
    report.update(command=["python", *command[1:]], timeout_s=timeout, timed_out=False)
    start = time.monotonic()
    process = subprocess.Popen(
        command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
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
    not_passed = [line[:300] for line in text.splitlines() if re.search(r"\b(FAILED|ERROR)\b", line)]
    report["not_passed"] = sorted(not_passed, key=lambda line: "FAILED" not in line)[:60]  # errors drown no failure
    if report["exit_code"] != 0:
        raise RuntimeError(f"the tests did not pass: {report['counts']}, exit code {report['exit_code']}")


def counts(output: str) -> dict[str, int]:
    """How many tests passed, failed and so on, by pytest's last line that counts any, else by each test's own line."""
    for line in reversed(output.splitlines()):
        found = _COUNT.findall(line)
        if found and " in " in line:
            return {name.rstrip("s") if name == "errors" else name: int(number) for number, name in found}
    return dict(Counter(outcome.lower() for outcome in _OUTCOME.findall(output)))
