"""Rotations equal transformers' cosines and sines, for every rope type and where errors would show."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from configs import llama3_rope
from torch import Tensor
from transformers import GlmConfig, LlamaConfig, Phi3Config, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.glm.modeling_glm import GlmRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from d3engine.model.config import ModelConfig
from d3engine.model.llama import Rope, inverse_frequencies

LLAMA3 = llama3_rope(8192, rope_theta=500_000.0)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192, "rope_theta": 10_000.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.5, "rope_theta": 10_000.0}
# One thing at a time beside each type: partial keys, ints for floats, values that the code treats apart.
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10_000.0},
    "default, large theta": {"rope_type": "default", "rope_theta": 1_000_000},
    "linear": {"rope_type": "linear", "factor": 3, "rope_theta": 10_000.0},
    "dynamic": DYNAMIC,
    "llama3": LLAMA3,
    "llama3, factor 32": LLAMA3 | {"factor": 32.0},
    "llama3, without the original length": {
        key: value for key, value in LLAMA3.items() if key != "original_max_position_embeddings"
    },
    "yarn": YARN,
    "yarn, without the original length": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10_000.0},
    "yarn, attention_factor": YARN | {"attention_factor": 0.75},
    "yarn, mscale": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn, half an mscale": YARN | {"mscale": 0.7},
    "yarn, zero mscale": YARN | {"mscale": 0.0, "mscale_all_dim": 1.3},
    "yarn, betas": YARN | {"beta_fast": 16, "beta_slow": 2.5},
    "yarn, not truncated": YARN | {"truncate": False},
    "yarn, factor null": YARN | {"factor": None},
    "yarn, factor 1": YARN | {"factor": 1.0},
}
LONG = 20_000


def longrope(pairs: int, **changes: Any) -> dict[str, Any]:
    """One with factors that differ for each pair, and whose two lists do."""
    factors = {name: [1 + scale * pair for pair in range(pairs)] for name, scale in (("short", 0.01), ("long", 1.5))}
    rope = {f"{name}_factor": values for name, values in factors.items()}
    return {"rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 4096} | rope | changes


LONGROPES: dict[str, dict[str, Any]] = {
    "longrope": {},
    "longrope, factor": {"factor": 3.0},
    "longrope, factor 1": {"factor": 1.0},
    "longrope, attention_factor": {"attention_factor": 1.25},
}


def models(rope: dict[str, Any], head_dim: int = 64, max_positions: int = 32_768) -> tuple[ModelConfig, LlamaConfig]:
    sizes = {"hidden_size": 4 * head_dim, "num_attention_heads": 4, "head_dim": head_dim}
    oracle = LlamaConfig(**sizes, max_position_embeddings=max_positions, rope_parameters=dict(rope))
    # transformers adds keys to its own dict: the engine must read what the file says, as the file says it.
    return ModelConfig.from_dict(oracle.to_dict() | {"rope_parameters": dict(rope)}), oracle


def transformers_rotations(embedding: LlamaRotaryEmbedding, positions: Tensor) -> Tensor:
    cos, sin = embedding(torch.zeros(1), positions[None])
    half = cos.shape[-1] // 2
    return torch.complex(cos[0, :, :half], sin[0, :, :half])


def test_attn_factor_of_yarn_multiplies_its_default() -> None:
    """As in vLLM: of DeepSeek-R1-0528-Qwen3-8B, whose own undoes the default; transformers passes it over."""
    rope = YARN | {"attn_factor": 0.8782488562869419}
    assert scaling_of(rope) == pytest.approx(1.0)
    assert scaling_of(rope | {"attention_factor": 0.75}) == 0.75


def scaling_of(rope: dict[str, Any]) -> float:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 8, "intermediate_size": 8}
    fields = {"model_type": "llama", "num_hidden_layers": 1, "max_position_embeddings": 32_768, "rope_scaling": rope}
    return inverse_frequencies(ModelConfig.from_dict(sizes | fields), 8)[1]


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
@pytest.mark.parametrize("name", ROPES)
def test_inverse_frequencies_equal_transformers_to_the_bit(name: str, head_dim: int) -> None:
    config, oracle = models(ROPES[name], head_dim)
    frequencies, scaling = inverse_frequencies(config, LONG)
    initialise = ROPE_INIT_FUNCTIONS | {"default": LlamaRotaryEmbedding.compute_default_rope_parameters}
    expected, expected_scaling = initialise[oracle.rope_parameters["rope_type"]](oracle)
    assert frequencies.dtype == torch.float32
    assert torch.equal(frequencies, expected)
    assert scaling == expected_scaling


@pytest.mark.parametrize("name", ROPES)
def test_rotations_at_long_positions_equal_transformers(name: str) -> None:
    """Rotations equal transformers at short and long positions."""
    config, oracle = models(ROPES[name])
    positions = torch.tensor([0, 1, 2, 255, 256, 257, 4095, 8191, 8192, 8193, 16_384, LONG - 1])
    rope = Rope(config, LONG, "cpu")
    rotations = rope.rotations(positions, positions + 1)
    assert rotations.dtype == torch.complex64
    assert rotations.shape == (12, 32)
    expected = transformers_rotations(LlamaRotaryEmbedding(oracle), positions)
    torch.testing.assert_close(rotations, expected, rtol=0, atol=3e-7)


@pytest.mark.parametrize("length", [4096, 4097])
@pytest.mark.parametrize("name", LONGROPES)
def test_longrope_has_the_factors_of_the_longest_text(name: str, length: int) -> None:
    """transformers changes them with the longest position of a call, here of the whole text."""
    config, oracle = models(longrope(32, **LONGROPES[name]))
    frequencies, scaling = inverse_frequencies(config, length)
    expected, expected_scaling = ROPE_INIT_FUNCTIONS["longrope"](oracle, seq_len=length)
    assert torch.equal(frequencies, expected)
    assert scaling == expected_scaling
    positions = torch.arange(length)
    rotations = Rope(config, length, "cpu").rotations(positions)
    expected_rotations = transformers_rotations(LlamaRotaryEmbedding(oracle), positions)
    torch.testing.assert_close(rotations, expected_rotations, rtol=0, atol=4e-7)


LINEAR = {"rope_type": "linear", "factor": 3}
PARTS: dict[str, tuple[type[PreTrainedConfig], type[Any], dict[str, Any]]] = {
    "Phi-4-mini": (Phi3Config, Phi3RotaryEmbedding, {"partial_rotary_factor": 0.75, "rope_parameters": longrope(24)}),
    "GLM-4": (GlmConfig, GlmRotaryEmbedding, {}),
    "GLM-4 with yarn": (GlmConfig, GlmRotaryEmbedding, {"rope_parameters": YARN}),
    "GLM-4 with linear rope": (GlmConfig, GlmRotaryEmbedding, {"rope_parameters": LINEAR}),
}


@pytest.mark.parametrize("name", PARTS)
def test_part_of_a_head_is_turned_and_the_rest_is_left(name: str) -> None:
    kind, embedding, changes = PARTS[name]
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "head_dim": 64, "max_position_embeddings": 32_768}
    oracle = kind(**sizes, **deepcopy(changes))
    config = ModelConfig.from_dict(oracle.to_dict() | {"architectures": None} | changes)
    positions = torch.tensor([0, 1, 2, 255, 4095])
    rotations = Rope(config, 4096, "cpu").rotations(positions, positions + 1)
    expected = transformers_rotations(embedding(oracle), positions)
    turned = expected.shape[1]
    assert 2 * turned == config.rotary_dim < 64
    torch.testing.assert_close(rotations[:, :turned], expected, rtol=0, atol=3e-7)
    assert torch.equal(rotations[:, turned:], torch.ones(5, 32 - turned, dtype=torch.complex64))


def test_only_dynamic_rope_depends_on_the_length() -> None:
    for name, rope in ROPES.items():
        assert Rope(models(rope)[0], 8, "cpu").depends_on_length == (name == "dynamic")


@pytest.mark.parametrize("length", [100, 511, 512, 513, 1000, 9000])
def test_a_dynamic_prompt_has_the_frequencies_of_its_length(length: int) -> None:
    config, oracle = models(DYNAMIC, max_positions=512)
    positions = torch.arange(length)
    rotations = Rope(config, 9000, "cpu").rotations(positions, torch.full((length,), length))
    expected = transformers_rotations(LlamaRotaryEmbedding(oracle), positions)
    # A base of one bit more or less moves the last positions' angles by about position * 2**-23.
    torch.testing.assert_close(rotations, expected, rtol=0, atol=length * 2.0**-22)


def test_decoded_dynamic_tokens_keep_their_steps_frequencies() -> None:
    """Decoded dynamic tokens keep the frequencies of their own step."""
    config, oracle = models(DYNAMIC, max_positions=512)
    prompt, end = 510, 520
    positions = torch.arange(end)
    lengths = (positions + 1).clamp(min=prompt)
    rotations = Rope(config, end, "cpu").rotations(positions, lengths)
    embedding = LlamaRotaryEmbedding(oracle)
    steps = [torch.arange(prompt), *(torch.tensor([position]) for position in range(prompt, end))]
    expected = torch.cat([transformers_rotations(embedding, step) for step in steps])
    torch.testing.assert_close(rotations, expected, rtol=0, atol=end * 2.0**-22)
    # That the lengths matter at all: position 519 of a fixed table would be far off.
    assert (rotations - Rope(config, end, "cpu").rotations(positions, torch.ones_like(positions))).abs().max() > 0.1


def test_dynamic_rows_do_not_depend_on_their_neighbours() -> None:
    rope = Rope(models(DYNAMIC, max_positions=512)[0], 2000, "cpu")
    positions, lengths = torch.tensor([3, 700, 511, 1999]), torch.tensor([600, 1500, 512, 2000])
    together = rope.rotations(positions, lengths)
    for row in range(4):
        assert torch.equal(rope.rotations(positions[row : row + 1], lengths[row : row + 1])[0], together[row])


def test_dynamic_rope_without_lengths_is_an_error() -> None:
    with pytest.raises(ValueError, match="dynamic rope needs the length of each row's sequence"):
        Rope(models(DYNAMIC)[0], 8, "cpu").rotations(torch.arange(3), None)


def test_angles_of_neighbouring_far_positions_differ() -> None:
    """Angles are float32 so that neighbouring far positions differ."""
    rope = Rope(models(ROPES["default"])[0], LONG, "cpu")
    rotations = rope.rotations(torch.tensor([LONG - 2, LONG - 1]))
    turn = torch.angle(rotations[1] / rotations[0])[0]
    assert turn.item() == pytest.approx(1.0, abs=2e-3)  # the first pair turns by one radian a position
