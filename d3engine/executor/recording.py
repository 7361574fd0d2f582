"""How a step's launches become something that repeats them: a CUDA graph, or where there are none the step itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

LEAST_FREE = 256 * 2**20
"""Bytes that the device should have free for a capture: during one, torch's allocator gives back nothing of what it
keeps for later."""

Step = Callable[[], None]
"""Carries out one decode step on the rows that stand in device memory."""


class Recorder(Protocol):
    """Turns a step's launches into something that repeats them."""

    def record(self, step: Step) -> Step: ...

    def memory_bytes(self) -> int: ...


class CudaGraphs:
    """Captures steps as CUDA graphs that share one memory pool: they run one after another.

    `has_ranks`: steps hold collectives. NCCL's own thread then asks the device for what it still waits for, which
    must not spoil a capture; the capture itself is of this thread's launches either way.
    """

    def __init__(self, device: torch.device, *, has_ranks: bool = False) -> None:
        self._device = device
        self._error_mode = "thread_local" if has_ranks else "global"
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._memory = 0
        self._first = self._capture_nothing()

    def record(self, step: Step) -> Step:
        """Run `step` once so that all kernels are compiled and all workspaces there, then capture it.

        Not by `torch.cuda.graph`, which gives all that torch keeps for later back to the device each time: the next
        prompt would pay for it.
        """
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            step()
        self._stream.synchronize()  # a fault of the device shows here, and not in the capture
        self._make_room()
        before = torch.cuda.memory_reserved(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(self._pool, capture_error_mode=self._error_mode)
            try:
                step()
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)
        self._memory += torch.cuda.memory_reserved(self._device) - before
        replay: Step = graph.replay
        return replay

    def _make_room(self) -> None:
        """Give back what torch keeps: before the first capture, which takes most, and where little is left."""
        if not self._memory or torch.cuda.mem_get_info(self._device)[0] < LEAST_FREE:
            torch.cuda.empty_cache()

    def _capture_nothing(self) -> torch.cuda.CUDAGraph:
        """A graph of one sum, to be kept as long as the others.

        The first graph of a process makes tensors of torch's random generator. Made under `inference_mode`, as steps
        run, they could not be written by a capture outside it, such as one of torch.compile in the same process.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(False):
            number = torch.zeros(1, device=self._device)
            torch.cuda.synchronize(self._device)
            with torch.cuda.graph(graph, stream=self._stream):
                number.add_(1)
        return graph

    def memory_bytes(self) -> int:
        """What torch's allocator has reserved in addition since the first graph."""
        return self._memory


class Repeats:
    """Where there are no graphs, a step is simply called again: the same launches on the same memory."""

    def record(self, step: Step) -> Step:
        step()
        return step

    def memory_bytes(self) -> int:
        return 0
