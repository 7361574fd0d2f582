"""What a capture asks of CUDA, which is made up here, and what is done where it has no memory for one."""

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fixture_types import MakeEngine

from d3engine import D3, Engine, SamplingParams
from d3engine.async_engine.engine_loop import EngineLoop, Stop
from d3engine.engine.executors import executor_for
from d3engine.errors import EngineDeadError
from d3engine.executor.cuda_graph import GraphExecutor
from d3engine.executor.graph_shapes import LEAST_FREE, CaptureMemoryError, CudaGraphs, GraphShape, Repeats, Step
from d3engine.executor.streaming import HostTokens
from d3engine.kernels.decode_rows import DecodeRows
from d3engine.scheduling.sampling_mode import SamplingMode

MIB = 2**20
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


class FakeCuda:
    """Notes what is called in which order; a capture takes 100 bytes more the first time, 10 each time after it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.free = 2 * LEAST_FREE
        self.total = 10 * LEAST_FREE
        self.reserved = 0
        self.driver_bytes = 0  # of a capture, beside what torch reserves
        self.modes: set[str] = set()
        self.failing: dict[str, Exception] = {}  # by the call that raises
        stream = SimpleNamespace(wait_stream=lambda other: None, synchronize=self.noting("synchronize"))
        replaced: dict[str, Any] = {
            "graph_pool_handle": lambda: (0, 1),
            "Stream": lambda device: stream,
            "current_stream": lambda device: stream,
            "stream": lambda given: nullcontext(),
            "synchronize": self.noting("synchronize the device"),
            "empty_cache": self.noting("give back"),
            "memory_reserved": lambda device: self.reserved,
            "mem_get_info": lambda device: (self.free, self.total),
            "CUDAGraph": lambda: SimpleNamespace(
                capture_begin=self.begin, capture_end=self.noting("end"), replay=self.noting("replay")
            ),
            "graph": self.graph,
        }
        for name, value in replaced.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def noting(self, name: str) -> Callable[..., None]:
        def note(*given: Any) -> None:
            self.calls.append(name)
            if name in self.failing:
                raise self.failing[name]

        return note

    def graph(self, graph: Any, stream: Any, capture_error_mode: str = "global") -> nullcontext[None]:
        self.modes.add(capture_error_mode)
        return nullcontext()

    def begin(self, *pool: Any, capture_error_mode: str = "global") -> None:
        self.calls.append("begin")
        self.modes.add(capture_error_mode)
        more = 10 if self.reserved else 100
        self.reserved += more
        self.free -= self.driver_bytes and more + self.driver_bytes


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


def test_capture_in_little_memory_gives_back_what_torch_keeps(cuda: FakeCuda) -> None:
    """Where little memory is left a capture gives back what torch keeps."""
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


def test_every_capture_is_of_this_thread_alone(cuda: FakeCuda) -> None:
    """Every capture and the first empty one is of this thread alone."""
    # Another thread may load a bridge to the device meanwhile.
    CudaGraphs(torch.device("cpu")).record(cuda.noting("step"))
    assert cuda.modes == {"thread_local"}


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("CUDA error: out of memory")]
)
@pytest.mark.parametrize("call", ["step in a capture", "end"])
def test_no_memory_in_a_capture_is_one_error(cuda: FakeCuda, error: Exception, call: str) -> None:
    """No memory in a capture is one error, by PyTorch's allocator and by the driver."""
    graphs = graphs_on(cuda)
    if call != "end":  # the capture that it has spoilt then ends in an error too
        cuda.failing["end"] = RuntimeError("CUDA error: operation failed due to a previous error during capture")
    cuda.failing[call] = error
    with pytest.raises(CaptureMemoryError):
        graphs.record(lambda: cuda.noting("step in a capture" if "begin" in cuda.calls else "step")())


def test_drivers_memory_of_a_graph_counts_until_dropped(cuda: FakeCuda) -> None:
    """What the driver takes for a graph counts until it is dropped."""
    graphs = graphs_on(cuda)
    cuda.driver_bytes = 4 * MIB
    first, _ = (graphs.record(cuda.noting("step")) for _ in range(2))
    assert graphs.memory_bytes() == 110 + 8 * MIB
    graphs.forget(first)
    assert graphs.memory_bytes() == 110 + 4 * MIB
    assert graphs.bytes_for(3) == 12 * MIB


@pytest.mark.parametrize(("backend", "kind"), [("auto", "graphs"), ("triton", "graphs"), ("torch", "eager")])
def test_no_graph_is_captured_of_plain_pytorch(backend: str, kind: str) -> None:
    """Its operations wait for numbers of the device, which a capture does not allow."""
    assert executor_for(torch.device("cuda"), torch.bfloat16, False, backend) == kind


def test_tokens_are_awaited_on_the_device_of_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The current device may be another one, as beside an engine on cuda:1."""
    recorded: list[Any] = []
    event = SimpleNamespace(record=lambda stream=None: recorded.append(stream), synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: ("the stream of", device))
    tokens = HostTokens(DecodeRows.empty(2, 1, 1, 2, 3, "cpu"))
    tokens._is_pinned = True
    tokens.fetch(0)
    assert recorded == [("the stream of", torch.device("cpu"))]


# -- the executor's part ---------------------------------------------------------------------------------------------


@pytest.fixture
def engine(graphs: MakeEngine) -> Engine:
    return graphs(max_num_seqs=2, depth=D3(0.8, 0.3))


def captures_by(cuda: FakeCuda, engine: Engine) -> GraphExecutor:
    """The engine's executor, with graphs of the made-up device; 4 MiB each."""
    executor = engine.executor
    assert isinstance(executor, GraphExecutor)
    executor._recorder = CudaGraphs(torch.device("cpu"))
    cuda.driver_bytes = 4 * MIB
    return executor


@pytest.mark.parametrize("gib", [24, 80])
def test_captures_ahead_of_need_leave_a_reserve_and_say_so_once(
    cuda: FakeCuda, engine: Engine, gib: int, caplog: pytest.LogCaptureFixture
) -> None:
    reserve = min(2**30, gib * 2**30 // 50)
    cuda.total, cuda.free = gib * 2**30, reserve + 22 * MIB
    executor = captures_by(cuda, engine)
    while executor.prepare_next():
        pass
    assert not executor.prepare_next()
    stats = engine.stats()
    assert stats.graphs_captured == 5
    assert cuda.free >= reserve
    assert stats.graph_memory_bytes == 140 + 20 * MIB
    assert len(said(caplog)) == 1
    assert "on first use" in caplog.text


def test_graphs_of_too_many_bytes_used_longest_ago_go(cuda: FakeCuda, engine: Engine) -> None:
    """Of graphs that take too many bytes those used longest ago go."""
    cuda.free = cuda.total = 20 * 13 * MIB  # of which 13 MiB are for graphs
    executor = captures_by(cuda, engine)
    shapes = [GraphShape(2, tuple(range(count)), SamplingMode.GREEDY) for count in range(1, 6)]
    for shape in shapes[:3]:
        executor._graph(shape)
    executor._graph(shapes[0])
    for shape in shapes[3:]:
        executor._graph(shape)
    assert list(executor._graphs) == [shapes[0], *shapes[3:]]
    assert engine.stats().graph_memory_bytes == cuda.reserved + 12 * MIB
    while executor.prepare_next():
        pass
    assert list(executor._graphs) == [shapes[0], *shapes[3:]], "there is no room for more ahead of need"


class NoMemory:
    """A device that has memory for as many graphs as `room` says, until some are dropped."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
        self.room, self.failed = room, 0
        self.error: type[Exception] = torch.OutOfMemoryError
        record = Repeats.record

        def limited(recorder: Repeats, step: Step) -> Step:
            if self.room == 0:
                self.failed += 1
                raise self.error("CUDA out of memory")
            self.room -= 1
            return record(recorder, step)

        def forget(recorder: Repeats, step: Step) -> None:
            self.room += self.gives_back

        self.gives_back = 0
        monkeypatch.setattr(Repeats, "record", limited)
        monkeypatch.setattr(Repeats, "forget", forget)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == GraphExecutor.__module__]


def answer(engine: Engine) -> list[int]:
    return engine.generate([[1, 2]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def test_capture_ahead_without_memory_ends_the_captures(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A capture ahead of need that finds no memory ends the captures and nothing else."""
    loop = EngineLoop(engine, lambda replies: None)
    memory = NoMemory(monkeypatch, 3)
    prepare_next = engine.executor.prepare_next

    def until_there_are_no_more() -> bool:
        goes_on = prepare_next()
        if not goes_on:
            loop.inbox.put(Stop())
        return goes_on

    monkeypatch.setattr(engine.executor, "prepare_next", until_there_are_no_more)
    loop.run()
    assert engine.stats().graphs_captured == 3
    assert memory.failed == len(said(caplog)) == 1


@pytest.mark.parametrize("has_ranks", [False, True])
@pytest.mark.parametrize("gives_back", [0, 1])
def test_a_request_whose_graph_finds_no_memory_is_answered(
    engine: Engine,
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    gives_back: int,
    has_ranks: bool,
) -> None:
    """After the older half of the graphs is dropped there may be memory; if not, the step's operations run by
    themselves. One rank alone must drop nothing, and run no trial step twice."""
    wanted = answer(make_engine(max_num_seqs=2, depth=D3(0.8, 0.3), enforce_eager=True))
    monkeypatch.setattr(engine.executor, "_has_ranks", has_ranks)
    memory = NoMemory(monkeypatch, 2)
    memory.gives_back = gives_back
    if has_ranks:
        memory.error = CaptureMemoryError
    assert [answer(engine) for _ in range(2)] == [wanted] * 2
    stats = engine.stats()
    if gives_back and not has_ranks:
        assert stats.graphs_captured > 2
        assert not said(caplog)
    else:
        assert stats.graphs_captured == 2
        assert len(said(caplog)) == 1
        assert memory.failed == (2 if has_ranks else 4)  # two tries, then one of each shape that has no graph
        answer(engine)
        assert memory.failed == (2 if has_ranks else 4)


def test_rank_without_memory_for_a_trial_ends_with_others(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that has no memory for a trial step ends as the others wait for it."""
    monkeypatch.setattr(engine.executor, "_has_ranks", True)
    NoMemory(monkeypatch, 2)
    with pytest.raises(EngineDeadError):
        answer(engine)


def test_streamed_run_that_is_over_holds_no_dropped_graph(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A streamed run that is over holds no graph that is dropped."""
    executor = engine.executor
    assert isinstance(executor, GraphExecutor)
    list(engine.stream([1, 2], GREEDY))
    assert executor._followed is not None
    oldest = weakref.ref(next(iter(executor._graphs.values())))
    NoMemory(monkeypatch, 0)
    engine.generate([[1, 2], [3, 4]], GREEDY, use_tqdm=False)
    assert oldest() is None
