"""`benchmarks.kv_cache_time` runs over both caches, and its ratios follow from its seconds; no time is judged."""

import json
from pathlib import Path

import pytest

from benchmarks import kv_cache_time as benchmark


def test_both_caches_take_their_turns_at_every_length_and_batch(tmp_path: Path, native_library: None) -> None:
    file = tmp_path / "time.json"
    sizes = ["--contexts", "40", "9", "--batches", "1", "3", "--steps", "2", "--rounds", "3"]
    assert benchmark.main(["--model", "demo", *sizes, "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert [(row["context"], row["batch"]) for row in report["rows"]] == [(40, 1), (40, 3), (9, 1), (9, 3)]
    wide, narrow = (report["caches"][name] for name in ("float32", "fp8"))
    assert wide["isa"] == narrow["isa"]
    assert 3 < wide["bytes_a_token"] / narrow["bytes_a_token"] < 4
    for row in report["rows"]:
        floats, fp8 = (row["steps"][name]["rounds"] for name in ("float32", "fp8"))
        assert row["ratio"]["rounds"] == pytest.approx([one / other for one, other in zip(fp8, floats, strict=True)])
