"""A llama2.c file becomes the model it was made from; a wrong one is refused in one line."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conversion import STORIES, assert_refuses, logits, make_model, run, write_llama2c
from transformers import LlamaForCausalLM

from d3engine.errors import InvalidValueError
from d3engine.model.config import ModelConfig
from d3engine.weights_tools.convert import convert_llama2c


def test_stories260k_converted_generates_what_the_c_program_does(tmp_path: Path) -> None:
    if not STORIES.is_dir():
        pytest.skip("the stories260K checkpoint is not beside this repository")
    convert_llama2c(STORIES / "stories260K.bin", tmp_path / "model", show_progress=False)
    model = LlamaForCausalLM.from_pretrained(tmp_path / "model").eval()
    expected = [int(token) for token in (STORIES / "greedy_from_bos.txt").read_text().split()]
    assert len(expected) == 129
    ids = model.generate(torch.tensor([[1]]), do_sample=False, max_new_tokens=129)[0, 1:].tolist()
    assert ids == expected


@pytest.mark.parametrize("tied", [True, False])
def test_a_llama2c_file_becomes_the_model_it_was_made_from(tmp_path: Path, tied: bool) -> None:
    model = make_model(tie_word_embeddings=tied)
    write_llama2c(tmp_path / "model.bin", model)
    convert_llama2c(tmp_path / "model.bin", tmp_path / "out", show_progress=False)
    back = LlamaForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert back.config.tie_word_embeddings == tied
    assert torch.equal(logits(back), logits(model))
    config = ModelConfig.from_directory(tmp_path / "out")
    assert (config.max_position_embeddings, config.rms_norm_eps, config.eos_token_ids) == (64, 1e-5, (1, 2))
    assert run("verify", tmp_path / "out").exit_code == 0


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"dim": 0x616B3432}, r"version 1 or 2 \('ak42'\): only version 0 is read"),
        ({"dim": -32}, "dim must be at least 1, .*; got -32"),
        ({"n_layers": 0}, "n_layers must be .*; got 0"),
        ({"seq_len": -1}, "seq_len must be .*; got -1"),
        ({"vocab_size": 0}, "vocab_size must be .*; got 0"),
        ({"n_heads": 5}, "dim=32, n_heads=5, n_kv_heads=2: each must be a multiple of the next"),
        ({"n_kv_heads": 3}, "n_heads=4, n_kv_heads=3: each must be a multiple"),
        ({"n_layers": 2**31 - 1}, "bytes; its header asks for"),
    ],
)
def test_a_wrong_llama2c_header_is_refused(tmp_path: Path, header: dict[str, int], message: str) -> None:
    write_llama2c(tmp_path / "model.bin", make_model(tie_word_embeddings=True), header=header)
    assert_refuses(message, convert_llama2c, tmp_path / "model.bin", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda content: content[:-4], "bytes; its header asks for"),
        (lambda content: content + bytes(4), "bytes; its header asks for"),
        (lambda content: content[:20], "has 20 bytes: too short for a llama2.c header"),
        (lambda content: b"", "has 0 bytes: too short"),
    ],
)
def test_llama2c_file_of_another_size_is_refused(tmp_path: Path, edit: Callable[[bytes], bytes], message: str) -> None:
    file = tmp_path / "model.bin"
    write_llama2c(file, make_model(tie_word_embeddings=True))
    file.write_bytes(edit(file.read_bytes()))
    assert_refuses(message, convert_llama2c, file, tmp_path / "out")


def test_a_missing_source_is_named(tmp_path: Path) -> None:
    assert_refuses("absent is missing", convert_llama2c, tmp_path / "absent", tmp_path / "out")


def test_a_tokenizer_must_be_readable_and_fit_the_embedding(tmp_path: Path) -> None:
    source = tmp_path / "model.bin"
    write_llama2c(source, make_model(tie_word_embeddings=True))
    small = {"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}}
    fits = tmp_path / "fits.json"
    fits.write_text(json.dumps(small))
    convert_llama2c(source, tmp_path / "out", tokenizer=fits, show_progress=False)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == fits.read_text()

    small["model"]["vocab"] = {str(number): number for number in range(41)}  # type: ignore[index]
    small["model"]["unk_token"] = "0"  # type: ignore[index]
    large = tmp_path / "large.json"
    large.write_text(json.dumps(small))
    for tokenizer, message in (
        (large, r"must be one with at most the model's 40 tokens \(it has 41\); got .*large.json'"),
        (source, "must be a tokenizer.json or a .model file; got .*model.bin'"),
        (tmp_path / "absent.json", "must be a tokenizer.json or .*; got .*absent.json'"),
    ):
        assert_refuses(message, convert_llama2c, source, tmp_path / "no", tokenizer=tokenizer, error=InvalidValueError)
    for name in ("broken.json", "broken.model"):
        (tmp_path / name).write_bytes(b"\x00 not a tokenizer")
        message = f"must be a readable tokenizer.json or .*; got .*{name}'"
        assert_refuses(
            message, convert_llama2c, source, tmp_path / "no", tokenizer=tmp_path / name, error=InvalidValueError
        )
    assert not (tmp_path / "no").exists()
