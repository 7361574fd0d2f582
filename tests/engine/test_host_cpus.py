"""The threads that are not asked for by number, and memory, are no more than the process may use."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from d3engine import Engine
from d3engine.cli.engine_options import use_threads
from d3engine.engine import host as host_cpus
from d3engine.engine.device import default_threads
from d3engine.engine.model_directory import model_directory
from d3engine.model.config import ModelConfig

Machine = Callable[..., None]
GIB = 2**30


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """`machine("/proc/self/cgroup's lines", {file: text})`: 64 cores, and these files below /sys/fs/cgroup."""
    monkeypatch.setattr(host_cpus, "CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(host_cpus, "MOUNTED", tmp_path / "mounted")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)), raising=False)
    before, set_threads = torch.get_num_threads(), torch.set_num_threads
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)

    def make(groups: str, files: dict[str, str]) -> None:
        (tmp_path / "cgroup").write_text(groups)
        for name, text in files.items():
            file = tmp_path / "mounted" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)

    yield make
    set_threads(before)  # an engine that ends has restored the 64


def first_version(group: str, quota: int, period: int = 100_000) -> dict[str, str]:
    return {f"{group}/cpu.cfs_quota_us": f"{quota}\n", f"{group}/cpu.cfs_period_us": f"{period}\n"}


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        pytest.param("0::/\n", {"cpu.max": "200000 100000\n"}, 2, id="a container of the second version"),
        pytest.param("0::/\n", {"cpu.max": "max 100000\n"}, 64, id="no quota"),
        pytest.param("0::/\n", {"cpu.max": "250000 100000\n"}, 2, id="two and a half"),
        pytest.param("0::/\n", {"cpu.max": "50000 100000\n"}, 1, id="half a CPU"),
        pytest.param("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "300000 100000\n"}, 3, id="a parent"),
        pytest.param("0::/../x\n", {"cpu.max": "200000 100000\n"}, 2, id="a group beside what can be seen"),
        pytest.param(
            "4:cpu,cpuacct:/a\n0::/\n", first_version("cpu,cpuacct/a", 400_000), 4, id="the first version's own"
        ),
        pytest.param(
            "4:cpuacct,cpu:/docker/1f\n", first_version("cpu", 40_000, 20_000), 2, id="the first version in a container"
        ),
        pytest.param("4:cpu:/\n", first_version("cpu", -1), 64, id="the first version without a quota"),
        pytest.param("3:cpuset:/\n", first_version("cpu", 100_000), 64, id="another controller"),
        pytest.param("0::/\n", {"cpu.max": "nonsense"}, 64, id="a file of another kind"),
    ],
)
def test_threads_stay_within_the_quota_of_a_container(
    machine: Machine, groups: str, files: dict[str, str], expected: int
) -> None:
    machine(groups, files)
    assert host_cpus.usable_cpus() == expected
    assert default_threads() == expected


def test_threads_without_control_groups_stay_within_affinity(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads stay within the affinity where there are no control groups."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {5, 9, 11})
    assert default_threads() == 3
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert default_threads() == 2
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert default_threads() == 1


def test_engine_and_command_in_a_container_take_its_quota(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine and a command of a limited container take its quota."""
    machine("0::/\n", {"cpu.max": "200000 100000\n"})
    with Engine("demo", device="cpu", kv_cache_memory_bytes=2**24) as engine:
        assert engine.settings.num_threads == 2
    taken: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", taken.append)
    large = replace(ModelConfig.from_directory(model_directory("demo")), hidden_size=4096, intermediate_size=2**14)
    assert [use_threads("auto", large), use_threads("9", large)] == taken == [2, 9]


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/\n", {"memory.max": f"{4 * GIB}\n"}, 4 * GIB),
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": f"{3 * GIB}\n"}, 3 * GIB),
        ("5:memory:/docker/1f\n", {"memory/memory.limit_in_bytes": f"{2 * GIB}\n"}, 2 * GIB),
        ("0::/\n", {"memory.max": "max\n"}, None),
        ("5:cpu:/\n", {"cpu/memory.limit_in_bytes": "1\n"}, None),
    ],
)
def test_memory_of_a_container_is_its_control_groups_limit(
    machine: Machine, groups: str, files: dict[str, str], expected: int | None
) -> None:
    """The memory of a container is what its control groups allow."""
    machine("", {})
    without = host_cpus.machine_bytes()
    assert without is not None
    machine(groups, files)
    assert host_cpus.machine_bytes() == min(without, expected or without)
