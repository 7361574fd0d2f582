"""What goes wrong in a part of the GPU round stays there, and what was found before is kept."""

import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from round_clock import HERE

from benchmarks import gpu_round
from benchmarks.gpu import common, device, kernels
from benchmarks.gpu.common import Round, time_limit
from benchmarks.gpu.tests import counts


def fails(found: dict[str, Any], current: Round) -> None:
    found["so_far"] = 1
    raise ArithmeticError("on purpose")


def works(found: dict[str, Any], current: Round) -> None:
    found["left"] = current.left()


def run(names: list[str], current: Round, save: Any = lambda report: None) -> dict[str, Any]:
    report: dict[str, Any] = {"parts": {}}
    gpu_round.run_parts(report, names, current, gpu_round.run_here, lambda: save(report), Console(quiet=True))
    return report["parts"]  # type: ignore[no-any-return]


def test_part_that_fails_leaves_its_traceback_and_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that fails leaves its traceback, and the next one runs."""
    parts = {"first": gpu_round.Part(fails, 1), "second": gpu_round.Part(works, 1)}
    monkeypatch.setattr(gpu_round, "PARTS", parts)
    saved: list[list[str]] = []
    first, second = run(["first", "second"], HERE, lambda report: saved.append(list(report["parts"]))).values()
    assert (first["status"], first["so_far"], second["status"]) == ("failed", 1, "done")
    assert "on purpose" in first["traceback"]
    assert saved == [["first"], ["first", "second"]]


def test_parts_share_the_time_and_leave_on_what_they_do_not_use(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(monotonic=lambda: now[0])
    now = [7.0]

    def takes_20_s(found: dict[str, Any], current: Round) -> None:
        works(found, current)
        now[0] += 20

    for module in (gpu_round, common):
        monkeypatch.setattr(module, "time", clock)
    parts = {name: gpu_round.Part(takes_20_s, share) for name, share in (("a", 1), ("b", 3), ("c", 1))}
    monkeypatch.setattr(gpu_round, "PARTS", parts)
    found = run(["a", "b", "c"], Round(torch.device("cpu"), True, 400.0, started=7.0))
    assert [part["left"] for part in found.values()] == [80, 380 * 3 / 4, 360]
    assert [part["part_seconds"] for part in found.values()] == [20] * 3


@pytest.mark.parametrize(("works_in", "tried"), [("no-pdl", ["graphs"]), ("reference", ["graphs", "no-pdl", "eager"])])
def test_a_failing_engine_is_run_in_the_next_mode(
    works_in: str, tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_mode(found: dict[str, Any], current: Round) -> None:
        if current.mode != works_in:
            raise RuntimeError(f"not in {current.mode}")
        found["models"] = [{"calls_s": [1.0]}]

    monkeypatch.setattr(gpu_round, "PARTS", {"part": gpu_round.Part(run_mode, 1, "models")})
    found = run(["part"], HERE)["part"]
    assert found["status"] == "done"
    assert [earlier["mode"] for earlier in found["earlier_modes"]] == tried
    assert "not in graphs" in found["earlier_modes"][0]["traceback"]


def test_figures_are_kept_although_the_part_fails_after_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_mode(found: dict[str, Any], current: Round) -> None:
        found["models"] = [{"settings": [{"depths": [{"calls_s": [1.0]}]}], "mode": current.mode}]
        raise RuntimeError("later")

    monkeypatch.setattr(gpu_round, "PARTS", {"part": gpu_round.Part(run_mode, 1, "models")})
    found = run(["part"], HERE)["part"]
    assert (found["status"], found["models"][0]["mode"]) == ("failed", "graphs")


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """`apart(function)`: what `run_apart` hands back of a part whose process runs `function(name, round)`."""
    # The process is forked, so that it need not import everything anew, and knows `function`.

    def call(function: Callable[[str, Round], object], limit: float = 1e6) -> dict[str, Any]:
        monkeypatch.setattr(gpu_round, "get_context", lambda _: multiprocessing.get_context("fork"))
        monkeypatch.setattr(gpu_round, "_run_and_leave", function)
        monkeypatch.setattr(gpu_round, "LEAST_S", limit)
        monkeypatch.setattr(gpu_round, "GRACE_S", 0.0)
        return gpu_round.run_apart("arrivals", Round(torch.device("cpu"), True, 0.0))

    return call


def test_a_part_whose_process_hangs_is_ended(apart: Callable[..., dict[str, Any]]) -> None:
    found = apart(lambda name, current: signal.pause(), limit=0.01)
    assert found["status"] == "failed"
    assert "was stopped after 0 s" in found["traceback"]


def test_what_a_part_had_found_is_kept_although_its_process_dies(apart: Callable[..., dict[str, Any]]) -> None:
    def dies(name: str, current: Round) -> None:
        current.keep({"so_far": 1})
        os._exit(3)

    found = apart(dies)
    assert (found["status"], found["so_far"]) == ("failed", 1)
    assert "died with exit code 3" in found["traceback"]


@pytest.mark.parametrize("ending", ["sticky error", "exit", "hang"])
def test_a_part_goes_on_behind_the_case_that_ended_its_process(ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs, dead = multiprocessing.get_context("fork").Event(), []

    def synchronize(*_: Any) -> None:
        if dead:
            raise RuntimeError("an illegal memory access was encountered")

    def make(name: str) -> list[Any]:
        synchronize()
        if name == "unmade":
            raise MemoryError
        return [({"operation": name, "shape": "tiny", "rows": 1}, measure)]

    def measure(row: dict[str, Any]) -> None:
        if row["operation"] == "bad":
            if ending == "exit":
                os._exit(3)
            if ending == "hang":
                hangs.set()
                signal.pause()
            dead.append(row)
        synchronize()
        row["measured"] = True

    def now() -> float:  # a long time passes at once where the part hangs, and else none
        return 1e9 if hangs.is_set() else 0.0

    names = ["first", "unmade", "bad", "last"]
    monkeypatch.setattr(kernels, "all_cases", lambda *_: [partial(make, name) for name in names])
    monkeypatch.setattr(kernels, "launched_as_in_engines", lambda _: nullcontext(False))
    monkeypatch.setattr(common, "synchronize", synchronize)
    monkeypatch.setattr(gpu_round, "time", SimpleNamespace(monotonic=now))
    monkeypatch.setattr(gpu_round, "get_context", lambda _: multiprocessing.get_context("fork"))
    found = gpu_round.run_apart("kernels", HERE)
    rows = {row["operation"]: row for row in found["rows"]}
    assert list(rows) == ["first", "inputs of group 1", "bad", "last"]
    assert [name for name, row in rows.items() if "measured" in row] == ["first", "last"]
    assert found["status"] == "failed"
    assert "2 of 4 cases failed" in found["traceback"]
    reasons = {"sticky error": "DeviceLost", "exit": "died with exit code 3", "hang": "was stopped after"}
    (death,) = found["deaths"]
    assert reasons[ending] in death


def test_the_mode_of_first_light_is_that_of_all_later_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    def first(found: dict[str, Any], current: Round) -> None:
        if current.mode == "graphs":
            raise RuntimeError("not in graphs")
        found["models"] = [{"calls_s": [1.0], "mode": current.mode}]

    def later(found: dict[str, Any], current: Round) -> None:
        found["mode"] = current.mode

    parts = {"first_light": gpu_round.Part(first, 1, "models"), "later": gpu_round.Part(later, 1)}
    monkeypatch.setattr(gpu_round, "PARTS", parts)
    assert run(["first_light", "later"], HERE)["later"]["mode"] == "no-pdl"


def test_clocks_and_power_are_sampled_while_a_part_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, written = tmp_path / "nvidia-smi", tmp_path / "written"
    program.write_text(
        "#!/bin/sh\necho '1980, 2619, 650.5, 60, 0x0'\necho '1755, 2619, 700.5, 62, 0x4'\n"
        f"touch {written}\nexec sleep 1000\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with device.sampled() as load:
        while not written.exists():
            time.sleep(0.01)
    assert load["clocks.sm"] == {"min": 1755, "median": 1867.5, "max": 1980}
    assert load["power.draw"]["max"] == 700.5
    assert load["clocks_throttle_reasons.active"] == {"0x0": 1, "0x4": 1}
    monkeypatch.setenv("PATH", "")
    with device.sampled() as load:
        pass
    assert load == {}


def test_a_part_can_be_sent_to_a_process_that_is_not_forked() -> None:
    function, current = pickle.loads(pickle.dumps((gpu_round._run_and_leave, HERE)))
    assert (function, current) == (gpu_round._run_and_leave, HERE)


def test_a_spent_budget_skips_parts() -> None:
    assert run(["device"], Round(torch.device("cpu"), True, 1.0))["device"]["status"] == "skipped"


def test_a_call_beyond_its_limit_raises() -> None:
    def call() -> None:
        seconds, _ = signal.getitimer(signal.ITIMER_REAL)
        assert 0 < seconds <= 1000
        os.kill(os.getpid(), signal.SIGALRM)  # as when they are over

    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(TimeoutError, match="longer than 1000 s"), time_limit(1000):
        call()
    with time_limit(1000):
        pass
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    assert signal.getsignal(signal.SIGALRM) == before


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("..F\n== 1 failed, 2 passed, 3 skipped in 4.05s ==\n", {"failed": 1, "passed": 2, "skipped": 3}),
        ("1 passed, 2 errors in 0.10s\n", {"passed": 1, "error": 2}),
        ("[gw0] [ 1%] PASSED tests/a\n[gw1] [ 2%] FAILED tests/b\n[gw1] PASSED tests/c", {"passed": 2, "failed": 1}),
        ("killed\n", {}),
    ],
)
def test_counts_are_read_from_the_end_of_the_output(output: str, expected: dict[str, int]) -> None:
    assert counts(output) == expected
