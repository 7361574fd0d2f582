"""The round's part `switches`: a way that is wrong never wins. `test_gpu_round.py` runs them all."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console
from round_clock import HERE

pytest.importorskip("triton")

from benchmarks.gpu import switches
from benchmarks.gpu.cases import TINY
from benchmarks.gpu.tables import switch_table


def test_a_way_that_is_wrong_is_far_and_fails_the_part(monkeypatch: pytest.MonkeyPatch, interpreter: None) -> None:
    question = switches._splits("wrong", TINY[0], [9], HERE)
    wrong = {"today": (), "without the base of its powers": (("paged_attention", "_LOG2_E", 1.0),)}
    monkeypatch.setattr(
        switches, "questions", lambda _: [lambda: [switches.Question("q", TINY[0], question.case, wrong)]]
    )
    monkeypatch.setattr(switches, "reading", lambda _: [])
    monkeypatch.setattr(switches, "launching", lambda _: {})
    report: dict[str, Any] = {}
    with pytest.raises(RuntimeError, match="1 of 1 questions have a variant that failed"):
        switches.run(report, HERE)
    assert [way["is_far"] for way in report["rows"][0]["variants"].values()] == [False, True]


def test_the_table_names_the_fastest_right_way_and_what_it_gains() -> None:
    ways = {
        "today": {"device_s": 12e-6, "gb_per_s": 100.0, "kernels": [{"in_flight": 8192}]},
        "fast": {"device_s": 10e-6, "gb_per_s": 120.0},
        "wrong": {"device_s": 1e-6, "gb_per_s": 1200.0, "is_far": True},
    }
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(switch_table([{"question": "tile", "shape": "tiny", "today": "today", "variants": ways}]))
    line = console.export_text().splitlines()[1]
    assert "100 (8)" in line
    assert line.split()[-4:] == ["fast", "10.0", "120", "20.0%"]
    assert "failed" in line
