"""Options of `pytest benchmarks`."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--small", action="store_true", help="small models, where only running counts, not the figures")


@pytest.fixture(scope="session")
def small(request: pytest.FixtureRequest) -> bool:
    """Whether models are to be small."""
    return bool(request.config.getoption("--small"))
