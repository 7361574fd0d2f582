"""Runs `test_triton_*.py` where Triton kernels can run: compiled on a GPU, else in Triton's interpreter.

Triton decides between the two when it is first imported, and transformers, which the shared fixtures need, imports it.
So without a GPU each of these files is one item here: it runs in a pytest of its own with TRITON_INTERPRET=1 set from
the start. Call such a pytest yourself to see single tests: `TRITON_INTERPRET=1 pytest tests/kernels/test_triton_x.py`.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

RUNS_HERE = os.environ.get("TRITON_INTERPRET") == "1" or torch.cuda.is_available()
TIMEOUT_S = 280


class InterpretedFile(pytest.File):
    """A test file as a single item."""

    def collect(self) -> Iterator[pytest.Item]:
        yield InterpretedItem.from_parent(self, name="interpreted")


class InterpretedItem(pytest.Item):
    """Passes if a pytest of the file passes in a fresh process under the interpreter."""

    def runtest(self) -> None:
        if importlib.util.find_spec("triton") is None:
            pytest.skip("triton is not installed")
        environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        for name in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT"):
            environment.pop(name, None)
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(self.path)]
        result = subprocess.run(
            command, cwd=self.config.rootpath, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
        )
        if result.returncode != 0:
            raise InterpretedFailure(result.stdout + result.stderr)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException]) -> str:  # type: ignore[override]
        if isinstance(excinfo.value, InterpretedFailure):
            return str(excinfo.value)
        return str(super().repr_failure(excinfo))

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, "interpreted"


class InterpretedFailure(Exception):
    """The output of the pytest that failed."""


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Replace a file of Triton tests by one item, unless its tests can run in this process."""
    if RUNS_HERE or not module_path.name.startswith("test_triton_"):
        return None
    return InterpretedFile.from_parent(parent, path=module_path)  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the kernels under test run."""
    return torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """In its deterministic mode torch fills what `torch.empty` returns with NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
