"""Calibration with bridges: which settings are tried, what they cost, and that "auto" applies what was chosen."""

import json
import shutil
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from bridge_files import some_maps, write_maps
from invoking import invoke
from watching import watch

from d3engine import Engine, SamplingParams
from d3engine.depth import D3, Nested
from d3engine.engine.depth import resolve_depth
from d3engine.engine.model_directory import model_directory
from d3engine.errors import ModelFormatError
from d3engine.model.bridges import BRIDGES_FILE, Bridge, read_bridges, write_bridges
from d3engine.model.config import ModelConfig
from d3engine.model.expected_tensors import fingerprint
from d3engine.research.calibration.bridge_choices import bridge_choices
from d3engine.research.calibration.scoring import EngineScorer, Part
from d3engine.research.calibration.search import make_candidates
from d3engine.research.evaluation.accuracy import take_problems
from d3engine.research.evaluation.baselines import open_bridges

DEMO = model_directory("demo")
CONFIG = ModelConfig.from_directory(DEMO)
CHECK = ("--tolerance", "16", "--limit", "23", "--max-tokens", "64", "--device", "cpu")


def demo_bridges(path: Path, *, scale: float, first: int = 11) -> str:
    """A map for each window of start 0.7; of scale 0 it does nothing."""
    maps = some_maps(CONFIG.num_layers, CONFIG.hidden_size, scale=scale)
    write_maps({window: one for window, one in maps.items() if window[0] == first}, DEMO, path)
    return str(path)


def calibrate(*arguments: str) -> Any:
    return invoke(["calibrate", "demo", *CHECK, *arguments])


def test_a_cut_map_has_the_largest_singular_values_alone() -> None:
    weight, offset = next(iter(some_maps(1, 12).values()))
    cut = Bridge(0, 1, weight, offset).cut(5)
    assert cut.down is not None
    assert (cut.rank, cut.weight.shape, cut.down.shape) == (5, (12, 5), (5, 12))
    left_over = torch.linalg.svdvals(weight)[5:]
    assert (weight - cut.weight @ cut.down).norm() == pytest.approx(float(left_over.norm()), rel=1e-4)
    again = cut.cut(5)
    assert again.down is not None
    torch.testing.assert_close(again.weight @ again.down, cut.weight @ cut.down, rtol=1e-4, atol=1e-5)


def test_each_setting_is_also_tried_with_bridges_it_fits() -> None:
    """Each setting is also tried with all bridges that hold its windows."""
    held = {"late": {(11, stop) for stop in range(12, 17)}, "one": {(11, 12)}}
    found = make_candidates(16, 64, starts=(0.5, 0.7), alphas=(0.9, 0.9999), bridges=held)
    plain = [D3(0.9, 0.5), D3(0.9, 0.7), D3(0.9999, 0.5), D3(0.9999, 0.7)]
    assert [one.policy for one in found if one.policy.bridges is None] == plain
    bridged = [(one.policy.alpha, one.policy.start, one.policy.bridges) for one in found if one.policy.bridges]
    assert bridged == [(0.9, 0.7, "late"), (0.9999, 0.7, "late")]


def test_bridge_costs_count_in_the_fastest_and_lower_ranks_less(tmp_path: Path) -> None:
    """A bridge counts in what is called fastest, and a lower rank counts less."""
    # Maps that do nothing change no answer, so what differs is their cost alone.
    file = demo_bridges(tmp_path / "b.safetensors", scale=0)
    choices = bridge_choices([file], [16], DEMO, fingerprint(DEMO), tmp_path)
    assert list(choices) == [file, f"{file} at rank 16"]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    problems = {Part.SCREENING: take_problems("validation", 0, 2)}
    with Engine("demo", device="cpu", kv_cache_memory_bytes=2**24) as engine:
        scorer = EngineScorer(engine, params, problems, choices)
        settings = [D3(0.5, 0.7, bridges=name) for name in (None, *choices)]
        open_bridges(engine, [choices[one.bridges].policy(one) for one in settings if one.bridges])
        bare, full, low = (scorer.score(one, Part.SCREENING, 0, 2) for one in settings)
    assert choices[file].policy(Nested(0.9, [[11, 16]], bridges=file)) == Nested(0.9, [[11, 16]], bridges=file)
    assert bare.right == full.right == low.right
    map_in_layers = CONFIG.hidden_size**2 / CONFIG.layer_parameters
    assert full.layers - bare.layers == pytest.approx(2 * 7 * map_in_layers), "all tokens but the first cross"
    assert low.layers - bare.layers == pytest.approx(2 * 7 * map_in_layers * 2 * 16 / CONFIG.hidden_size)


def test_choice_with_bridges_is_applied_by_auto_alone(tmp_path: Path) -> None:
    """A choice with bridges is applied by `auto`, and refused next to other bridges."""
    model, file = tmp_path / "model", demo_bridges(tmp_path / "b.safetensors", scale=0)
    shutil.copytree(DEMO, model)
    check = f"d3 alpha=0.9 start=0.7 bridges={file}"
    result = calibrate("--check", check, "--out", str(model / "d3.json"))
    assert result.exit_code == 0, result.output
    written = json.loads((model / "d3.json").read_text())
    assert written["depth"] == D3(0.9, 0.7, bridges="auto").describe()
    digest = sha256(Path(file).read_bytes()).hexdigest()
    assert written["bridges"] == {"file": BRIDGES_FILE, "sha256": digest, "from": file}
    with Engine(model, device="cpu", kv_cache_memory_bytes=2**24) as engine:
        assert engine.depth == D3(0.9, 0.7, bridges="auto")
        assert engine.stats().bridge_bytes > 0
    demo_bridges(model / BRIDGES_FILE, scale=1)
    with pytest.raises(ModelFormatError, match=r"d3\.json was calibrated with other bridges than those in .*model"):
        resolve_depth("auto", model)
    (model / "d3.json").write_text(json.dumps({**written, "bridges": {"sha256": 7}}))
    with pytest.raises(ModelFormatError, match=r'd3\.json has no text under "sha256" of "bridges"'):
        resolve_depth("auto", model)
    (model / "d3.json").write_text(json.dumps({"depth": written["depth"]}))
    assert resolve_depth("auto", model) == D3(0.9, 0.7, bridges="auto"), "written by hand, and claims nothing"


def test_bridges_that_cannot_serve_are_refused_before_any_answer(tmp_path: Path) -> None:
    file = demo_bridges(tmp_path / "b.safetensors", scale=0)
    other = tmp_path / "other.safetensors"
    shutil.copyfile(file, other)
    write_bridges(replace(read_bridges(file), fingerprint="sha256:0"), other)
    aside = tmp_path / "aside"
    aside.mkdir()
    demo_bridges(aside / BRIDGES_FILE, scale=1)
    out = ("--out", str(tmp_path / "d3.json"))
    limit = str(CONFIG.hidden_size // 2 - 1)
    for arguments, said in (
        (("--bridges", str(tmp_path / "none")), "--bridges must be what d3engine bridge fit has written"),
        (("--bridges", str(other)), "--bridges must be fitted to these weights"),
        (("--bridges", file, "--bridges", file), "--bridges must be files of which each is named once"),
        (("--bridges", file, "--start", "0.5"), "--bridges must be a file with all windows of at least one setting"),
        (("--bridge-rank", "4"), "--bridge-rank must be given beside --bridges"),
        (("--bridges", file, "--bridge-rank", "64"), f"--bridge-rank must be an integer from 1 to {limit}"),
        (("--check", "d3 alpha=0.9 start=0.7", "--bridges", file), "--bridges must be absent beside --check"),
    ):
        result = calibrate(*arguments, *out)
        assert result.exit_code == 2, result.output
        assert said in result.stderr.splitlines()[-1]
    result = calibrate("--bridges", file, "--out", str(aside / "d3.json"))
    assert result.exit_code == 2
    assert f"such that no {BRIDGES_FILE} lies beside it" in result.stderr.splitlines()[-1]


def test_calibration_with_cut_bridges_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept answers of cut maps are found again, though each run cuts them into another directory."""
    asked = watch(monkeypatch, Engine, "generate", lambda engine, prompts, *_, **__: len(prompts))
    file = demo_bridges(tmp_path / "b.safetensors", scale=0)
    words = ("--bridges", file, "--bridge-rank", "16", "--start", "0.7", "--alpha", "0.9", "--budget", "250")
    run = (*words, "--answers", str(tmp_path / "kept.jsonl"), "--out", str(tmp_path / "d3.json"))
    assert calibrate(*run).exit_code == 0
    assert asked
    asked.clear()
    (tmp_path / BRIDGES_FILE).unlink(missing_ok=True)
    assert calibrate(*run).exit_code == 0
    assert asked == []
    demo_bridges(Path(file), scale=0.5)
    (tmp_path / BRIDGES_FILE).unlink(missing_ok=True)
    calibrate(*run)
    assert asked, "other maps give other answers"
