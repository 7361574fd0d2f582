"""What each rank of a model has: its own rows and columns of every tensor, and all of them are somebody's."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from fixture_types import MakeLlama
from gguf_files import SMALL, write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized_weights import dense
from tiny_models import save_random
from torch import Tensor
from transformers import Phi3Config, Phi3ForCausalLM

from d3engine.errors import InvalidValueError
from d3engine.kernels.reference import gumbel
from d3engine.model.config import ModelConfig
from d3engine.model.shard import ModelShard, shard_of, split_evenly
from d3engine.model.weights import LayerWeights, LlamaWeights, load_weights
from d3engine.weights_tools.quantize import quantize_model

WIDE = {"hidden_size": 64, "head_dim": 64, "intermediate_size": 400, "num_hidden_layers": 2}
BIASED = {"attention_bias": True, "mlp_bias": True, "num_attention_heads": 6, "num_key_value_heads": 3}


def weights_of(directory: Path, part: ModelShard | None = None) -> LlamaWeights:
    config = ModelConfig.from_directory(directory)
    return load_weights(directory, config, dtype=torch.float32, device="cpu", show_progress=False, part=part)


def rows_of_heads(config: ModelConfig, part: ModelShard) -> Tensor:
    """Rows of the whole `qkv` that a rank has."""
    width = config.head_dim
    ends = [(part.heads, 0), (part.kv_heads, config.q_size), (part.kv_heads, config.q_size + config.kv_size)]
    return torch.cat([torch.arange(first + heads.start * width, first + heads.stop * width) for heads, first in ends])


def assert_is_part(own: LayerWeights, whole: LayerWeights, config: ModelConfig, part: ModelShard) -> None:
    rows, width = rows_of_heads(config, part), config.head_dim
    channels = torch.tensor(part.channels)
    halves = torch.cat((channels, config.intermediate_size + channels))
    queries = slice(part.heads.start * width, part.heads.stop * width)
    assert torch.equal(dense(own.qkv), dense(whole.qkv)[rows])
    assert torch.equal(dense(own.gate_up), dense(whole.gate_up)[halves])
    assert torch.equal(dense(own.output), dense(whole.output)[:, queries])
    assert torch.equal(dense(own.down), dense(whole.down)[:, channels])
    for bias, all_of_it, taken in (
        (own.qkv_bias, whole.qkv_bias, rows),
        (own.gate_up_bias, whole.gate_up_bias, halves),
    ):
        assert all_of_it is None or torch.equal(bias, all_of_it[taken])
    for bias, all_of_it in ((own.output_bias, whole.output_bias), (own.down_bias, whole.down_bias)):
        assert all_of_it is None or torch.equal(bias, all_of_it if part.rank == 0 else torch.zeros_like(all_of_it))


def assert_parts(directory: Path, size: int) -> None:
    config, whole = ModelConfig.from_directory(directory), weights_of(directory)
    for rank in range(size):
        part = shard_of(config, rank, size)
        own = weights_of(directory, part)
        tokens = slice(part.tokens.start, part.tokens.stop)
        assert torch.equal(dense(own.embedding), dense(whole.embedding)[tokens])
        assert torch.equal(dense(own.lm_head), dense(whole.lm_head)[tokens])
        assert (own.lm_head is own.embedding) == config.tie_word_embeddings
        assert torch.equal(own.final_norm, whole.final_norm)
        for layer, all_of_it in zip(own.layers, whole.layers, strict=True):
            assert_is_part(layer, all_of_it, config, part)


@pytest.mark.parametrize("layout", [{}, BIASED, {"tie_word_embeddings": True, "num_key_value_heads": 1}])
def test_rank_loads_its_rows_columns_and_biases_once(layout: dict[str, Any], tiny_llama: MakeLlama) -> None:
    """A rank loads its own rows and columns and the biases that are added once."""
    for size in (2, 3):
        assert_parts(tiny_llama(**layout).directory, size)


@pytest.mark.parametrize(("scheme", "is_tied"), [("int8", False), ("fp8", False), ("int4", False), ("int4", True)])
def test_a_rank_loads_its_part_of_quantized_matrices_as_they_are(
    scheme: str, is_tied: bool, tiny_llama: MakeLlama, tmp_path: Path
) -> None:
    quantize_model(tiny_llama(**WIDE, tie_word_embeddings=is_tied).directory, tmp_path / scheme, scheme)
    assert_parts(tmp_path / scheme, 2)


def test_rank_loads_its_part_of_fused_projections(tmp_path: Path) -> None:
    """A rank loads its part of projections that are one tensor in the file."""
    sizes = {"vocab_size": 99, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "pad_token_id": 0}
    model = Phi3ForCausalLM(Phi3Config(**sizes, num_attention_heads=4, num_key_value_heads=2))
    save_random(tmp_path, model)
    assert_parts(tmp_path, 2)


def test_rank_loads_its_part_of_a_gguf_file_in_order(tmp_path: Path) -> None:
    """A rank loads its part of a GGUF file with its heads in the engine's order."""
    sizes = SMALL | {"heads": 4, "kv_heads": 2, "head_dim": 8, "types": ("Q8_0", "F16")}
    assert_parts(write_gguf(tmp_path / "model.gguf", **sizes), 2)


def test_norms_over_all_heads_cannot_be_parted() -> None:
    sizes = {"vocab_size": 99, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2}
    config = ModelConfig.from_dict({"model_type": "olmo2", "num_attention_heads": 4} | sizes)
    assert len(shard_of(config, 0, 1).heads) == 4
    with pytest.raises(InvalidValueError, match=r"tensor_parallel_size must be 1 for a model whose norms .*; got 2"):
        shard_of(config, 0, 2)


def test_int4_is_parted_between_its_groups_alone(tiny_llama: MakeLlama, tmp_path: Path) -> None:
    quantize_model(tiny_llama().directory, tmp_path / "int4", "int4")  # heads and MLP of fewer channels than a group
    config = ModelConfig.from_directory(tmp_path / "int4")
    with pytest.raises(InvalidValueError, match="int4 parts them at multiples of 128 channels"):
        shard_of(config, 0, 2)


@given(total=st.integers(1, 200), count=st.integers(1, 9), unit=st.integers(1, 7))
def test_shares_are_whole_in_order_and_even(total: int, count: int, unit: int) -> None:
    """Shares are all of it in order and as even as units allow."""
    found = split_evenly(total, count, unit)
    assert len(found) == count
    assert [found[0].start, *(one.stop for one in found)] == [one.start for one in found] + [total]
    sizes = [-(-len(one) // unit) for one in found]
    assert max(sizes) - min(sizes) <= 1
    assert all(one.start % unit == 0 for one in found if len(one))
    assert all(one.stop == other.start for one, other in pairwise(found))


@settings(max_examples=60, deadline=None)
@given(kv_heads=st.integers(1, 6), group=st.integers(1, 4), size=st.integers(1, 9))
def test_heads_are_beside_their_key_head_or_refused(kv_heads: int, group: int, size: int) -> None:
    """Every head is on one rank with its key head, or the number of ranks is refused."""
    config = ModelConfig.from_dict(
        {"model_type": "llama", "vocab_size": 64, "hidden_size": 8, "intermediate_size": 32, "num_hidden_layers": 1}
        | {"head_dim": 2, "num_attention_heads": kv_heads * group, "num_key_value_heads": kv_heads}
    )
    if -(-size // kv_heads) > group:
        with pytest.raises(InvalidValueError, match="each rank has a head of its own"):
            shard_of(config, 0, size)
        return
    parts = [shard_of(config, rank, size) for rank in range(size)]
    assert [head for part in parts for head in part.heads] == list(range(kv_heads * group))
    for part in parts:
        assert {head // group for head in part.heads} == set(part.kv_heads)
        assert len(part.heads) % len(part.kv_heads) == 0
        assert len(part.kv_heads) == 1 or len(part.heads) == group * len(part.kv_heads)


@pytest.mark.parametrize("first", [0, 3, 4, 50])
def test_the_noise_of_some_tokens_is_that_of_all_at_their_places(first: int) -> None:
    given = [torch.tensor([5, 2**40]), torch.tensor([0, 3]), torch.tensor([7, 7])]
    assert torch.equal(gumbel(*given, 21, first), gumbel(*given, 21 + first)[:, first:])
