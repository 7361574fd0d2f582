"""What a converter is given may be damaged, or made to grow; what it leaves is a whole directory or the old one."""

import json
import os
import random
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from configs import llama_config
from safetensors.torch import load_file
from torch import Tensor

from d3engine.errors import ModelFormatError
from d3engine.model.config import ModelConfig
from d3engine.model.expected_tensors import expected_tensors
from d3engine.model.weights import load_weights
from d3engine.weights_tools.convert import convert_bin, load_pickled
from d3engine.weights_tools.writing import output_directory

SIZES = llama_config(1, intermediate_size=40, num_attention_heads=2)


def write_bin(directory: Path, tensor: Callable[[tuple[int, ...]], Tensor], **changes: Any) -> dict[str, Tensor]:
    """A transformers directory whose tensors are what `tensor` makes of their shapes."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(SIZES | changes))
    shapes = expected_tensors(ModelConfig.from_directory(directory))
    tensors = {name: tensor(shape) for name, shape in shapes.items()}
    torch.save(tensors, directory / "pytorch_model.bin")
    return tensors


# -- damaged files -----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("is_zip", [True, False])
def test_damaged_pickle_is_read_or_refused_by_name(tmp_path: Path, is_zip: bool) -> None:
    """A damaged pickle is read or refused by name, and raises nothing else."""
    file = tmp_path / "pytorch_model.bin"
    state = {"a": torch.zeros(3, 4), "b": torch.ones(5)}
    torch.save(state, file, _use_new_zipfile_serialization=is_zip)
    whole = file.read_bytes()
    reach = 900 if is_zip else len(whole)  # the pickle; behind it are values, which nobody can tell from others
    rng = random.Random(1)
    refused = 0
    for _ in range(150):
        damaged = bytearray(whole)
        for _ in range(rng.choice([1, 1, 2, 5])):
            damaged[rng.randrange(min(reach, len(damaged)))] = rng.randrange(256)
        if rng.random() < 0.1:
            damaged = damaged[: rng.randrange(len(damaged))]
        file.write_bytes(damaged)
        try:
            for tensor in load_pickled(file).values():
                tensor.sum()
        except ModelFormatError as error:
            refused += str(file) in str(error)
    assert refused > 37


# -- small files of large tensors --------------------------------------------------------------------------------------


def repeated(shape: tuple[int, ...]) -> Tensor:
    return torch.ones(1).expand(shape)


_POOL = torch.zeros(300 * 32)


def overlapping(shape: tuple[int, ...]) -> Tensor:
    return _POOL[: torch.Size(shape).numel()].view(shape)


@pytest.mark.parametrize(("tensor", "layers"), [(repeated, 1), (overlapping, 30)])
def test_tensors_that_repeat_the_same_values_are_not_written_out(
    tmp_path: Path, tensor: Callable[[tuple[int, ...]], Tensor], layers: int
) -> None:
    write_bin(tmp_path / "bin", tensor, num_hidden_layers=layers)
    with pytest.raises(ModelFormatError, match=r"pytorch_model\.bin has [\d,]+ bytes and describes tensors of [\d,]+"):
        convert_bin(tmp_path / "bin", tmp_path / "out", show_progress=False)
    assert [file.name for file in tmp_path.iterdir()] == ["bin"]


def test_an_embedding_that_two_names_share_is_converted(tmp_path: Path) -> None:
    tensors = write_bin(tmp_path / "bin", torch.rand, vocab_size=3000)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    torch.save(tensors, tmp_path / "bin" / "pytorch_model.bin")
    convert_bin(tmp_path / "bin", tmp_path / "out", show_progress=False)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(written[name], tensor) for name, tensor in tensors.items())


def test_a_packed_checkpoint_is_refused(tmp_path: Path) -> None:
    file, packed = tmp_path / "plain.bin", tmp_path / "packed.bin"
    torch.save({"a": torch.zeros(10_000)}, file)
    with zipfile.ZipFile(file) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
        for entry in source.infolist():
            target.writestr(entry.filename, source.read(entry))
    assert load_pickled(file)["a"].shape == (10_000,)
    with pytest.raises(ModelFormatError, match=r"packed\.bin: '.*' is packed, which torch\.save never does"):
        load_pickled(packed)


def test_tensors_without_values_of_their_own_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    for odd in (torch.eye(3).to_sparse(), torch.ones(3, device="meta")):
        torch.save({"a": odd}, file)
        with pytest.raises(ModelFormatError, match=r"model\.bin"):
            load_pickled(file)


def test_a_companion_that_is_no_file_is_refused_and_not_left_out(tmp_path: Path) -> None:
    write_bin(tmp_path / "bin", torch.rand)
    (tmp_path / "bin" / "tokenizer.json").symlink_to("/dev/zero")
    with pytest.raises(ModelFormatError, match=r"tokenizer\.json is not a regular file"):
        convert_bin(tmp_path / "bin", tmp_path / "out", show_progress=False)
    assert not (tmp_path / "out").exists()


# -- whole or not at all -----------------------------------------------------------------------------------------------


def contents(directory: Path) -> dict[str, bytes]:
    return {str(file.relative_to(directory)): file.read_bytes() for file in directory.rglob("*") if file.is_file()}


NEW = {"config.json": b"new", "model-00001-of-00002.safetensors": b"new", "model-00002-of-00002.safetensors": b"new"}
NEW["model.safetensors.index.json"] = b"new"
OLD = {"config.json": b"old", "model.safetensors": b"old", "tokenizer.model": b"old", "notes.txt": b"mine"}
AFTER = NEW | {"tokenizer.model": b"old", "notes.txt": b"mine"}
MOVES = 2 + len(NEW)  # the old config.json and weights go, the new files come


def write(directory: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (directory / name).write_bytes(content)


def overwrite(destination: Path) -> None:
    with output_directory(destination, overwrite=True) as folder:
        write(folder, NEW)


def fail_from(move: int, *, every: bool, error: type[BaseException] | BaseException) -> Callable[[Any, Any], None]:
    """A rename that fails at the move of that number, and with `every` at all after it, as if the process were gone."""
    done, rename = 0, os.rename

    def fail(source: Any, target: Any) -> None:
        nonlocal done
        done += 1
        if done == move or (every and done > move):
            raise error
        rename(source, target)

    return fail


def test_new_tokenizer_replaces_all_files_of_the_old(tmp_path: Path) -> None:
    """No template or tokenizer of the old model stays beside the new weights; what a user has made stays."""
    kept = {"prompt_form.json": b"mine", "d3.json": b"mine", "notes.txt": b"mine"}
    write(tmp_path, OLD | kept | {"tokenizer.json": b"old", "chat_template.jinja": b"old"})
    (tmp_path / "1_Pooling").mkdir()
    with output_directory(tmp_path, overwrite=True) as folder:
        write(folder, NEW | {"tokenizer.model": b"new"})
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == NEW | kept | {"tokenizer.model": b"new"}


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_overwrite_that_is_cut_short_leaves_the_old_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    destination = tmp_path / "model"
    destination.mkdir()
    write(destination, OLD)
    for move in range(1, MOVES + 1):
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", fail_from(move, every=False, error=error))
            with pytest.raises(error):
                overwrite(destination)
        assert contents(destination) == OLD
        assert [file.name for file in tmp_path.iterdir()] == ["model"]
        assert len(list(destination.iterdir())) == len(OLD)
    overwrite(destination)
    assert contents(destination) == AFTER


def test_killed_overwrite_leaves_no_model_and_loses_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a killed overwrite stops, nothing can be loaded and nothing is lost."""
    for move in range(2, MOVES + 1):
        destination = tmp_path / str(move)
        destination.mkdir()
        write(destination, OLD)
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", fail_from(move, every=True, error=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                overwrite(destination)
        assert not (destination / "config.json").exists()
        found = {Path(name).name: content for name, content in contents(destination).items() if content != b"new"}
        assert found == OLD


def test_a_new_directory_appears_with_all_its_files_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    destination = tmp_path / "deep" / "model"
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fail_from(1, every=False, error=OSError("the disk")))
        with pytest.raises(OSError, match="the disk"):
            overwrite(destination)
    assert not any((tmp_path / "deep").iterdir())
    overwrite(destination)
    assert contents(destination) == NEW
    plain = tmp_path / "plain"
    plain.mkdir()
    assert destination.stat().st_mode == plain.stat().st_mode


def test_weights_in_use_survive_an_overwrite(tmp_path: Path) -> None:
    """Weights in use survive an overwrite by this project's tools."""
    write_bin(tmp_path / "bin", torch.rand)
    convert_bin(tmp_path / "bin", tmp_path / "out", show_progress=False)
    config = ModelConfig.from_directory(tmp_path / "out")
    weights = load_weights(tmp_path / "out", config, dtype=torch.float32, device="cpu", show_progress=False)
    before = weights.embedding.clone()
    shutil.rmtree(tmp_path / "bin")
    write_bin(tmp_path / "bin", torch.zeros)
    convert_bin(tmp_path / "bin", tmp_path / "out", overwrite=True, show_progress=False)
    assert torch.equal(weights.embedding, before)
