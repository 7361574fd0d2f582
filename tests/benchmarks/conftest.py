"""Fixtures of all tests of benchmarks."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _threads() -> Iterator[None]:
    """A benchmark sets torch's number of threads for its own process; this one has other tests."""
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
