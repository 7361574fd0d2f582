"""Meta's checkpoints become the models they were made from; what is wrong with one is refused by name."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from configs import llama3_rope
from conversion import LLAMA2_TOKENIZER, assert_refuses, logits, make_model, save_meta
from transformers import AutoTokenizer, LlamaForCausalLM

from d3engine.errors import InvalidValueError
from d3engine.model.config import ModelConfig
from d3engine.text.tokenizer import load_tokenizer
from d3engine.weights_tools.convert import convert_meta


def test_a_sentencepiece_tokenizer_is_copied_with_a_config(tmp_path: Path) -> None:
    if not LLAMA2_TOKENIZER.is_file():
        pytest.skip("the sentencepiece model is not beside this repository")
    save_meta(tmp_path / "meta", make_model(vocab_size=32_000))
    (tmp_path / "meta" / "tokenizer.model").write_bytes(LLAMA2_TOKENIZER.read_bytes())
    assert convert_meta(tmp_path / "meta", tmp_path / "out", max_position_embeddings=64, show_progress=False) == []
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == LLAMA2_TOKENIZER.read_bytes()
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())["add_bos_token"] is True


@pytest.mark.parametrize(("shards", "embedding_dimension"), [(1, 1), (2, 1), (2, 0)])
def test_metas_checkpoint_becomes_the_model_it_came_from(tmp_path: Path, shards: int, embedding_dimension: int) -> None:
    model = make_model()
    save_meta(tmp_path / "meta", model, shards, embedding_dimension, multiple_of=8)
    notes = convert_meta(tmp_path / "meta", tmp_path / "out", max_position_embeddings=64, show_progress=False)
    assert [note.partition(" has no ")[2].partition(";")[0] for note in notes] == ["tokenizer.model"]
    back = LlamaForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(logits(back), logits(model))


def test_metas_scaled_rope_becomes_llama3_rope_by_its_factor(tmp_path: Path) -> None:
    """Meta's scaled RoPE becomes llama3 RoPE once its factor is given."""
    rope = llama3_rope(8192, factor=32.0, rope_theta=500_000.0)
    model = make_model(tie_word_embeddings=True, rope_parameters=rope, max_position_embeddings=131_072)
    save_meta(tmp_path / "meta", model, rope_theta=500_000.0, use_scaled_rope=True)
    given = r"rope_factor must be given, .*8 for Llama 3\.1"
    assert_refuses(given, convert_meta, tmp_path / "meta", tmp_path / "out", error=InvalidValueError)
    convert_meta(tmp_path / "meta", tmp_path / "out", rope_factor=32.0, show_progress=False)
    config = ModelConfig.from_directory(tmp_path / "out")
    assert config.max_position_embeddings == 131_072
    assert config.tie_word_embeddings  # its output.weight equals its embedding
    assert config.rope.factor == 32.0
    back = LlamaForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(logits(back), logits(model))


def test_metas_llama_3_has_a_context_of_8192(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 500_000.0}
    save_meta(tmp_path / "meta", make_model(rope_parameters=rope), rope_theta=500_000.0)
    convert_meta(tmp_path / "meta", tmp_path / "out", show_progress=False)
    assert ModelConfig.from_directory(tmp_path / "out").max_position_embeddings == 8192


def test_metas_llama_3_tokenizer_becomes_tokenizer_json(tmp_path: Path) -> None:
    """Meta's tokenizer of Llama 3 becomes a tokenizer.json that transformers reads."""
    ranks = b"".join(base64.b64encode(bytes([byte])) + b" %d\n" % byte for byte in range(256)) + b"aGE= 256\n"
    source = tmp_path / "meta"
    save_meta(source, make_model(vocab_size=513))
    (source / "tokenizer.model").write_bytes(ranks)
    notes = convert_meta(source, tmp_path / "out", max_position_embeddings=64, show_progress=False)
    assert notes == []
    assert not (tmp_path / "out" / "tokenizer.model").exists()
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "tokenizer.model").write_bytes(ranks)
    original, ours = load_tokenizer(tmp_path / "plain"), load_tokenizer(tmp_path / "out")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in ("haha<|eot_id|>é", ""):
        assert original.encode(text) == ours.encode(text) == theirs.encode(text)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id) == (257, 258)


def test_a_tokenizer_of_another_kind_is_left_out_with_a_note(tmp_path: Path) -> None:
    save_meta(tmp_path / "meta", make_model())
    (tmp_path / "meta" / "tokenizer.model").write_text("IQ== 0\nIg== 1\n")
    notes = convert_meta(tmp_path / "meta", tmp_path / "out", max_position_embeddings=64, show_progress=False)
    assert len(notes) == 1
    assert notes[0].startswith("left out: tokenizer must be ")
    assert not (tmp_path / "out" / "tokenizer.model").exists()


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"moe_args": {}}, r"params\.json: 'moe_args' is not supported; the known fields are"),
        ({"n_heads": 4.0}, r"params\.json: n_heads must be an integer above 0.*; got 4\.0"),
        ({"dim": -32}, r"params\.json: dim must be a number above 0.*; got -32"),
        ({"norm_eps": None}, r"params\.json: norm_eps must be .*; got None"),
        ({"n_layers": 3}, r"tensor 'model\.layers\.2\..*' is missing in .*consolidated\.00\.pth"),
        ({"n_heads": 5}, r"'layers\.0\.attention\.wq\.weight' has 32 rows for 5 heads"),
        ({"n_kv_heads": 1}, "n_kv_heads must be a multiple of the 2 shards.*; got 1"),
    ],
)
def test_wrong_params_are_refused(tmp_path: Path, params: dict[str, Any], message: str) -> None:
    save_meta(tmp_path / "meta", make_model(), 2, **params)
    assert_refuses(message, convert_meta, tmp_path / "meta", tmp_path / "out", max_position_embeddings=64)
    assert not (tmp_path / "out").exists()


def test_what_params_json_does_not_say_must_be_given(tmp_path: Path) -> None:
    save_meta(tmp_path / "meta", make_model())
    given = r"max_position_embeddings must be given, .*2048 for Llama 1, 4096"
    assert_refuses(given, convert_meta, tmp_path / "meta", tmp_path / "out", error=InvalidValueError)
    options = {"max_position_embeddings": 64, "rope_factor": 8.0}
    absent = r"rope_factor must be absent.*; got 8\.0"
    assert_refuses(absent, convert_meta, tmp_path / "meta", tmp_path / "out", error=InvalidValueError, **options)


def test_damaged_meta_shards_are_refused(tmp_path: Path) -> None:
    source = tmp_path / "meta"
    save_meta(source, make_model(), 2)
    second = source / "consolidated.01.pth"
    original = torch.load(second, weights_only=True)
    down = "layers.1.feed_forward.w2.weight"
    for changes, message in (
        ({down: original[down][:, 1:]}, f"tensor '{down}' differs in shape or dtype between shards"),
        ({down: original[down].half()}, f"tensor '{down}' differs in shape or dtype between shards"),
        ({"layers.1.vision.weight": torch.ones(1)}, r"tensor 'layers\.1\.vision\.weight' is unexpected"),
        ({"layers.x.attention.wq.weight": torch.ones(1)}, r"'layers\.x\.attention\.wq\.weight' is unexpected"),
    ):
        torch.save(original | changes, second)
        assert_refuses(message, convert_meta, source, tmp_path / "out", max_position_embeddings=64)
    torch.save({name: tensor for name, tensor in original.items() if name != down}, second)
    missing = rf"consolidated\.01\.pth: tensor '{down}' is missing"
    assert_refuses(missing, convert_meta, source, tmp_path / "out", max_position_embeddings=64)
    for file in source.glob("*.pth"):
        file.unlink()
    assert_refuses(r"has no consolidated\.\*\.pth", convert_meta, source, tmp_path / "out", max_position_embeddings=64)
