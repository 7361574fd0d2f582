"""The benchmark of sums between ranks counts those that layers take."""

from pathlib import Path

import pytest
from benchmark_reports import report_of
from rank_tests import left_to_test_parallel

from benchmarks import rank_sums
from d3engine import D3


def test_sums_are_two_a_layer_and_one_for_the_embedding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sums are two for each layer that runs and one for the embedding."""
    left_to_test_parallel()
    depths = report_of(rank_sums.main, tmp_path, "--tokens=12", "--repeats=2")["depths"]
    assert depths["full depth"]["sums"]["median"] == 2 * 16 + 1
    assert depths["D3"]["sums"]["median"] == pytest.approx(2 * D3(0.9, 0.6).schedule(16).depths(12).mean() + 1)
    assert all(0 < depth["share"]["max"] < 1 for depth in depths.values())
    assert "D3 is" in capsys.readouterr().out
