"""What a capture asks of CUDA, which is made up here: what torch keeps is given back once, not for each graph."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from d3engine.executor.graph_shapes import LEAST_FREE, CudaGraphs


class FakeCuda:
    """Notes what is called in which order; a capture takes 100 bytes more the first time, 10 each time after it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.free = 2 * LEAST_FREE
        self.reserved = 0
        stream = SimpleNamespace(wait_stream=lambda other: None, synchronize=self.noting("synchronize"))
        replaced: dict[str, Any] = {
            "graph_pool_handle": lambda: (0, 1),
            "Stream": lambda device: stream,
            "current_stream": lambda device: stream,
            "stream": lambda given: nullcontext(),
            "synchronize": self.noting("synchronize the device"),
            "empty_cache": self.noting("give back"),
            "memory_reserved": lambda device: self.reserved,
            "mem_get_info": lambda device: (self.free, 10 * LEAST_FREE),
            "CUDAGraph": lambda: SimpleNamespace(
                capture_begin=self.begin, capture_end=self.noting("end"), replay=self.noting("replay")
            ),
            "graph": lambda graph, stream: nullcontext(),
        }
        for name, value in replaced.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def noting(self, name: str) -> Callable[..., None]:
        return lambda *given: self.calls.append(name)

    def begin(self, *pool: Any, capture_error_mode: str) -> None:
        self.calls.append("begin")
        self.reserved += 10 if self.reserved else 100


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def graphs_on(cuda: FakeCuda) -> CudaGraphs:
    graphs = CudaGraphs(torch.device("cpu"))  # which captures a sum of its own
    cuda.calls.clear()
    return graphs


def test_only_the_first_capture_gives_back_what_torch_keeps(cuda: FakeCuda) -> None:
    graphs = graphs_on(cuda)
    step = cuda.noting("step")
    once = ["step", "synchronize", "begin", "step", "end"]
    graphs.record(step)
    assert cuda.calls == [*once[:2], "give back", *once[2:]]
    cuda.calls.clear()
    replay = graphs.record(step)
    assert cuda.calls == once
    assert graphs.memory_bytes() == 110
    replay()
    assert cuda.calls == [*once, "replay"]


def test_where_little_memory_is_left_a_capture_gives_back_what_torch_keeps(cuda: FakeCuda) -> None:
    graphs = graphs_on(cuda)
    graphs.record(cuda.noting("step"))
    cuda.calls.clear()
    cuda.free = LEAST_FREE - 1
    graphs.record(cuda.noting("step"))
    assert "give back" in cuda.calls


def test_a_fault_in_a_capture_ends_the_capture(cuda: FakeCuda) -> None:
    graphs = graphs_on(cuda)

    def step() -> None:
        if "begin" in cuda.calls:
            raise ValueError("no such kernel")

    with pytest.raises(ValueError, match="no such kernel"):
        graphs.record(step)
    assert cuda.calls[-1] == "end"
