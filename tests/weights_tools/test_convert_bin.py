"""Pickled checkpoints keep their model; damaged or dangerous ones are refused unrun."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conversion import assert_refuses, logits, make_model, run, save_bin
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from d3engine.model.config import ModelConfig
from d3engine.model.weights import load_weights
from d3engine.weights_tools.convert import convert_bin


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("tied", [True, False])
def test_pickled_checkpoints_keep_their_model(tmp_path: Path, parts: int, tied: bool) -> None:
    model = make_model(tie_word_embeddings=tied)
    save_bin(tmp_path / "bin", model, parts)
    convert_bin(tmp_path / "bin", tmp_path / "out", show_progress=False)
    assert torch.equal(logits(LlamaForCausalLM.from_pretrained(tmp_path / "out").eval()), logits(model))
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer_config.json",
    ]
    assert ("lm_head.weight" in load_file(tmp_path / "out" / "model.safetensors")) != tied


def test_a_large_checkpoint_is_cut_into_shards_with_an_index(tmp_path: Path) -> None:
    model = make_model()
    save_bin(tmp_path / "bin", model)
    convert_bin(tmp_path / "bin", tmp_path / "out", shard_bytes=6000, show_progress=False)
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(shards) > 3
    assert shards[0].name == f"model-00001-of-{len(shards):05d}.safetensors"
    assert all(sum(tensor.nbytes for tensor in load_file(shard).values()) <= 6000 for shard in shards)
    assert torch.equal(logits(LlamaForCausalLM.from_pretrained(tmp_path / "out").eval()), logits(model))
    config = ModelConfig.from_directory(tmp_path / "out")
    weights = load_weights(tmp_path / "out", config, dtype=torch.float32, device="cpu", show_progress=False)
    assert weights.nbytes == sum(parameter.nbytes for parameter in model.parameters())


def test_a_checkpoint_older_than_torch_1_6_is_read(tmp_path: Path) -> None:
    save_bin(tmp_path / "bin", make_model(), _use_new_zipfile_serialization=False)
    convert_bin(tmp_path / "bin", tmp_path / "out", show_progress=False)
    assert run("verify", tmp_path / "out").exit_code == 0


class Exploit:
    """Runs code when unpickled carelessly."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.target,)


def test_a_pickle_that_runs_code_is_refused_unrun(tmp_path: Path) -> None:
    save_bin(tmp_path / "bin", make_model())
    torch.save({"weight": Exploit(tmp_path / "pwned")}, tmp_path / "bin" / "pytorch_model.bin")
    said = r"pytorch_model\.bin cannot be read as a torch checkpoint: it holds [\w.]+, and not tensors alone$"
    assert_refuses(said, convert_bin, tmp_path / "bin", tmp_path / "out")
    assert not (tmp_path / "pwned").exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([torch.ones(1)], "must hold a dict of tensors, not a list"),
        ({"step": 3}, "'step' is a int, not a tensor"),
        ({3: torch.ones(1)}, "3 is a Tensor, not a tensor"),
        ({"model.norm.weight": torch.ones(32)}, "tensor 'model.embed_tokens.weight' is missing in"),
    ],
)
def test_a_pickle_of_something_else_is_refused(tmp_path: Path, content: Any, message: str) -> None:
    save_bin(tmp_path / "bin", make_model())
    torch.save(content, tmp_path / "bin" / "pytorch_model.bin")
    assert_refuses(message, convert_bin, tmp_path / "bin", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_wrong_tensors_are_refused_before_writing(tmp_path: Path) -> None:
    model = make_model(tie_word_embeddings=True)
    save_bin(tmp_path / "bin", model)
    file = tmp_path / "bin" / "pytorch_model.bin"
    state = dict(model.state_dict())
    for changes, message in (
        ({"extra": torch.ones(1)}, r"pytorch_model\.bin: tensor 'extra' is unexpected"),
        ({"model.norm.weight": torch.ones(31)}, r"'model\.norm\.weight' has shape \[31\]"),
        ({"model.norm.weight": torch.ones(32).int()}, r"'model\.norm\.weight' has dtype torch\.int32"),
        ({"lm_head.weight": torch.ones(40, 32)}, r"'lm_head\.weight' differs from 'model\.embed_tokens\.weight'"),
    ):
        torch.save(state | changes, file)
        assert_refuses(message, convert_bin, tmp_path / "bin", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin"]


def test_a_broken_set_of_pickled_shards_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "bin"
    save_bin(source, make_model(), parts=2)
    first, second = sorted(source.glob("*.bin"))
    index = source / "pytorch_model.bin.index.json"
    original = index.read_text()

    index.write_text(original.replace(second.name, "../other.bin"))
    assert_refuses(r"a shard must be a plain .*; got '\.\./other\.bin'", convert_bin, source, tmp_path / "out")
    index.write_text('{"weight_map": {}}')
    assert_refuses("weight_map must be an object", convert_bin, source, tmp_path / "out")
    index.write_text(original)
    content = second.read_bytes()
    second.unlink()
    assert_refuses(f"{second.name} is missing", convert_bin, source, tmp_path / "out")
    second.write_bytes(content[: len(content) // 2])
    assert_refuses(f"{second.name} cannot be read as a torch checkpoint", convert_bin, source, tmp_path / "out")
    second.write_bytes(first.read_bytes())
    assert_refuses(f"is in both .*{first.name} and .*{second.name}", convert_bin, source, tmp_path / "out")
    for file in (first, second, index):
        file.unlink()
    assert_refuses(r"has no pytorch_model\*\.bin", convert_bin, source, tmp_path / "out")
