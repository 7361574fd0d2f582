"""Bridges inside a step: rows of equal windows cross together, where the layers below have
run, by the window's map."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from d3engine.depth import DepthPolicy, Level, Schedule
from d3engine.depth.policy import named_bridges, named_students
from d3engine.depth.schedule import AUTO_BRIDGES
from d3engine.errors import InvalidValueError, ModelFormatError, require
from d3engine.executor.hidden_states import Due
from d3engine.executor.interface import ExecutorStats
from d3engine.kernels.bfloat16_pairs import PairsWeight
from d3engine.kernels.split_blocks import SplitBlockWeight
from d3engine.model.bridges import BRIDGES_FILE, BridgeWeights, Window, held, read_bridges
from d3engine.model.config import ModelConfig
from d3engine.model.expected_tensors import fingerprint
from d3engine.model.students import NEURONS, Student, read_student, student_path, with_student
from d3engine.model.weights import LlamaWeights, load_weights
from d3engine.scheduling.plan import BridgedRows
from d3engine.utils.files import beside


class BridgeStore:
    """The bridges that the policies of one engine name, loaded when they are first asked for.

    Only those in `allowed` can be had, "auto" (beside the weights) and what the engine's own policy names: a request
    may come from anywhere, and must not say which files are opened. None at all where `allowed` is empty.
    """

    def __init__(
        self,
        directory: Path,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        weight_dtype: torch.dtype,
        device: torch.device,
        allowed: frozenset[str],
    ) -> None:
        self._directory = directory
        self._config = config
        self._kind: dict[str, Any] = {"dtype": dtype, "weight_dtype": weight_dtype, "device": device}
        self._allowed = allowed
        self._loaded: dict[str, dict[Window, BridgeWeights]] = {}
        self._students: dict[str, Student] = {}
        self._ready: set[str] = set()  # those of them that were followed
        self._stats = ExecutorStats()
        self._lock = threading.Lock()
        self._on_bridges: Callable[[Iterable[BridgeWeights]], None] = lambda found: None
        self._on_student: Callable[[str], None] = lambda name: None

    def follow(self, on_bridges: Callable[[Iterable[BridgeWeights]], None], on_student: Callable[[str], None]) -> None:
        """Call these for the bridges of each file and the name of each student that is loaded, and later for each one
        before a step can run it."""
        with self._lock:
            self._on_bridges, self._on_student = on_bridges, on_student
            for found in self._loaded.values():
                on_bridges(found.values())
            for name in self._students:
                on_student(name)

    def allow(self, names: frozenset[str]) -> None:
        """Let policies name these files too: for a caller whose policies all come from one who owns the files."""
        if self._allowed:
            self._allowed |= names

    def has_all_of(self, policy: DepthPolicy | None) -> bool:
        """Whether a request of this policy waits for no file."""
        if policy is None:
            return True
        has_bridges = all(name in self._loaded for name in named_bridges(policy))
        return has_bridges and all(name in self._ready for name in named_students(policy))

    def path(self, name: str) -> Path:
        """The file that a policy calls so, whether it is there or not."""
        return beside(self._directory, BRIDGES_FILE) if name == AUTO_BRIDGES else Path(name)

    def check(self, schedule: Schedule) -> None:
        """Load the bridges of a schedule, if it has any; any thread may call it.

        Raises `InvalidValueError` that names `bridges` where the file is not to be had, belongs to other weights or
        lacks a window that the schedule leaves out.
        """
        for level in schedule.students:
            self._check_student(schedule, level)
        name = schedule.bridges
        if name is None:
            return
        self._check_allowed("bridges", name)
        with self._lock:
            if name not in self._loaded:
                found = self._load(name)
                self._on_bridges(found.values())
                self._stats.bridge_bytes += sum(bridge.nbytes for bridge in found.values())
                self._loaded[name] = found
        missing = [window for window in schedule.windows() if window not in self._loaded[name]]
        shown = ", ".join(f"{first}:{stop}" for first, stop in missing[:8])
        allowed = (
            f"a file with each window that the policy leaves out; {shown} {'are' * (len(missing) > 1) or 'is'} not"
        )
        require(not missing, "bridges", name, f"{allowed} in it")

    def _check_student(self, schedule: Schedule, level: Level) -> None:
        """Read a student of a schedule. Raises `InvalidValueError` that names `student` where it cannot be had, or what
        of the schedule the file is not made for."""
        name = level.student
        self._check_allowed("student", name)
        skipped = np.flatnonzero(~schedule.active(level.step)).tolist()
        with self._lock:
            found = self._students.get(name) or self._read_student(name)
            found.check_made_for(self._config, name, skipped, level.width)
            if name not in self._students:
                self._students[name] = found
                self._on_student(name)
                self._ready.add(name)

    def _check_allowed(self, field: str, name: str) -> None:
        require(bool(self._allowed), field, name, "absent beside a tensor_parallel_size above 1")
        require(name in self._allowed, field, name, f'"{AUTO_BRIDGES}", or what the engine\'s own policy names')

    def student_path(self, name: str) -> Path:
        """The file of a student that a policy calls so, whether it is there or not."""
        return student_path(self._directory, name)

    def _read_student(self, name: str) -> Student:
        try:
            found = read_student(self.student_path(name), self._config)
            is_ours = found.fingerprint == fingerprint(self._directory)
        except ModelFormatError as error:
            raise InvalidValueError("student", name, f"what d3engine depth train has written ({error})") from None
        require(is_ours, "student", name, "trained for these weights, not for others (d3engine depth train)")
        return found

    @property
    def students(self) -> tuple[str, ...]:
        """The names of those of schedules that were checked."""
        return tuple(self._students)

    def students_save(self, policy: DepthPolicy, num_steps: int) -> float:
        """Layers' worth that the narrower layers of a policy's students save over an answer's first `num_steps`."""
        schedule, saved = policy.schedule(self._config.num_layers), 0.0
        for first, end in schedule.runs(num_steps):
            if (name := schedule.student_at(first)) is not None:
                student = self._students.get(name) or self._read_student(name)
                saved += (end - first) * student.narrower(self._config)
        return saved

    def student_weights(self, name: str, own: LlamaWeights) -> LlamaWeights:
        """A student's weights in the layouts of the model's `own`, for a schedule that was checked."""
        student = self._students[name]
        gates, is_cpu = own.layers[next(iter(student.layers), 0)].gate_up, self._kind["device"].type == "cpu"
        plain = None
        has_rows = isinstance(gates, Tensor | PairsWeight | SplitBlockWeight)
        if is_cpu and not has_rows and any(NEURONS in one for one in student.layers.values()):
            # Single rows are taken from the file's own format: on a CPU the engine may hold another layout.
            plain = load_weights(self._directory, self._config, keeps_blocks=True, show_progress=False, **self._kind)
        return with_student(own, student, plain)

    def bridges(self, name: str) -> Mapping[Window, BridgeWeights]:
        """Those that were loaded for a schedule that was checked."""
        return self._loaded[name]

    def count_in(self, stats: ExecutorStats) -> None:
        """Let `stats` say what memory the bridges take, now and later."""
        with self._lock:
            stats.bridge_bytes = self._stats.bridge_bytes
            self._stats = stats

    def _load(self, name: str) -> dict[Window, BridgeWeights]:
        try:
            found = read_bridges(self.path(name), (self._config.num_layers, self._config.hidden_size))
            is_ours = found.fingerprint == fingerprint(self._directory)
        except ModelFormatError as error:
            raise InvalidValueError("bridges", name, f"what d3engine bridge fit has written ({error})") from None
        require(is_ours, "bridges", name, "fitted to these weights, not to others (d3engine bridge fit)")
        has_values = self._kind["device"].type != "meta"  # which scales are made of
        scheme = self._config.quantization if has_values else None
        return {window: held(bridge, quantization=scheme, **self._kind) for window, bridge in found.by_window.items()}


def crossings(store: BridgeStore | None, bridged: Sequence[BridgedRows], hidden: Tensor, kernels: Any) -> Iterator[Due]:
    """The windows that rows of one step leave out, each crossed when the layers below it have run."""
    for window in bridged:
        yield window.first, partial(_cross, store, window, hidden, kernels)


def _cross(store: BridgeStore | None, window: BridgedRows, hidden: Tensor, kernels: Any) -> None:
    assert store is not None, "a plan names bridges that no schedule was checked for"
    bridge = store.bridges(window.bridges)[window.first, window.stop]
    rows = torch.from_numpy(np.ascontiguousarray(window.rows, dtype=np.int64)).to(hidden.device)
    state = hidden[rows]
    bridge.cross(kernels, state)
    hidden[rows] = state
