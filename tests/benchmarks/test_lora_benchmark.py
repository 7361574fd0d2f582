"""`benchmarks.lora` runs with an adapter and without in turns, and its ratios follow from its seconds."""

import json
from pathlib import Path

import pytest

from benchmarks import lora as benchmark


def test_both_kinds_take_their_turns_at_every_batch(tmp_path: Path, native_library: None) -> None:
    file = tmp_path / "time.json"
    sizes = ["--batches", "1", "3", "--steps", "2", "--rounds", "3", "--rank", "4", "--threads", "1"]
    assert benchmark.main(["--model", "demo", *sizes, "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert [row["batch"] for row in report["rows"]] == [1, 3]
    assert report["executor"].startswith("native")
    assert report["adapter_bytes"] > 0
    for row in report["rows"]:
        none, own = (row["steps"][kind]["rounds"] for kind in ("none", "adapter"))
        assert row["ratio"]["rounds"] == pytest.approx([one / other for one, other in zip(own, none, strict=True)])
