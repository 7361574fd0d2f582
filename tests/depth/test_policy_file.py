"""`d3.json`: for which weights and which task its setting holds, and that "auto" says so."""

import json
from pathlib import Path
from typing import Any

import pytest
from fixture_types import MakeLlama
from safetensors.torch import load_file, save_file

from d3engine import Engine
from d3engine.depth import D3, FullDepth
from d3engine.depth.policy import POLICY_FILE, calibrated_for, calibrated_task
from d3engine.engine.depth import resolve_depth
from d3engine.engine.model_directory import model_directory
from d3engine.errors import ModelFormatError
from d3engine.model.expected_tensors import fingerprint
from d3engine.research.calibration.statistics import PASS_LEVEL


def tiny_with_depth(tiny_llama: MakeLlama, directory: Path, name: str | None) -> Path:
    for file in tiny_llama().directory.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    content = {"depth": D3(alpha=0.9, start=0.5).describe()} | ({} if name is None else {"fingerprint": name})
    (directory / POLICY_FILE).write_text(json.dumps(content))
    return directory


def test_a_setting_for_other_weights_is_refused_by_its_file(tiny_llama: MakeLlama, tmp_path: Path) -> None:
    own = fingerprint(tiny_llama().directory)
    small: dict[str, Any] = {"skip_tokenizer_init": True, "device": "cpu", "kv_cache_memory_bytes": 2**22}
    directory = tiny_with_depth(tiny_llama, tmp_path, own)
    with Engine(directory, **small) as engine:
        assert engine.depth == D3(alpha=0.9, start=0.5)
    tiny_with_depth(tiny_llama, tmp_path, "sha256:" + "0" * 64)
    with pytest.raises(ValueError, match=r"d3\.json was calibrated on other weights"):
        Engine(directory, **small)
    Engine(directory, depth=FullDepth(), **small).close()  # who names a depth needs no file
    tiny_with_depth(tiny_llama, tmp_path, None)
    Engine(directory, **small).close()  # written by hand, and claims nothing
    (directory / POLICY_FILE).write_text('{"depth": {"policy": "full"}, "fingerprint": 7}')
    with pytest.raises(ValueError, match=r'd3\.json has no text under "fingerprint"'):
        Engine(directory, **small)


@pytest.mark.parametrize(
    ("content", "task"),
    [
        ({"task": "gsm8k"}, "gsm8k"),
        ({"evidence": {"task": "word-problems"}}, "word-problems"),  # as files were written at first
        ({"evidence": {}}, None),
        ({}, None),
    ],
)
def test_the_file_names_the_task_that_its_setting_was_found_for(
    content: dict[str, Any], task: str | None, tmp_path: Path
) -> None:
    (tmp_path / POLICY_FILE).write_text(json.dumps({"depth": {"policy": "full"}, **content}))
    assert calibrated_task(tmp_path) == task


@pytest.mark.parametrize("content", [{"task": 7}, {"evidence": {"task": ["a"]}}, {"evidence": 3}, []])
def test_a_task_that_is_no_text_is_refused_by_its_file(content: Any, tmp_path: Path) -> None:
    (tmp_path / POLICY_FILE).write_text(json.dumps(content))
    with pytest.raises(ModelFormatError, match=r'd3\.json has no text under "task"'):
        calibrated_task(tmp_path)


def test_auto_says_for_which_task_its_setting_was_found(
    tiny_llama: MakeLlama, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert calibrated_task(tmp_path) is None
    directory = tiny_with_depth(tiny_llama, tmp_path, None)
    with caplog.at_level("INFO", logger="d3engine"):
        resolve_depth("auto", directory)
        content = json.loads((directory / POLICY_FILE).read_text())
        (directory / POLICY_FILE).write_text(json.dumps({**content, "task": "gsm8k"}))
        resolve_depth("auto", directory)
        resolve_depth(FullDepth(), directory)
        resolve_depth("auto", tiny_llama().directory)
    assert [record.getMessage() for record in caplog.records] == [
        "depth from d3.json: D3, alpha 0.9, start 0.5 (the file does not say for which task)",
        "depth from d3.json: D3, alpha 0.9, start 0.5 (found safe for gsm8k, for no other task)",
    ]


def test_a_fingerprint_is_of_the_weights_and_what_they_compute(tiny_llama: MakeLlama, tmp_path: Path) -> None:
    own = fingerprint(tiny_llama().directory)
    assert fingerprint(tiny_llama(max_shard_size="40KB").directory) == own  # shards do not matter
    assert fingerprint(tiny_llama(seed=1).directory) != own
    config = json.loads((tiny_with_depth(tiny_llama, tmp_path, None) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "eos_token_id": 5}))
    assert fingerprint(tmp_path) == own  # the same layers compute the same
    (tmp_path / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    assert fingerprint(tmp_path) != own


def test_one_changed_matrix_of_one_layer_changes_the_fingerprint(tiny_llama: MakeLlama, tmp_path: Path) -> None:
    directory = tiny_with_depth(tiny_llama, tmp_path, None)
    own = fingerprint(directory)
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"] *= 1.001
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    assert fingerprint(directory) != own


def test_the_bundled_setting_is_for_the_bundled_weights() -> None:
    directory = model_directory("demo")
    assert calibrated_for(directory) == fingerprint(directory)
    content = json.loads((directory / POLICY_FILE).read_text())
    evidence = content["evidence"]
    assert content["task"] == evidence["task"] == "word-problems"
    assert evidence["test"]["p_value_of_losing_the_tolerance"] <= PASS_LEVEL
