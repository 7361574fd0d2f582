"""An engine on quantized weights answers as one on what they stand for."""

from typing import Any

import pytest
import torch
from fixture_types import MakePrompts
from quantized_weights import LAYOUTS, SCHEMES, QuantizedDirectory, dense, load

from d3engine import D3, Engine, FullDepth, SamplingParams
from d3engine.model.config import ModelConfig
from d3engine.model.weights import load_weights, with_matrices


def tokens_of(engine: Engine, prompts: list[list[int]], *, together: bool = True) -> list[tuple[int, ...]]:
    """Greedy tokens, each prompt once at full depth and once under D3."""
    pairs = [
        ({"prompt_token_ids": prompt}, SamplingParams(temperature=0, max_tokens=12, depth=depth))
        for prompt in prompts
        for depth in (FullDepth(), D3(0.8, 0.4))
    ]
    batches = [pairs] if together else [[pair] for pair in pairs]
    outputs = [
        output
        for batch in batches
        for output in engine.generate([p for p, _ in batch], [s for _, s in batch], use_tqdm=False)
    ]
    return [tuple(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantized_engine_answers_as_with_dequantized_weights(
    quantized_directory: QuantizedDirectory, make_prompts: MakePrompts, scheme: str, layout: str
) -> None:
    """The engine answers as with the dequantized weights, alone and in a batch."""
    source, target = quantized_directory(scheme, layout)
    prompts = make_prompts([3, 17, 9])
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "skip_tokenizer_init": True}
    with Engine(target, **options) as engine:
        batch = tokens_of(engine, prompts)
        alone = tokens_of(engine, prompts, together=False)
    with Engine(source, weights=with_matrices(load(target), dense, dense), **options) as engine:
        expected = tokens_of(engine, prompts)
    assert batch == alone == expected
    assert len(set(expected)) == 6, "answers that agree by chance would prove nothing"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_engine_dtype_is_that_of_activations_and_floats(
    quantized_directory: QuantizedDirectory, make_prompts: MakePrompts, scheme: str
) -> None:
    """The dtype of an engine is that of activations and float weights."""
    directory = quantized_directory(scheme, "biases")[1]
    config = ModelConfig.from_directory(directory)
    weights = load_weights(directory, config, dtype=torch.bfloat16, device="cpu", show_progress=False)
    layer = weights.layers[0]
    assert layer.qkv_bias is not None
    assert {weights.embedding.dtype, layer.attention_norm.dtype, layer.qkv_bias.dtype} == {torch.bfloat16}
    assert layer.down.scales.dtype == weights.lm_head.scales.dtype == torch.float32
    with Engine(directory, weights=weights, dtype="bfloat16", skip_tokenizer_init=True) as engine:
        assert engine.executor.pool.dtype == torch.bfloat16
        assert all(len(tokens) == 12 for tokens in tokens_of(engine, make_prompts([5])))
