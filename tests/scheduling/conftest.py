"""Engines whose executor decodes by itself. What imports Triton waits for a fixture, as in all such files."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from d3engine import Engine


@pytest.fixture(params=["graphs", "native"])
def ahead(
    request: pytest.FixtureRequest, make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Engine]:
    """`make_engine`, with each of the executors that decode by themselves."""
    from d3engine.executor.cuda_graph import GraphExecutor
    from d3engine.executor.native import NativeExecutor
    from d3engine.loading import resolve

    monkeypatch.setattr(resolve, "executor_for", lambda device, dtype, eager: "eager" if eager else request.param)
    if request.param == "native":
        request.getfixturevalue("native_library")
    wanted = {"graphs": GraphExecutor, "native": NativeExecutor}[request.param]

    def make(**changes: Any) -> Engine:
        engine = make_engine(**changes)
        assert isinstance(engine.executor, wanted)
        return engine

    return make


@pytest.fixture
def graphs(make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    """The same with the graphs alone, for what only these have."""
    from d3engine.loading import resolve

    monkeypatch.setattr(resolve, "executor_for", lambda device, dtype, eager: "eager" if eager else "graphs")
    return make_engine
