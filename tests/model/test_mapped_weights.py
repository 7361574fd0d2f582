"""Weights that are used as they are in their file stay in it, and no more than one tensor is ever in memory twice."""

import json
import struct
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import saved_llama
import torch
from configs import llama_config
from safetensors.torch import load_file, save_file
from saved_llama import assert_in_place
from torch import Tensor
from transformers import AutoModelForCausalLM
from watching import watch

from d3engine.errors import ModelFormatError
from d3engine.model.checkpoint import MappedFile, TensorEntry
from d3engine.model.config import ModelConfig
from d3engine.model.expected_tensors import expected_tensors
from d3engine.model.source import open_checkpoint

load = partial(saved_llama.load, dtype=torch.bfloat16)
SIZES = llama_config(2, vocab_size=40, torch_dtype="bfloat16")


def write_model(directory: Path, **changes: Any) -> dict[str, Tensor]:
    """A model with random bfloat16 weights; returns them by name."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(SIZES | changes))
    generator = torch.Generator().manual_seed(0)
    shapes = expected_tensors(ModelConfig.from_directory(directory))
    tensors = {
        name: torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.3, generator=generator)
        for name, shape in shapes.items()
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return tensors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_of_a_bfloat16_file_are_transformers(tmp_path: Path, dtype: torch.dtype) -> None:
    """Weights of a bfloat16 file are those of transformers to the bit."""
    write_model(tmp_path)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).state_dict()
    assert_in_place(load(tmp_path, dtype=dtype), expected)


def test_unchanged_tensors_lie_in_the_file_and_outlive_it(tmp_path: Path) -> None:
    """What needs no change lies in the file and outlives its name."""
    tensors = write_model(tmp_path)
    weights = load(tmp_path)
    assert len({id_of_storage(layer.down) for layer in weights.layers}) == 2
    file = tmp_path / "model.safetensors"
    before = file.read_bytes()
    weights.layers[0].down.zero_()  # a page of one's own, which the file never sees
    assert file.read_bytes() == before
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, tmp_path / "new")
    (tmp_path / "new").replace(file)
    assert torch.equal(weights.layers[1].down, tensors["model.layers.1.mlp.down_proj.weight"])
    assert torch.equal(weights.embedding, tensors["model.embed_tokens.weight"])


def id_of_storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_tensor_is_held_in_place_only_in_the_files_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor is held where it is only in the dtype of the file."""
    write_model(tmp_path, tie_word_embeddings=False)
    allocated = watch(monkeypatch, torch, "empty", lambda shape, **options: tuple(shape))
    load(tmp_path)
    assert set(allocated) == {(64, 32), (96, 32)}  # query, key and value; gate and up
    allocated.clear()
    load(tmp_path, dtype=torch.float32)
    assert {(40, 32), (32, 48), (32, 32), (32,)} <= set(allocated)


def test_pages_given_back_are_read_again_from_the_file(tmp_path: Path) -> None:
    tensors = write_model(tmp_path, hidden_size=128, num_attention_heads=8, intermediate_size=256)
    with open_checkpoint(tmp_path) as checkpoint:
        for name, expected in tensors.items():
            assert torch.equal(checkpoint.read(name), expected)
            checkpoint.give_back(name)
        for name, expected in tensors.items():
            assert torch.equal(checkpoint.read(name), expected)


def test_a_header_of_odd_length_shifts_no_value(tmp_path: Path) -> None:
    tensors = write_model(tmp_path)
    file = tmp_path / "model.safetensors"
    raw = file.read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    header = raw[8 : 8 + length] + b" " * (7 if length % 2 == 0 else 6)
    file.write_bytes(struct.pack("<Q", len(header)) + header + raw[8 + length :])
    weights = load(tmp_path)
    for tensor in (weights.embedding, weights.final_norm, *weights.layers[0].tensors()):
        assert tensor.data_ptr() % tensor.itemsize == 0
    assert torch.equal(weights.embedding, tensors["model.embed_tokens.weight"])
    assert torch.equal(weights.layers[1].down, tensors["model.layers.1.mlp.down_proj.weight"])
    assert all(torch.equal(load_file(file)[name], tensor) for name, tensor in tensors.items())


def test_file_becoming_shorter_before_it_is_mapped_is_named(tmp_path: Path) -> None:
    """A file that becomes shorter before it is mapped is named."""
    tensors = write_model(tmp_path)
    file = tmp_path / "model.safetensors"
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - 2)
    with file.open("rb") as opened:
        mapped = MappedFile(file, opened)
    last = max(tensors, key=lambda name: mapped._ranges[name])
    with pytest.raises(ModelFormatError, match=r"model\.safetensors: .* the file has become shorter"):
        mapped.tensor(TensorEntry(last, file, tuple(tensors[last].shape), "BF16"))


MEASURE = """
import sys, torch
from pathlib import Path
from d3engine.model.config import ModelConfig
from d3engine.model.weights import load_weights

def peak():  # not getrusage, whose peak a process inherits from the one that started it
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024

torch.set_num_threads(1)
config = ModelConfig.from_directory(sys.argv[1])
before = peak()
for dtype in (torch.bfloat16, torch.float32):
    weights = load_weights(sys.argv[1], config, dtype=dtype, device="cpu", show_progress=False)
    print(peak() - before, weights.nbytes)
    del weights
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process's own peak")
def test_loading_takes_the_weights_and_one_tensor(tmp_path: Path) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 8}
    tensors = write_model(tmp_path, **sizes, vocab_size=2048)
    in_file = sum(tensor.nbytes for tensor in tensors.values())
    largest = max(tensor.nbytes for tensor in tensors.values())
    noise = 20 * 2**20  # of the allocator and of torch's first operations
    assert in_file > 3 * (largest + noise)  # so that a second copy of the file would show
    done = subprocess.run([sys.executable, "-c", MEASURE, str(tmp_path)], capture_output=True, text=True, check=True)
    narrow, wide = (tuple(map(int, line.split())) for line in done.stdout.splitlines())
    assert (narrow[1], wide[1]) == (in_file, 2 * in_file)
    for peak, held in (narrow, wide):
        assert peak < held + largest + noise
