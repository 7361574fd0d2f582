"""Engines whose executor decodes by itself. What imports Triton waits for a fixture, as in all such files."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from batches import Request

    from d3engine import Engine, RequestOutput

SMALL = "native, 8-bit cache"


@pytest.fixture(params=["graphs", "native", SMALL])
def executor(request: pytest.FixtureRequest) -> str:
    """The executors that decode by themselves, the native library over both kinds of cache."""
    name: str = request.param
    return name


@pytest.fixture
def multi_step(
    request: pytest.FixtureRequest, executor: str, make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Engine]:
    """`make_engine`, with each of the executors that decode by themselves; the same memory has as many blocks."""
    from batches import block_bytes

    from d3engine.engine import resolve
    from d3engine.executor.cuda_graph import GraphExecutor
    from d3engine.executor.native import NativeExecutor

    kind = "graphs" if executor == "graphs" else "native"
    monkeypatch.setattr(resolve, "executor_for", lambda device, dtype, eager, backend: "eager" if eager else kind)
    if kind == "native":
        request.getfixturevalue("native_library")
    wanted = {"graphs": GraphExecutor, "native": NativeExecutor}[kind]

    def make(**changes: Any) -> Engine:
        if executor == SMALL:
            changes["kv_cache_dtype"] = "fp8"
            if memory := changes.get("kv_cache_memory_bytes"):
                changes["kv_cache_memory_bytes"] = memory // block_bytes() * block_bytes(cache="fp8")
        engine = make_engine(**changes)
        assert isinstance(engine.executor, wanted)
        return engine

    return make


@pytest.fixture(scope="session")
def small_solo(make_engine: Callable[..., Engine]) -> Callable[[Request], RequestOutput]:
    """The answer of a request alone over an 8-bit cache, whose next value a sum in another order may choose: so by the
    native library too, step by step."""
    known: dict[str, RequestOutput] = {}

    def answer(request: Request) -> RequestOutput:
        if repr(request) not in known:
            options: dict[str, Any] = {"enable_prefix_caching": False, "num_scheduler_steps": 1}
            engine = make_engine(max_num_seqs=4, kv_cache_dtype="fp8", **options)
            known[repr(request)] = engine.generate(list(request.prompt), request.params, use_tqdm=False)[0]
        return known[repr(request)]

    return answer


@pytest.fixture
def solo(
    request: pytest.FixtureRequest,
    solo: Callable[[Request], RequestOutput],
    small_solo: Callable[[Request], RequestOutput],
) -> Callable[[Request], RequestOutput]:
    """The answer of a request alone, over the kind of cache that the test's executor has."""
    is_small = "executor" in request.fixturenames and request.getfixturevalue("executor") == SMALL
    return small_solo if is_small else solo
