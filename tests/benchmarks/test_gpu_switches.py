"""The round's part `switches`: a way that is wrong never wins. `test_gpu_round.py` runs them all."""

import io
from typing import Any

import pytest
import torch
from rich.console import Console
from round_clock import HERE

pytest.importorskip("triton")

from benchmarks.gpu import device, switches
from benchmarks.gpu.cases import TINY
from benchmarks.gpu.common import Round
from benchmarks.gpu.tables import switch_table


def test_a_way_that_is_wrong_is_far_and_fails_the_part(monkeypatch: pytest.MonkeyPatch, interpreter: None) -> None:
    """And so does a question whose inputs cannot be made."""
    question = switches._splits("wrong", TINY[0], [9], HERE)
    wrong = {"today": (), "without the base of its powers": (("paged_attention", "_LOG2_E", 1.0),)}

    def unmade() -> list[switches.Question]:
        raise MemoryError

    monkeypatch.setattr(
        switches, "questions", lambda _: [unmade, lambda: [switches.Question("q", TINY[0], question.case, wrong)]]
    )
    monkeypatch.setattr(switches, "reading", lambda _: [])
    monkeypatch.setattr(switches, "launching", lambda _: {})
    report: dict[str, Any] = {}
    with pytest.raises(RuntimeError, match="2 of 2 questions have a variant that failed"):
        switches.run(report, HERE)
    failed, row = report["rows"]
    assert (failed["question"], "MemoryError" in failed["error"]) == ("inputs of group 0", True)
    assert [way["is_far"] for way in row["variants"].values()] == [False, True]


def test_the_table_names_the_fastest_right_way_and_what_it_gains() -> None:
    ways = {
        "today": {"device_s": 12e-6, "gb_per_s": 100.0, "kernels": [{"in_flight": 8192}]},
        "fast": {"device_s": 10e-6, "gb_per_s": 120.0},
        "wrong": {"device_s": 1e-6, "gb_per_s": 1200.0, "is_far": True},
    }
    console = Console(width=160, record=True, file=io.StringIO())
    unmade = {"question": "inputs of group 1", "shape": "", "error": "MemoryError"}
    console.print(switch_table([{"question": "tile", "shape": "tiny", "today": "today", "variants": ways}, unmade]))
    line, last = console.export_text().splitlines()[1:]
    assert "inputs of group 1 failed" in last
    assert "100 (8)" in line
    assert line.split()[-4:] == ["fast", "10.0", "120", "20.0%"]
    assert "failed" in line


@pytest.mark.parametrize(("mode", "is_on"), [("graphs", True), ("eager", False)])
def test_kernels_are_launched_as_by_an_engine_of_the_mode(
    mode: str, is_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from d3engine.kernels.triton import launches

    monkeypatch.setattr(device, "settle_programmatic_launch", lambda *_: setattr(launches, "PROGRAMMATIC", True))
    with device.launched_as_in_engines(Round(torch.device("cuda"), False, 1e6, mode=mode)) as programmatic:
        assert programmatic is is_on
        assert launches.PROGRAMMATIC is is_on
        question = switches._dependent_launch("norm", TINY[0], lambda: switches._short_norm(TINY[0], HERE))
        assert next(iter(question.variants)) == ("PDL on" if is_on else "PDL off")
    assert launches.PROGRAMMATIC is False
