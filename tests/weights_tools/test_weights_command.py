"""`d3engine weights` converts, inspects and verifies; a destination in use is kept, an error is one line."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conversion import make_model, run, save_bin, save_meta, write_llama2c
from safetensors.torch import save_file
from saved_llama import change, change_json

from d3engine.cli.commands import interrupted_by_signals
from d3engine.errors import InvalidValueError
from d3engine.weights_tools import convert
from d3engine.weights_tools.convert import convert_llama2c


@pytest.fixture
def converted(tmp_path: Path) -> Path:
    write_llama2c(tmp_path / "model.bin", make_model(tie_word_embeddings=True))
    convert_llama2c(tmp_path / "model.bin", tmp_path / "out", show_progress=False)
    return tmp_path / "out"


def test_a_destination_in_use_is_kept_unless_overwrite_is_given(tmp_path: Path) -> None:
    source, destination = tmp_path / "model.bin", tmp_path / "out"
    write_llama2c(source, make_model(tie_word_embeddings=True))
    destination.mkdir()
    (destination / "notes.txt").write_text("mine")
    (destination / "model-00001-of-00002.safetensors").write_text("stale")
    (destination / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(InvalidValueError, match=r"DST must be a new or empty directory \(or give --overwrite\)"):
        convert_llama2c(source, destination, show_progress=False)
    assert len(list(destination.iterdir())) == 3
    convert_llama2c(source, destination, overwrite=True, show_progress=False)
    assert sorted(file.name for file in destination.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "notes.txt",
    ]
    assert (destination / "notes.txt").read_text() == "mine"
    with pytest.raises(InvalidValueError, match=r"DST must be a directory, or a path where none exists.*; got .*"):
        convert_llama2c(source, source, overwrite=True, show_progress=False)
    (tmp_path / "link").symlink_to(tmp_path / "absent")
    with pytest.raises(InvalidValueError, match=r"DST must be a directory, or a path where none exists.*; got .*link"):
        convert_llama2c(source, tmp_path / "link", show_progress=False)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_killed_conversion_leaves_nothing_behind(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A closed terminal and a `kill` end it as Ctrl-C does; under nohup a closed terminal does not."""
    number = getattr(signal, name)
    write_llama2c(tmp_path / "model.bin", make_model(tie_word_embeddings=True))
    before = signal.signal(number, signal.SIG_DFL)  # these tests may run under nohup themselves
    try:
        with monkeypatch.context() as patch:
            patch.setattr(convert, "write_weights", lambda *_, **__: os.kill(os.getpid(), number))
            ended = run("convert", "llama2c", str(tmp_path / "model.bin"), str(tmp_path / "out"))
        assert (ended.exit_code, ended.stderr.splitlines()[-1]) == (130, "interrupted")
        assert [file.name for file in tmp_path.iterdir()] == ["model.bin"]
        signal.signal(number, signal.SIG_IGN)
        with interrupted_by_signals():
            os.kill(os.getpid(), number)
    finally:
        signal.signal(number, before)


def test_written_weights_are_as_readable_as_their_companions(converted: Path) -> None:
    """Written weights are as readable as the other files of their directory."""
    modes = {(converted / name).stat().st_mode for name in ("config.json", "model.safetensors")}
    assert len(modes) == 1


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("llama2c", "a llama2.c file"),
        ("bin", "a directory with pytorch_model*.bin files (models by name have safetensors already)"),
        ("meta", "a directory of Meta's, with params.json and consolidated.*.pth"),
        (
            "gguf",
            "a GGUF file, a directory with exactly one, smollm2, qwen2.5-coder-0.5b, qwen2.5-coder-1.5b (fetched once),"
            " or owner/name:QUANTIZATION of the Hugging Face hub",
        ),
    ],
)
def test_what_can_be_converted_is_said_where_a_source_is_none(kind: str, wanted: str, tmp_path: Path) -> None:
    for source in ("demo", "nowhere"):
        refused = run("convert", kind, source, tmp_path / "out")
        assert (refused.exit_code, refused.stderr) == (2, f"error: SRC must be {wanted}; got '{source}'\n")


@pytest.mark.parametrize("words", [["inspect"], ["verify"], ["quantize", "--scheme", "int4", "--rtn"]])
def test_mistyped_model_is_refused_before_torch_is_imported(words: list[str], tmp_path: Path) -> None:
    """A name that is none is refused at once, and not after the seconds that torch takes."""
    typed = ["d3engine", "weights", *words, "nowhere", *([str(tmp_path / "out")] if len(words) > 1 else [])]
    code = f"import sys; sys.modules['torch'] = None; sys.argv = {typed!r}; from d3engine.cli import main; main()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr[:20]) == (2, "error: model must be")


def test_convert_of_safetensors_says_that_none_is_needed(tmp_path: Path) -> None:
    """A directory of safetensors is refused, since it needs no conversion."""
    save_bin(tmp_path / "bin", make_model())
    assert run("convert", "bin", tmp_path / "bin", tmp_path / "out").exit_code == 0
    refused = run("convert", "bin", tmp_path / "out", tmp_path / "again")
    assert refused.exit_code == 2
    assert refused.stderr.endswith(
        "/out has no pytorch_model*.bin and needs no conversion: its weights are safetensors\n"
    )


def test_the_command_line_converts_inspects_and_verifies(tmp_path: Path) -> None:
    save_bin(tmp_path / "bin", make_model())
    converted = run("convert", "bin", tmp_path / "bin", tmp_path / "out", "--shard-size", "0.00001")
    assert converted.exit_code == 0, converted.output
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()
    verified = run("verify", tmp_path / "out")
    assert (verified.exit_code, verified.stdout) == (0, "OK\n")
    shown = run("inspect", tmp_path / "out")
    assert shown.exit_code == 0
    parameters = sum(parameter.numel() for parameter in make_model().parameters())
    assert f"{parameters:,}" in shown.stdout
    assert f"{parameters * 4:,}" in shown.stdout
    assert "256 (32-bit)" in shown.stdout  # 2 (K and V) x 2 layers x 2 kv heads x 8 channels x 4 bytes


def test_the_command_line_converts_meta_and_passes_notes_on(tmp_path: Path) -> None:
    save_meta(tmp_path / "meta", make_model())
    done = run("convert", "meta", tmp_path / "meta", tmp_path / "out", "--max-position-embeddings", "64")
    assert done.exit_code == 0, done.output
    assert "note: " in done.stderr
    assert "has no tokenizer.model" in done.stderr


def test_errors_are_one_line_and_the_exit_code_of_wrong_input(tmp_path: Path) -> None:
    for arguments in (
        ("inspect", tmp_path),
        ("convert", "llama2c", tmp_path / "absent", tmp_path / "out"),
        ("convert", "bin", tmp_path / "absent", tmp_path / "out"),
        ("convert", "bin", tmp_path, tmp_path / "out", "--shard-size", "0"),
        ("convert", "meta", tmp_path / "absent", tmp_path / "out"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2, arguments
        assert result.stdout == ""
        assert result.stderr.startswith("error: ")
        assert result.stderr.count("\n") == 1


def test_inspect_shows_even_what_verify_refuses(converted: Path) -> None:
    save_file({"odd [red]name": torch.ones(0)}, converted / "model.safetensors")
    shown = run("inspect", converted)
    assert shown.exit_code == 0
    assert "odd [red]name" in shown.stdout
    assert "is missing in" in run("verify", converted).stderr


def test_verify_finds_what_the_loader_would(converted: Path) -> None:
    change(converted, lambda tensors: tensors["model.norm.weight"][5].fill_(torch.nan))
    result = run("verify", converted)
    assert result.exit_code == 1
    assert "tensor 'model.norm.weight' holds NaN or infinity" in result.stderr

    change(converted, lambda tensors: tensors["model.norm.weight"][5].fill_(1e6))
    assert run("verify", converted).exit_code == 0
    change_json(converted / "config.json", lambda config: config.update(torch_dtype="float16"))
    assert "has values too large for torch.float16" in run("verify", converted).stderr
    (converted / "generation_config.json").write_text('{"top_p": "x"}')
    wanted = "generation_config.json: top_p must be a finite number of at least 0; got 'x'"
    assert wanted in run("verify", converted).stderr
    (converted / "generation_config.json").unlink()
    change_json(converted / "config.json", lambda config: config.pop("torch_dtype"))
    (converted / "tokenizer.json").write_text('{"version": "1.0", "model": {"ty')
    assert "tokenizer.json: is no valid tokenizer.json" in run("verify", converted).stderr
