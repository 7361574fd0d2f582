"""Benchmarks of two systems in turns run, and their ratios follow from their seconds; no time is judged."""

from pathlib import Path
from typing import Any

import pytest
from benchmark_reports import report_of

from benchmarks import kv_cache_time, lora


def ratios_follow(rows: list[dict[str, Any]], first: str, second: str) -> bool:
    """Whether each ratio is the second system's seconds over the first's, round by round."""
    pairs = [(row["ratio"]["rounds"], *(row["steps"][name]["rounds"] for name in (first, second))) for row in rows]
    return all(
        found == pytest.approx([a / b for a, b in zip(over, under, strict=True)]) for found, under, over in pairs
    )


def test_both_caches_take_their_turns_at_every_length_and_batch(tmp_path: Path, native_library: None) -> None:
    """Entries of 8 bits take a fourth of the bytes, and scales."""
    sizes = ["--contexts", "40", "9", "--batches", "1", "3", "--steps", "2", "--rounds", "3"]
    report = report_of(kv_cache_time.main, tmp_path, "--model=demo", *sizes)
    assert [(row["context"], row["batch"]) for row in report["rows"]] == [(40, 1), (40, 3), (9, 1), (9, 3)]
    wide, narrow = (report["caches"][name] for name in ("float32", "fp8"))
    assert wide["isa"] == narrow["isa"]
    assert 3 < wide["bytes_a_token"] / narrow["bytes_a_token"] < 4
    assert ratios_follow(report["rows"], "float32", "fp8")


def test_adapter_and_none_take_their_turns_at_every_batch(tmp_path: Path, native_library: None) -> None:
    """An engine answers natively with an adapter and without."""
    sizes = ["--batches", "1", "3", "--steps", "2", "--rounds", "3", "--rank", "4", "--threads", "1"]
    report = report_of(lora.main, tmp_path, "--model=demo", *sizes)
    assert [row["batch"] for row in report["rows"]] == [1, 3]
    assert report["executor"].startswith("native")
    assert report["adapter_bytes"] > 0
    assert ratios_follow(report["rows"], "none", "adapter")
