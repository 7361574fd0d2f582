"""Ratios of processor times that are stored, and those of this machine."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import regressions
from d3engine.kernels.native.library import LibraryMissing, isas_here

FOUND = {"8 rows / 1 row": 4.0, "int8 / bfloat16": 0.5}


def best_isa() -> str:
    try:
        return isas_here()[0]
    except LibraryMissing as error:
        pytest.skip(str(error))


def test_differences_name_ratios_beyond_the_bound() -> None:
    """Up and down."""
    assert regressions.differences(FOUND, FOUND, 2.0) == []
    assert regressions.differences(FOUND, FOUND | {"8 rows / 1 row": 1.9}, 2.0) == ["8 rows / 1 row"]
    assert regressions.differences(FOUND, FOUND | {"int8 / bfloat16": 1.1}, 2.0) == ["int8 / bfloat16"]


def test_one_bad_measurement_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """And counts only if the second one is as bad."""
    monkeypatch.setattr(regressions, "stored", lambda: {"avx2": FOUND})
    bad = FOUND | {"int8 / bfloat16": 1.5}
    for second, wrong in ((FOUND, []), (bad, ["avx2: int8 / bfloat16 is off by more than a factor of 2"])):
        monkeypatch.setattr(regressions, "measure", lambda isa, rounds, second=second: second)
        assert regressions.judged({"avx2": bad}, 2.0, 1) == wrong
    assert regressions.judged({"sve": FOUND}, 2.0, 1) == [
        "no ratios are stored for sve: --store keeps those of this machine"
    ]


def test_regressions_stores_and_finds_its_ratios(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every ratio that the instruction set has."""
    isa, file = best_isa(), tmp_path / "ratios.json"
    monkeypatch.setattr(regressions, "STORED", file)
    assert regressions.main(["--isa", isa, "--rounds", "1", "--store"]) == 0
    kept: dict[str, Any] = json.loads(file.read_text())
    assert kept["processor"] == regressions.processor() != ""
    expected = {name for name, pair in regressions.RATIOS.items() if set(pair) <= regressions.cases(isa).keys()}
    assert kept["ratios"][isa].keys() == expected
    assert regressions.main(["--isa", isa, "--rounds", "1", "--bound", "1000"]) == 0


def test_ratios_of_this_processor_are_the_stored_ones() -> None:
    """Judged on the processor that they were stored on: on others they may differ by right."""
    isa, report = best_isa(), json.loads(regressions.STORED.read_text(encoding="utf-8"))
    if isa not in report["ratios"] or report["processor"] != regressions.processor():
        pytest.skip("the stored ratios are another processor's")
    ratios = {isa: regressions.measure(isa, regressions.ROUNDS)}
    assert regressions.judged(ratios, regressions.BOUND, regressions.ROUNDS) == []
