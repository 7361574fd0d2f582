"""Engines on Triton's kernels over matrices in blocks: token for token what plain PyTorch makes of their floats."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import assert_same
from fixture_types import MakeLlama
from integer_checkpoints import PUBLISHED, publish
from tiny_models import random_prompts

from d3engine import D3, Engine, RequestOutput, SamplingParams
from d3engine.engine import resolve
from d3engine.kernels.blocks import StackedWeight
from d3engine.kernels.matrices import tensors_of
from d3engine.kernels.split_blocks import SPLIT_TYPES, SplitBlockWeight
from d3engine.kernels.triton import products
from d3engine.model.source import open_checkpoint

PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=1, detokenize=False)
OPTIONS: dict[str, Any] = {"block_size": 16, "kv_cache_memory_bytes": 2**22, "skip_tokenizer_init": True}
# Embedding, queries, keys, values, output, gates, up, down and head, as llama.cpp writes Q4_K_M.
Q4_K_M = ("Q4_K", "Q4_K", "Q4_K", "Q6_K", "Q4_K", "Q4_K", "Q4_K", "Q6_K", "Q6_K")
SMALL_BLOCKS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q8_0", "Q4_0")


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles as for a device of two processors: the same paths, less waiting."""
    monkeypatch.setattr(products, "MIN_PROGRAMS", 2)


@pytest.fixture
def gguf_file(tmp_path: Path) -> Callable[..., Path]:
    """`gguf_file(types, **sizes)`: a file of one layer whose matrices have these types in turn."""
    gguf_files = pytest.importorskip("gguf_files", reason="the extra gguf is not installed")

    def write(types: tuple[str, ...], **sizes: Any) -> Path:
        keys = gguf_files.bpe_keys()
        file: Path = gguf_files.write_gguf(tmp_path / "model.gguf", tokenizer=keys, types=types, layers=1, **sizes)
        return file

    return write


def answers(model: Path, backend: str, graphs: bool, **options: Any) -> tuple[Any, list[RequestOutput]]:
    device = "cuda" if torch.cuda.is_available() and backend == "triton" else "cpu"
    prompts = random_prompts([3, 18], vocab_size=40)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resolve, "executor_for", lambda *given: "graphs" if graphs else "eager")
        given = OPTIONS | {"device": device, "dtype": "float32", "backend": backend} | options
        with Engine(model, depth=D3(0.8, 0.3), **given) as engine:
            return engine.executor.model.weights, engine.generate(prompts, PARAMS, use_tqdm=False)


def assert_as_on_torch(model: Path, *, graphs: bool = False) -> Any:
    """Both backends answer alike; returns the weights of Triton's."""
    weights, found = answers(model, "triton", graphs)
    _, wanted = answers(model, "torch", False)
    for one, other in zip(found, wanted, strict=True):
        assert_same(one, other)
    return weights


@pytest.mark.parametrize("graphs", [False, True])
def test_q4_k_m_answers_as_on_plain_torch(gguf_file: Callable[..., Path], graphs: bool) -> None:
    """A file of Q4_K and Q6_K stays as large as it is, the table of embeddings too."""
    file = gguf_file(Q4_K_M)
    weights = assert_as_on_torch(file, graphs=graphs)
    (layer,) = weights.layers
    assert isinstance(layer.qkv, StackedWeight)
    assert [part.type_name for part in layer.qkv.parts if isinstance(part, SplitBlockWeight)] == ["Q4_K", "Q6_K"]
    matrices = [layer.qkv, layer.output, layer.gate_up, layer.down, weights.embedding, weights.lm_head]
    with open_checkpoint(file) as checkpoint:
        stored = sum(entry.nbytes for entry in checkpoint.entries.values() if entry.type_name in SPLIT_TYPES)
    # A row of one block of Q6_K has half a word more: those of the values and of the head.
    more = sum(tensor.nbytes for matrix in matrices for tensor in tensors_of(matrix)) - stored
    assert more == 2 * (64 + 420)


def test_small_blocks_answer_as_on_plain_torch(gguf_file: Callable[..., Path]) -> None:
    """Rows of one block and a half, of each type of 32 columns, and a head that is the embedding."""
    sizes = {"hidden": 96, "intermediate": 160, "heads": 3, "kv_heads": 1, "head_dim": 32}
    weights = assert_as_on_torch(gguf_file(SMALL_BLOCKS, tied=True, **sizes))
    assert weights.lm_head is weights.embedding
    assert isinstance(weights.lm_head, SplitBlockWeight)


def test_types_that_kernels_do_not_read_become_floats(gguf_file: Callable[..., Path]) -> None:
    """Beside matrices that stay in blocks; and the file's other types are counted as floats."""
    file = gguf_file(("Q4_K", "Q4_K", "Q3_K", "Q3_K", "Q2_K", "Q5_K", "Q5_K", "IQ4_XS", "Q5_K"))
    weights = assert_as_on_torch(file)
    (layer,) = weights.layers
    assert [type(part) for part in layer.qkv.parts] == [SplitBlockWeight, torch.Tensor]
    assert isinstance(layer.gate_up, SplitBlockWeight)
    assert isinstance(layer.down, torch.Tensor)


@pytest.mark.parametrize("name", ["AWQ, 128", "AWQ, 32", "GPTQ in 8 bits", "W4A16 with ends in 8 bits"])
def test_groups_of_integers_answer_as_on_plain_torch(tiny_llama: MakeLlama, tmp_path: Path, name: str) -> None:
    """Matrices with zero points stay packed, and so do an embedding and a head in other groups."""
    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 8, "head_dim": 32}
    source = tiny_llama(**sizes, num_hidden_layers=1, vocab_size=64).directory
    publish(source, tmp_path / "published", PUBLISHED[name])
    weights = assert_as_on_torch(tmp_path / "published")
    (layer,) = weights.layers
    assert all(isinstance(one, SplitBlockWeight) for one in (layer.qkv, layer.output, layer.gate_up, layer.down))
    assert isinstance(weights.embedding, SplitBlockWeight) == ("ends" in name)


def test_named_weight_dtype_makes_floats(gguf_file: Callable[..., Path]) -> None:
    """With `weight_dtype` matrices are floats; with `dtype` alone they stay, for it is that of activations."""
    file = gguf_file(("Q8_0",), hidden=32, intermediate=32, heads=2, kv_heads=1, head_dim=16)
    options: dict[str, Any] = {"backend": "triton", "graphs": False}
    assert isinstance(answers(file, **options)[0].layers[0].down, SplitBlockWeight)
    assert isinstance(answers(file, **options, weight_dtype="float32")[0].layers[0].down, torch.Tensor)
