"""What graphs are captured for: their sizes, and those that an engine's own policy will ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from d3engine.depth import NEVER
from d3engine.depth.schedule import Schedule, windows_of
from d3engine.executor.bridging import BridgeStore
from d3engine.kernels.decode_rows import DecodeRows
from d3engine.model.bridges import BridgeWeights
from d3engine.scheduling.plan import BoolArray, MultiStep
from d3engine.scheduling.sampling_mode import SamplingMode


class Crossed(NamedTuple):
    """A window that rows of a graph may cross, by the bridges of this name; in order of the layers."""

    first: int
    stop: int
    bridges: str


@dataclass(frozen=True, slots=True)
class GraphShape:
    """A graph's rows, its layers, how it chooses its tokens, the windows that its rows may cross, and the matrices to
    whose products adapters add."""

    rows: int
    layers: tuple[int, ...]
    choice: SamplingMode
    crossed: tuple[Crossed, ...] = ()
    adapted: tuple[str, ...] = ()


def crossed_at(multi_step: MultiStep, taken: int) -> tuple[Crossed, ...]:
    """The windows that a graph must hold for a step of a run.

    Where all rows leave out the same ones it is these. Otherwise all that they come to from here on: mixtures of ages
    are many, and uncrossed windows cost little.
    """
    if not multi_step.bridges:
        return ()
    now: set[tuple[Crossed, ...]] = {()} if None in multi_step.bridges else set()
    later: set[Crossed] = set()
    for name in {name for name in multi_step.bridges if name is not None}:
        own = np.array([one == name for one in multi_step.bridges])
        for row in np.unique(np.column_stack((multi_step.steps[own] + taken, multi_step.cutoffs[own])), axis=0):
            step, cutoffs = row[0], row[1:]
            now.add(_crossed(cutoffs > step, name))
            least = int(multi_step.steps.min()) + taken
            for change in {least, *(int(end) for end in cutoffs if least < end < NEVER)}:
                later.update(_crossed(cutoffs > change, name))
    return now.pop() if len(now) == 1 else tuple(sorted(later))


def _crossed(active: BoolArray, name: str) -> tuple[Crossed, ...]:
    return tuple(Crossed(first, stop, name) for first, stop in windows_of(active))


CHOICES = (SamplingMode.GREEDY, SamplingMode.CUT, SamplingMode.DRAW)
"""How the tokens of expected graphs are chosen."""


def expected_shapes(schedule: Schedule, sizes: list[int], max_model_len: int) -> Iterator[GraphShape]:
    """The shapes that answers of this schedule need: the largest first, then those of most layers, then the others.

    Penalties are rare, and need memory of their own: their graphs are captured on first use.
    """
    if not schedule.is_nested or schedule.on_skip != "none":
        return  # what fills the layers that it skips runs no graph
    ends = {int(end) for end in schedule.cutoffs if end < min(max_model_len, NEVER)}
    steps = sorted({1, *ends} - {0})  # step 0 is the prompt's
    name = schedule.bridges
    found = {}
    for active in (schedule.cutoffs > step for step in steps):
        found[tuple(active.nonzero()[0].tolist())] = () if name is None else _crossed(active, name)
    deepest, beside = next(iter(found.items()))
    yield GraphShape(sizes[-1], deepest, SamplingMode.CUT, beside)
    for size, choice in product(sizes, CHOICES):
        yield GraphShape(size, deepest, choice, beside)
    for size, choice, (those, crossed) in product(sizes, CHOICES, list(found.items())[1:]):
        yield GraphShape(size, those, choice, crossed)


def batch_sizes(most: int) -> list[int]:
    """Rows that graphs are captured for: few sizes, each at most twice what is needed, and the last at least `most`.

    1, 2, 4, then multiples of 8 to 64, then of 32: beyond that, products go to the matrix library, whose tiles are
    large.
    """
    sizes = [1, 2, 4, *range(8, 65, 8)]
    while sizes[-1] < most:
        sizes.append(sizes[-1] + 32)
    return sizes[: next(place for place, size in enumerate(sizes) if size >= most) + 1]


LEAST_FREE = 256 * 2**20
"""Bytes that the device should have free for a capture: during one, torch's allocator gives back nothing of what it
keeps for later."""

Step = Callable[[], None]
"""Carries out one decode step on the rows that stand in device memory."""


RESERVE = 2**30
"""Bytes that captures ahead of need leave free, or 2 % of the device if that is less."""

BYTES_SHARE = 0.05
"""Of a device's memory, what the driver may take for graphs."""


class CaptureMemoryError(torch.OutOfMemoryError):
    """There is no memory for a graph, of a step that has run."""


class Repeats:
    """Turns a step's launches into something that repeats them: where there are no graphs, a step is called again."""

    def record(self, step: Step) -> Step:
        """Raises `torch.OutOfMemoryError` where there is no memory, `CaptureMemoryError` if the step has run before."""
        step()
        return step

    def forget(self, step: Step) -> None:
        """Count the memory of what `record` has returned no more: it is dropped."""

    def memory_bytes(self) -> int:
        return 0

    def bytes_for(self, count: int) -> int:
        """About what the driver will take for `count` more graphs, by the largest one yet."""
        return 0

    def is_full(self) -> bool:
        """Whether the driver has taken more for graphs than it may."""
        return False

    def has_reserve(self) -> bool:
        """Whether there is memory for a graph that nothing needs yet."""
        return True


ERROR_MODE = "thread_local"
"""Of captures: other threads may ask the device for what they need meanwhile, as NCCL's own does, or one that loads a
bridge."""


class CudaGraphs(Repeats):
    """Captures steps as CUDA graphs that share one memory pool: they run one after another."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        total = torch.cuda.mem_get_info(device)[1]
        self._reserve = min(RESERVE, total // 50)
        self._most_bytes = int(BYTES_SHARE * total)
        self._driver_bytes: dict[Step, int] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool_bytes = 0
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
        reserved, free = torch.cuda.memory_reserved(self._device), torch.cuda.mem_get_info(self._device)[0]
        replay = self._capture(step)
        current.wait_stream(self._stream)
        pool_bytes = torch.cuda.memory_reserved(self._device) - reserved
        self._pool_bytes += pool_bytes
        # torch does not count what the driver takes for a graph
        taken = free - torch.cuda.mem_get_info(self._device)[0]
        self._driver_bytes[replay] = max(0, taken - pool_bytes)
        return replay

    def _capture(self, step: Step) -> Step:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(self._pool, capture_error_mode=ERROR_MODE)
                try:
                    step()
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            # The driver's own error is of another class than that of torch's allocator, and may hide the latter.
            if any("out of memory" in str(one) for one in (error, error.__context__)):
                raise CaptureMemoryError(str(error)) from error
            raise
        replay: Step = graph.replay
        return replay

    def forget(self, step: Step) -> None:
        self._driver_bytes.pop(step, None)

    def _make_room(self) -> None:
        """Give back what torch keeps: before the first capture, which takes most, and where little is left."""
        if not self._pool_bytes or torch.cuda.mem_get_info(self._device)[0] < LEAST_FREE:
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
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode=ERROR_MODE):
                number.add_(1)
        return graph

    def memory_bytes(self) -> int:
        """What torch's allocator has reserved for the graphs' pool, and the driver has taken for each of them."""
        return self._pool_bytes + sum(self._driver_bytes.values())

    def bytes_for(self, count: int) -> int:
        return min(self._most_bytes, count * max(self._driver_bytes.values(), default=0))

    def is_full(self) -> bool:
        return sum(self._driver_bytes.values()) > self._most_bytes

    def has_reserve(self) -> bool:
        wanted = self._reserve + self.bytes_for(1)
        if torch.cuda.mem_get_info(self._device)[0] < wanted:
            torch.cuda.empty_cache()
        has_free = torch.cuda.mem_get_info(self._device)[0] >= wanted
        return has_free and sum(self._driver_bytes.values()) + self.bytes_for(1) <= self._most_bytes


@dataclass(frozen=True, eq=False)
class _Windows:
    """Windows as a graph reads them, int64 [W] each; they must live as long as it does."""

    bridges: tuple[BridgeWeights, ...]
    names: Tensor
    firsts: Tensor
    stops: Tensor


class GraphBridges:
    """By whose maps each of up to `rows` rows crosses what it leaves out, at addresses that stay."""

    def __init__(self, store: BridgeStore | None, kernels: Any, rows: int, device: torch.device) -> None:
        self._store = store
        self._kernels = kernels
        self._names: dict[str, int] = {}
        self._of_rows = torch.full((rows,), -1, dtype=torch.int64, device=device)
        self._places = torch.arange(1, rows + 1, device=device)
        self._windows: dict[tuple[Crossed, ...], _Windows] = {}

    def write(self, names: Sequence[str | None]) -> None:
        """Put the bridges of the first rows where graphs read them."""
        if names:
            numbers = [-1 if name is None else self._number(name) for name in names]
            self._of_rows[: len(numbers)] = torch.tensor(numbers)

    def prepare(self, crossed: tuple[Crossed, ...]) -> None:
        """Put windows where a graph may read them; before it is captured, which must not wait for the host."""
        if not crossed or crossed in self._windows:
            return
        assert self._store is not None, "a plan names bridges that no schedule was checked for"
        bridges = tuple(self._store.bridges(one.bridges)[one.first, one.stop] for one in crossed)
        numbers = [(self._number(one.bridges), one.first, one.stop) for one in crossed]
        self._windows[crossed] = _Windows(bridges, *torch.tensor(numbers).T.contiguous().to(self._places.device))

    def begin(self, crossed: tuple[Crossed, ...], rows: DecodeRows) -> GraphCrossings | None:
        """The windows of a step of these rows, not yet crossed; None where no row crosses any."""
        if not crossed:
            return None
        windows, count = self._windows[crossed], rows.steps.shape[0]
        runs = rows.steps[:, None] < rows.cutoffs
        skipped = F.pad((~runs).cumsum(dim=1), (1, 0))
        width = windows.stops - windows.firsts
        beside = F.pad(runs, (1, 1), value=True)  # layer l stands at l + 1
        all_of_it = skipped[:, windows.stops] - skipped[:, windows.firsts] == width
        own = self._of_rows[:count, None] == windows.names
        lives = self._places[:count, None] <= rows.num_rows
        who = all_of_it & own & lives & beside[:, windows.firsts] & beside[:, windows.stops + 1]
        until = (who * self._places[:count, None]).amax(dim=0).to(torch.int32)
        return GraphCrossings(windows.bridges, who, until, self._kernels)

    def _number(self, name: str) -> int:
        return self._names.setdefault(name, len(self._names))


class GraphCrossings:
    """The windows of one step; `who` bool [B, W] says which rows cross which, `until` [W] how far these reach."""

    def __init__(self, bridges: Sequence[BridgeWeights], who: Tensor, until: Tensor, kernels: Any) -> None:
        self._due = list(enumerate(bridges))
        self._who, self._until, self._kernels = who, until, kernels

    def up_to(self, layer: int, hidden: Tensor) -> None:
        """All layers below `layer` have run on `hidden` [B, H]."""
        while self._due and self._due[0][1].first <= layer:
            nth, bridge = self._due.pop(0)
            behind = hidden.clone()
            bridge.cross(self._kernels, behind, self._until[nth : nth + 1])
            hidden.copy_(torch.where(self._who[:, nth, None], behind, hidden))
