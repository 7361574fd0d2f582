"""Engines whose executor decodes by itself. What imports Triton waits for a fixture, as in all such files."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from d3engine import Engine


@pytest.fixture
def ahead(make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    """`make_engine`, with the executor that decodes by itself."""
    from d3engine.executor.cuda_graph import GraphExecutor
    from d3engine.loading import resolve

    monkeypatch.setattr(resolve, "runs_in_graphs", lambda device, enforce_eager: not enforce_eager)

    def make(**changes: Any) -> Engine:
        engine = make_engine(**changes)
        assert isinstance(engine.executor, GraphExecutor)
        return engine

    return make
