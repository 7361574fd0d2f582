"""`benchmarks.launch_time` runs without a GPU, and its figures belong together; no time is judged."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import launch_time


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_every_operation_is_timed_both_ways(tmp_path: Path) -> None:
    """In a process of its own, without the interpreter."""
    other_tests = ("TRITON_INTERPRET", "PYTHONSAFEPATH")
    environment = {name: value for name, value in os.environ.items() if name not in other_tests}
    file = tmp_path / "times.json"
    command = [sys.executable, "-m", "benchmarks.launch_time", "--rows", "20", "--answers", "3", "--rounds", "2"]
    result = subprocess.run(
        [*command, "--json", str(file)], env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    report = json.loads(file.read_text())
    found = report["operations"]
    # A norm and a product, splits and a chunk, a product, a norm and a product, a product.
    assert [row["launches"] for row in found.values()] == [2, 2, 1, 2, 1, 8]
    for row in found.values():
        pairs = zip(row["anew"]["rounds"], row["by_recipe"]["rounds"], strict=True)
        assert row["ratio"]["rounds"] == pytest.approx([one / other for one, other in pairs])
    assert "32 layers: " in result.stdout


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(["--rows", "8"], "--answers is 8; it must be less than --rows"), (["--rounds", "0"], "not a whole number")],
)
def test_what_cannot_be_timed_is_refused(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        launch_time.main(arguments)
    assert named in capsys.readouterr().err
