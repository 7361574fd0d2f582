"""What `benchmarks.weight_forms` compares: copies of a GGUF file that are the same model, and their bits."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gguf", reason="the extra gguf is not installed")

import gguf
from gguf_files import bpe_keys, write_gguf

from benchmarks import gguf_writing
from benchmarks import weight_forms as benchmark
from d3engine import Engine, SamplingParams
from d3engine.weights_tools.quantize import quantize_model


@pytest.fixture
def original(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "original.gguf", tokenizer=bpe_keys(), types=("Q8_0",))


def tensors(file: Path) -> dict[str, np.ndarray]:
    return {one.name: gguf_writing.floats_of(one) for one in gguf.GGUFReader(file).tensors}


def test_shuffled_channels_answer_as_before(original: Path, tmp_path: Path) -> None:
    """A model with shuffled channels gives the same logits, up to the order of sums, from other rows."""
    gguf_writing.shuffled(original, tmp_path / "shuffled.gguf")
    found = []
    for file in (original, tmp_path / "shuffled.gguf"):
        with Engine(file, device="cpu", max_model_len=64, dtype="float32", activations="float32") as engine:
            params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=4, detokenize=False)
            (output,) = engine.generate([{"prompt_token_ids": [1, 5, 9, 2]}], params, use_tqdm=False)
            found.append(output.outputs[0])
    assert found[0].token_ids == found[1].token_ids
    for one, other in zip(found[0].logprobs, found[1].logprobs, strict=True):
        assert {token: value.logprob for token, value in one.items()} == pytest.approx(
            {token: value.logprob for token, value in other.items()}, abs=1e-3
        )
    before, after = tensors(original), tensors(tmp_path / "shuffled.gguf")
    for name in ("blk.0.ffn_down.weight", "blk.0.attn_q.weight", "blk.0.attn_output.weight"):
        assert not np.array_equal(before[name], after[name])
        assert np.array_equal(np.sort(before[name], axis=None), np.sort(after[name], axis=None))


def test_shuffled_unknown_tensor_is_refused(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that a Llama does not have is an error, for its channels would stay where they were."""
    monkeypatch.setattr(gguf_writing, "_NORMS", ())
    with pytest.raises(ValueError, match=r"tensor 'output_norm\.weight' has no place|has no place in a Llama"):
        gguf_writing.shuffled(original, tmp_path / "shuffled.gguf")


def test_bits_count_scales_of_groups(original: Path, tmp_path: Path) -> None:
    """Q4_0 has 4.5 bits a weight and int8 8 bits and a float32 scale a row, norms apart."""
    gguf_writing.shuffled(original, tmp_path / "floats.gguf")
    gguf_writing.in_q4_0(tmp_path / "floats.gguf", tmp_path / "q4_0.gguf")
    quantize_model(tmp_path / "floats.gguf", tmp_path / "int8", "int8", show_progress=False)
    q4_0, whole = benchmark.bits_per_weight(tmp_path / "q4_0.gguf", tmp_path / "floats.gguf")
    int8, _ = benchmark.bits_per_weight(tmp_path / "int8", tmp_path / "floats.gguf")
    assert 4.5 < q4_0 < whole < int8
    assert 8 < int8 < 10
