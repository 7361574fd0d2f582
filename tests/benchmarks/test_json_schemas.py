"""The benchmark of JSON schemas counts what it compiles and what it allows."""

import json
from pathlib import Path

import pytest
from benchmark_reports import report_of

from benchmarks import json_schemas

pytest.importorskip("llguidance")


def test_schemas_and_instances_of_both_suites_are_counted(tmp_path: Path) -> None:
    tests = [{"data": 3, "valid": True}, {"data": "x", "valid": False}, {"data": 1, "valid": False}]
    (folder := tmp_path / "suite").mkdir()
    (folder / "a.json").write_text(json.dumps({"schema": {"type": "integer"}, "tests": tests}))
    groups = [{"schema": {"contains": {}}, "tests": tests}, {"schema": True, "tests": tests}]
    (folder / "b.json").write_text(json.dumps(groups))
    report = report_of(json_schemas.main, tmp_path, str(folder))
    assert report["counts"] == {
        "schemas": 2,
        "accepted": 1,
        "valid instances": 1,
        "valid instances allowed": 1,
        "invalid instances": 2,
        "invalid instances allowed": 1,
    }
    assert report["wrongly allowed"] == ["a.json: 1"]
    assert report["refusals"] == {"Unimplemented keys": 1}
