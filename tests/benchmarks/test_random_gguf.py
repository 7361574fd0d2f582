"""Random GGUF files have the sizes and types of the models that they stand for, and an engine answers from them."""

from pathlib import Path

import pytest

pytest.importorskip("gguf", reason="the extra gguf is not installed")

from benchmarks import gguf_file, random_gguf
from benchmarks.random_gguf import DEVIATION, SHAPES, llama3, write_random
from d3engine import Engine, SamplingParams
from d3engine.errors import InvalidValueError
from d3engine.model.gguf_file import open_gguf

SMALL = llama3(256, 512, 8, 2, 1, factor=8.0, vocab_size=300)


def test_random_file_is_as_large_as_the_models() -> None:
    """Of the published files all but their headers: 4.92 and 0.81 GB."""
    sizes = {name: sum(tensor.nbytes for tensor in random_gguf._tensors(shape)) for name, shape in SHAPES.items()}
    assert sizes["llama-3.1-8b"] == pytest.approx(4.92e9, rel=0.01)
    assert sizes["llama-3.2-1b"] == pytest.approx(0.81e9, rel=0.02)


def test_random_matrices_have_the_types_of_q4_k_m(tmp_path: Path) -> None:
    write_random(SMALL, tmp_path / "model.gguf")
    tensors = open_gguf(tmp_path / "model.gguf").tensors
    more = {f"blk.{layer}.{name}.weight" for layer in (0, 3, 6, 7) for name in ("attn_v", "ffn_down")}
    assert {name for name, tensor in tensors.items() if tensor.type_name == "Q6_K"} == more | {"output.weight"}
    assert {tensor.type_name for tensor in tensors.values()} == {"F32", "Q4_K", "Q6_K"}


@pytest.mark.parametrize(("name", "share"), [("attn_q", 1), ("attn_v", 1), ("ffn_down", 0.25)])
def test_random_weights_have_the_deviation_of_a_new_model(name: str, share: float, tmp_path: Path) -> None:
    write_random(SMALL, tmp_path / "model.gguf")
    file = open_gguf(tmp_path / "model.gguf")
    for layer in (0, 1):  # of both types
        weights = file.read(f"blk.{layer}.{name}.weight")
        assert float(weights.std()) == pytest.approx(DEVIATION * share, rel=0.1)
        assert abs(float(weights.mean())) < DEVIATION * share * 0.1


def test_engine_answers_from_a_random_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "llama-3.2-1b", SMALL)
    path = tmp_path / "model.gguf"
    assert gguf_file.main(["--random", "llama-3.2-1b", "--model", str(path)]) == 0
    with Engine(path, max_model_len=64) as engine:
        (output,) = engine.generate(["a b"], SamplingParams(temperature=0, max_tokens=5), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 5


def test_disk_without_room_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_gguf, "free_bytes", lambda place: 1_000_000)
    with pytest.raises(InvalidValueError, match=r"--model must be a file on a disk with 5.0 GB free"):
        write_random(SHAPES["llama-3.1-8b"], tmp_path / "model.gguf")
    assert not list(tmp_path.iterdir())
