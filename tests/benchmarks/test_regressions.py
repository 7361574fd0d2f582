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
    """Up and down; of several processors' ratios the least and the most count."""
    less = FOUND | {"8 rows / 1 row": 1.9}
    assert regressions.differences(FOUND, [FOUND], 2.0) == []
    assert regressions.differences(FOUND, [less], 2.0) == ["8 rows / 1 row"]
    assert regressions.differences(FOUND, [FOUND | {"int8 / bfloat16": 1.1}], 2.0) == ["int8 / bfloat16"]
    assert regressions.differences(FOUND, [less, FOUND | {"8 rows / 1 row": 9.0}], 2.0) == []


@pytest.mark.parametrize("is_known", [True, False])
def test_ratios_of_an_unknown_processor_have_a_wider_bound(monkeypatch: pytest.MonkeyPatch, is_known: bool) -> None:
    """This processor's ratios count where they are stored, and all others' where they are not."""
    here = regressions.processor() if is_known else "a new one"
    known = {"another": {"avx2": FOUND}, here: {"avx2": FOUND | {"int8 / bfloat16": 0.9}}}
    monkeypatch.setattr(regressions, "stored", lambda: known)
    monkeypatch.setattr(regressions, "measure", lambda isa, rounds: FOUND)
    bound = regressions.BOUND if is_known else regressions.BOUND_ELSEWHERE
    counted = [here] if is_known else list(known)
    assert regressions.comparable("avx2") == ([known[name]["avx2"] for name in counted], bound)
    assert len(regressions.judged({"avx2": FOUND}, 1)) == int(is_known)


def test_one_bad_measurement_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """And counts only if the second one is as bad."""
    monkeypatch.setattr(regressions, "stored", lambda: {regressions.processor(): {"avx2": FOUND}})
    bad = FOUND | {"int8 / bfloat16": 1.5}
    for second, wrong in ((FOUND, []), (bad, ["avx2: int8 / bfloat16 is off by more than a factor of 2"])):
        monkeypatch.setattr(regressions, "measure", lambda isa, rounds, second=second: second)
        assert regressions.judged({"avx2": bad}, 1, 2.0) == wrong
    assert regressions.judged({"sve": FOUND}, 1, 2.0) == [
        "no ratios are stored for sve: --store keeps those of this machine"
    ]


def test_regressions_stores_and_finds_its_ratios(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every ratio that the instruction set has, beside those of other processors."""
    isa, file = best_isa(), tmp_path / "ratios.json"
    file.write_text(json.dumps({"processors": {"another": {isa: FOUND}}}))
    monkeypatch.setattr(regressions, "STORED", file)
    assert regressions.main(["--isa", isa, "--rounds", "1", "--store"]) == 0
    kept: dict[str, Any] = json.loads(file.read_text())["processors"]
    assert list(kept) == ["another", regressions.processor()]
    expected = {name for name, pair in regressions.RATIOS.items() if set(pair) <= regressions.cases(isa).keys()}
    assert kept[regressions.processor()][isa].keys() == expected
    assert regressions.main(["--isa", isa, "--rounds", "1", "--bound", "1000"]) == 0


def test_ratios_of_the_native_library_are_the_stored_ones() -> None:
    """On any processor, of the best instruction set here that ratios are stored for."""
    best_isa()
    isa = next((isa for isa in isas_here() if regressions.comparable(isa)[0]), None)
    if isa is None:
        pytest.skip("no ratios are stored for an instruction set of this processor")
    ratios = {isa: regressions.measure(isa, regressions.ROUNDS)}
    assert regressions.judged(ratios, regressions.ROUNDS) == []
