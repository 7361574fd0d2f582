"""The benchmark of JSON schemas counts what it compiles and what it allows."""

import json
from pathlib import Path

import pytest

from benchmarks import json_schemas

pytest.importorskip("llguidance")


def test_schemas_and_instances_of_both_suites_are_counted(tmp_path: Path) -> None:
    tests = [{"data": 3, "valid": True}, {"data": "x", "valid": False}, {"data": 1, "valid": False}]
    (tmp_path / "a.json").write_text(json.dumps({"schema": {"type": "integer"}, "tests": tests}))
    groups = [{"schema": {"contains": {}}, "tests": tests}, {"schema": True, "tests": tests}]
    (tmp_path / "b.json").write_text(json.dumps(groups))
    file = tmp_path / "found.txt"
    json_schemas.main([str(tmp_path), "--json", str(file)])
    report = json.loads(file.read_text())
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
