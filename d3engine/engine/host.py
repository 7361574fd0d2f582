"""CPUs and memory that this process may use. Threads beyond a container's quota only make
the others wait."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

import torch

from d3engine.engine.settings import EngineSettings
from d3engine.errors import InvalidValueError
from d3engine.model.config import ModelConfig

CGROUP = Path("/proc/self/cgroup")
MOUNTED = Path("/sys/fs/cgroup")
FIRST_VERSION = ("cpu", "cpu,cpuacct", "cpuacct,cpu")
"""Where the first version's controller of CPUs is, below `MOUNTED`."""


def usable_cpus() -> int:
    """The CPUs of the affinity mask, or fewer by a quota (of either version of control groups); at least 1.

    A quota of 2.5 CPUs counts as 2: a third thread would use the rest up, and then stop the others.
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([affinity, *(int(quota) for quota in _quotas())]))


def _quotas() -> Iterator[float]:
    """The CPUs that each group allows in which this process is, from its own to the outermost that can be seen."""
    for group, is_second in control_groups("cpu", FIRST_VERSION):
        quota = _second_version(group) if is_second else _first_version(group)
        if quota is not None:
            yield quota


def control_groups(controller: str, first_version: Sequence[str]) -> Iterator[tuple[Path, bool]]:
    """The directories of the groups in which this process is, and whether each is of the second version.

    Those of the first version have the names `first_version` of their controller below `MOUNTED`.
    """
    try:
        lines = CGROUP.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from ((group, True) for group in _groups(MOUNTED, path))
        elif controller in controllers.split(","):
            yield from ((group, False) for name in first_version for group in _groups(MOUNTED / name, path))


def _groups(root: Path, path: str) -> Iterator[Path]:
    """The group's directory and those above it. In a container its own may be mounted as the root, while `path` is
    that of the machine; then only the root exists here."""
    own = PurePosixPath(path.lstrip("/"))
    return (root / group for group in (own, *own.parents) if ".." not in group.parts)


def _second_version(group: Path) -> float | None:
    """`cpu.max` has microseconds (or "max") and the period in which they may be used."""
    try:
        quota, period = (group / "cpu.max").read_text(encoding="utf-8").split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _first_version(group: Path) -> float | None:
    """The same in two files, with -1 for no bound."""
    try:
        quota, period = (int((group / f"cpu.cfs_{name}_us").read_text("utf-8")) for name in ("quota", "period"))
        return quota / period if quota > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None


GIB = 2**30


def machine_bytes() -> int | None:
    """The memory that a process may have here at most, its control groups included; None where no system says it."""
    limits = list(_group_limits())
    try:
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        import resource

        limits.append(resource.getrlimit(resource.RLIMIT_AS)[0])
    except (AttributeError, ImportError, OSError, ValueError):
        pass  # not a Unix
    return min((limit for limit in limits if limit > 0), default=None)


def _group_limits() -> Iterator[int]:
    for group, is_second in control_groups("memory", ["memory"]):
        with suppress(OSError, ValueError):  # no file, or "max"
            yield int((group / ("memory.max" if is_second else "memory.limit_in_bytes")).read_text("utf-8"))


def table_bytes(settings: EngineSettings) -> int:
    """Bytes of all tables that have an entry for each position."""
    ropes = 1 if settings.config.local_rope is None else 2
    rope = 8 * ropes * (settings.config.head_dim // 2) * settings.max_model_len
    tokens = 4 * settings.max_num_seqs * settings.max_model_len
    blocks = 4 * settings.max_num_seqs * settings.sequence_blocks
    return rope + tokens + blocks


def check_length(settings: EngineSettings, *, sequence_bytes: int) -> None:
    """Raise `InvalidValueError` for a length that this machine has no memory for.

    `sequence_bytes`: what the host keeps of the KV cache for one sequence of this length.
    """
    there, tables = machine_bytes(), table_bytes(settings)
    if there is None or tables + sequence_bytes <= there:
        return
    allowed = f"a length that this machine has memory for, {there / GIB:.1f} GiB: tables for {settings.max_num_seqs}"
    allowed += f" sequences take {tables / GIB:.1f} GiB and the KV cache of one takes {sequence_bytes / GIB:.1f} GiB"
    allowed += " (None is one that fits)"
    raise InvalidValueError("max_model_len", settings.max_model_len, allowed)


WEIGHTS_PER_PYTORCH_THREAD = 2**20
"""Weights of a layer that are worth a thread: 4 MiB of float32, which one core reads in about half a millisecond."""


def pytorch_threads_for(config: ModelConfig, most: int) -> int:
    """How many threads of PyTorch suit a model: at least one and at most `most`."""
    return max(1, min(most, config.layer_parameters // WEIGHTS_PER_PYTORCH_THREAD))


@contextmanager
def pytorch_threads(most: int) -> Iterator[None]:
    """Let PyTorch compute with at most `most` threads in this block, and afterwards with as many as before.

    The number is the calling thread's, but for what PyTorch's other threads start with and the number of MKL.
    """
    before = torch.get_num_threads()
    if before <= most:
        yield
        return
    try:
        torch.set_num_threads(most)
        yield
    finally:
        torch.set_num_threads(before)
