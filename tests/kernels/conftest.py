"""Runs `test_triton_*.py` where Triton kernels can run: compiled on a GPU, else in Triton's interpreter.
Triton decides between the two when it is first imported; `tests/conftest.py` sets TRITON_INTERPRET=1 before that."""

import os
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor


class WithoutTriton(pytest.Module):
    """A file of Triton tests where there is no Triton, and so nothing to import."""

    def collect(self) -> Iterator[pytest.Item]:
        pytest.skip("triton is not installed", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Let Triton's tests say why they do not run."""
    if find_spec("triton") is None and module_path.name.startswith("test_triton_"):
        return WithoutTriton.from_parent(parent, path=module_path)  # type: ignore[no-any-return]
    return None


@pytest.fixture(scope="session", autouse=True)
def quick(interpreter: None) -> None:
    """All kernels here run in the interpreter made quick."""


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the kernels under test run."""
    return torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")


@pytest.fixture
def rows_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.matmul` on a CPU without oneDNN, so that what stands in a row stays there, as on a GPU."""
    # Beside the kernels in the interpreter it is called as on a GPU. On CPUs with AMX it would read beyond rows whose
    # length is no multiple of 32: `_rows_apart` of the reference says more.
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """In its deterministic mode torch fills what `torch.empty` returns with NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def few_programs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles as for a device of two processors, and torch's products from the module's MATMUL_ROWS rows on."""
    # The same paths, less waiting.
    from d3engine.kernels.triton import products

    monkeypatch.setattr(products, "MIN_PROGRAMS", 2)
    monkeypatch.setattr(products, "MATMUL_ROWS", request.module.MATMUL_ROWS)
    monkeypatch.setattr(products, "UNPACK_ROWS", request.module.MATMUL_ROWS)


@pytest.fixture
def randn(device: torch.device) -> Callable[..., Tensor]:
    """`randn(3, 5, dtype=..., scale=2.0)`, the same numbers in every run."""
    generator = torch.Generator().manual_seed(0)

    def make(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(device, dtype)

    return make


@pytest.fixture
def generator() -> torch.Generator:
    """Of a test's random numbers."""
    return torch.Generator().manual_seed(0)


@pytest.fixture(autouse=True)
def described_anew() -> Iterator[None]:
    """Tests change what descriptions of operations depend on, such as the rows of a tile."""
    yield
    if operations := sys.modules.get("d3engine.kernels.triton.operations"):
        operations.forget()
