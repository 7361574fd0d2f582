"""Blocks in the place of a window are trained alike, and judged as the weights that they read are counted."""

from pathlib import Path

import pytest
import torch
from benchmark_reports import report_of
from typer.testing import CliRunner

from benchmarks import blocks
from d3engine.cli import app
from d3engine.engine.model_directory import model_directory
from d3engine.model.config import ModelConfig


def test_blocks_are_judged_beside_the_window_skipped(tmp_path: Path) -> None:
    """Each block saves two layers of three, and the one without attention what that would read too."""
    answers = tmp_path / "own.jsonl"
    asked = ["--out", str(answers), "--texts=4", "--held-out-texts=2", "--max-tokens=12", "--kinds=arithmetic"]
    assert CliRunner().invoke(app, ["depth", "answers", "demo", *asked]).exit_code == 0
    few = ["--first=4", "--stop=7", "--hidden-steps=2", "--steps=1", "--held-out=2", "--answer-tokens=12"]
    threads = f"--threads={torch.get_num_threads()}"
    asked = ["--model=demo", f"--answers={answers}", *few, threads, "--depth", "fixed skip-layers=4-6"]
    report = report_of(blocks.main, tmp_path, *asked)
    skipped, policy, whole, rank, without = report["rows"]
    assert {name: skipped[name] for name in ("kl", "layers_saved")} == {
        name: policy[name] for name in ("kl", "layers_saved")
    }
    assert skipped["layers_saved"] == 3
    assert whole["layers_saved"] == rank["layers_saved"] == pytest.approx(2)
    config = ModelConfig.from_directory(model_directory("demo"))
    spared = (config.q_size + 2 * config.kv_size) * config.hidden_size / config.layer_parameters
    assert without["layers_saved"] == pytest.approx(2 + spared)
    assert whole["trained"] > without["trained"] > rank["trained"] > 0
    assert [point["step"] for point in whole["curve"]] == [0, 3]
    assert len({one["kl"] for one in report["rows"]}) == 4
