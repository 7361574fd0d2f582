"""What is wrong with a directory is named before it is loaded."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from saved_llama import DOWN, EMBEDDING, QUERY, change, change_json, load, put, save_model
from torch import Tensor

from d3engine.errors import ModelFormatError

NORM = "model.layers.2.input_layernorm.weight"


WRONG_TENSORS: list[tuple[Callable[[dict[str, Tensor]], Any], str]] = [
    (put(DOWN, None), f"tensor '{DOWN}' is missing in .*model.safetensors"),
    (put("lm_head.weight", None), "'lm_head.weight' is missing in .*tie_word_embeddings is false"),
    (put(NORM, torch.ones(24)), f"model.safetensors: tensor '{NORM}' is unexpected"),
    (put(DOWN, torch.ones(20, 24)), rf"safetensors: tensor '{DOWN}' has shape \[20, 24\]; .* asks for \[24, 20\]"),
    (put(QUERY, torch.ones(40 * 24)), rf"'{QUERY}' has shape \[960\]"),
    (put(DOWN, torch.ones(24, 20, dtype=torch.int8)), f"'{DOWN}' has dtype I8: allowed are F64, F32, F16, BF16"),
    (lambda tensors: tensors[DOWN][3, 4].fill_(torch.nan), f"model.safetensors: tensor '{DOWN}' holds NaN or infinity"),
    (lambda tensors: tensors[QUERY][3, 4].fill_(-torch.inf), f"tensor '{QUERY}' holds NaN or infinity"),
]


@pytest.mark.parametrize(("edit", "message"), WRONG_TENSORS)
def test_wrong_tensor_is_named_by_file(tmp_path: Path, edit: Callable[[dict[str, Tensor]], Any], message: str) -> None:
    save_model(tmp_path)
    change(tmp_path, edit)
    with pytest.raises(ModelFormatError, match=message):
        load(tmp_path)


def test_values_too_large_for_the_dtype_are_an_error(tmp_path: Path) -> None:
    """Values too large for the dtype are an error and not infinity."""
    save_model(tmp_path)
    change(tmp_path, lambda tensors: tensors[DOWN][0, 0].fill_(1e6))
    assert load(tmp_path, torch.bfloat16).layers[1].down[0, 0] == torch.tensor(1e6, dtype=torch.bfloat16)
    with pytest.raises(ModelFormatError, match=rf"'{DOWN}' has values too large for torch\.float16"):
        load(tmp_path, torch.float16)


def test_shapes_are_checked_before_anything_is_allocated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path)
    change_json(tmp_path / "config.json", lambda config: config.update(vocab_size=2**31 - 1))

    def refuse(*_: Any, **__: Any) -> Tensor:
        raise AssertionError("allocated before the shapes were checked")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(ModelFormatError, match=rf"{EMBEDDING}' has shape \[37, 24\]; .* \[2147483647, 24\]"):
        load(tmp_path)


def header(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def floats(shape: list[int], offsets: list[int]) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": offsets}


def described(num_bytes: int, **tensors: dict[str, Any]) -> bytes:
    """A file whose header describes these tensors, and has that many bytes behind it."""
    return header(json.dumps(tensors).encode()) + bytes(num_bytes)


CORRUPT = {
    "empty": b"",
    "cut header": b"\x01\x02",
    "header longer than any file": struct.pack("<Q", 2**62),
    "oversized header": struct.pack("<Q", 100 * 2**20 + 1) + b"{}",
    "header not JSON": header(b"not json"),
    "truncated": described(8, a=floats([4], [0, 16])),
    "shape does not fit": described(16, a=floats([9], [0, 16])),
    "overlapping": described(24, a=floats([4], [0, 16]), b=floats([4], [8, 24])),
    "overflowing shape": described(0, a=floats([2**32, 2**32], [0, 0])),
    "more bytes than tensors": described(16, a=floats([2], [0, 8])),
}


@pytest.mark.parametrize("damage", CORRUPT)
def test_a_corrupt_file_is_an_error_that_names_it(tmp_path: Path, damage: str) -> None:
    save_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(CORRUPT[damage])
    with pytest.raises(ModelFormatError, match=r"model\.safetensors is not a valid safetensors file"):
        load(tmp_path)


def test_a_directory_in_the_place_of_a_file_is_an_error(tmp_path: Path) -> None:
    save_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(ModelFormatError, match=r"model\.safetensors is not a regular file"):
        load(tmp_path)


ELSEWHERE = [f"{name}.safetensors" for name in ("../model", "/etc/model", "a/b", "..\\b", "C:b", "a\0")]


@pytest.mark.parametrize("shard", [*ELSEWHERE, "model.bin", "..", "", None, 7])
def test_a_shard_name_must_be_a_plain_name(tmp_path: Path, shard: Any) -> None:
    save_model(tmp_path, "4KB")
    change_json(tmp_path / "model.safetensors.index.json", lambda index: index["weight_map"].update({DOWN: shard}))
    with pytest.raises(ModelFormatError, match=f"tensor '{DOWN}' is in .*: a shard must be a plain .safetensors"):
        load(tmp_path)


def test_shards_may_be_links_as_in_a_hub_cache(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    save_model(blobs, "4KB")
    snapshot.mkdir()
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(file)
    assert load(snapshot).nbytes == load(blobs).nbytes


@pytest.mark.parametrize("weight_map", [None, {}, [], "model.safetensors"])
def test_an_index_without_a_weight_map_is_an_error(tmp_path: Path, weight_map: Any) -> None:
    save_model(tmp_path, "4KB")
    change_json(tmp_path / "model.safetensors.index.json", lambda index: index.update(weight_map=weight_map))
    with pytest.raises(ModelFormatError, match=r"index\.json: weight_map must be an object"):
        load(tmp_path)


def test_index_and_shards_must_agree(tmp_path: Path) -> None:
    save_model(tmp_path, "4KB")
    index = tmp_path / "model.safetensors.index.json"
    original = index.read_text()
    weight_map = json.loads(original)["weight_map"]
    elsewhere = next(shard for shard in weight_map.values() if shard != weight_map[DOWN])

    change_json(index, lambda contents: contents["weight_map"].update({DOWN: elsewhere}))
    with pytest.raises(ModelFormatError, match=f"'{DOWN}' is in '{weight_map[DOWN]}'; the index says '{elsewhere}'"):
        load(tmp_path)

    index.write_text(original)
    change_json(index, lambda contents: contents["weight_map"].pop(DOWN))
    with pytest.raises(ModelFormatError, match=rf"{weight_map[DOWN]}: tensor '{DOWN}' is not in .*index\.json"):
        load(tmp_path)

    index.write_text(original)
    change_json(index, lambda contents: contents["weight_map"].update({"ghost": elsewhere}))
    with pytest.raises(ModelFormatError, match="tensor 'ghost' is not in any shard; the index says"):
        load(tmp_path)

    index.write_text(original)
    (tmp_path / weight_map[DOWN]).unlink()
    with pytest.raises(ModelFormatError, match=f"{weight_map[DOWN]} is missing"):
        load(tmp_path)


def test_a_tensor_in_two_shards_is_an_error(tmp_path: Path) -> None:
    save_model(tmp_path, "4KB")
    weight_map = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    other = next(shard for shard in weight_map.values() if shard != weight_map[DOWN])
    save_file(load_file(tmp_path / other) | {DOWN: torch.ones(24, 20)}, tmp_path / other)
    with pytest.raises(ModelFormatError, match=f"tensor '{DOWN}' is in both .*{min(other, weight_map[DOWN])} and"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("pytorch_model.bin", "pickled weights are never loaded; convert them: d3engine weights convert bin .* DST"),
        ("model.pth", "d3engine weights convert bin"),
        ("consolidated.00.pth", "d3engine weights convert meta .* DST"),
        ("notes.txt", r"has neither model\.safetensors nor model\.safetensors\.index\.json$"),
    ],
)
def test_a_directory_without_safetensors_names_the_converter(tmp_path: Path, file: str, message: str) -> None:
    save_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / file).write_bytes(b"")
    with pytest.raises(ModelFormatError, match=message):
        load(tmp_path)


@pytest.mark.parametrize("lacks", ["config.json", "model.safetensors"])
def test_adapter_in_place_of_a_model_names_its_base(tmp_path: Path, lacks: str) -> None:
    """A directory of PEFT's, with or without the base model's config.json, is said to be what it is."""
    save_model(tmp_path)
    (tmp_path / lacks).unlink()
    (tmp_path / "training_args.bin").write_bytes(b"")
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "ada/base"}')
    with pytest.raises(ModelFormatError, match=rf"{tmp_path}.*, but an adapter of 'ada/base' .*--lora-modules NAME="):
        load(tmp_path)
