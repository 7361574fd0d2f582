"""An engine whose int8 and int4 matrices lie in lanes answers as with their rows, whatever carries out its steps."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fixture_types import MakePrompts
from quantized_weights import load

from d3engine import D3, EarlyExit, Engine, FullDepth, SamplingParams
from d3engine.kernels.interleaved import Int8LanesWeight, LanesWeight
from d3engine.kernels.native.library import isas_here, reads_interleaved
from d3engine.model.weights import LlamaWeights
from d3engine.utils.environment import NATIVE_ISA
from d3engine.weights_tools.quantize import quantize_model

OPTIONS = {"dtype": "float32", "device": "cpu", "skip_tokenizer_init": True}
SIZES = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 320}
READER = next((isa for isa in isas_here() if reads_interleaved(isa)), None)

pytestmark = [
    pytest.mark.usefixtures("native_library"),
    pytest.mark.skipif(READER is None, reason="no instruction set of this machine reads lanes"),
]


@pytest.fixture
def quantized(tiny_llama: Callable[..., object], tmp_path: Path) -> Callable[..., Path]:
    def make(scheme: str, **changes: object) -> Path:
        source = tiny_llama(**{**SIZES, **changes}).directory  # type: ignore[attr-defined]
        quantize_model(source, tmp_path / scheme, scheme, show_progress=False)
        return tmp_path / scheme

    return make


def answers(engine: Engine, prompts: list[list[int]]) -> list[tuple[list[int], list[int]]]:
    policies = [FullDepth(), D3(0.8, 0.4), EarlyExit(0.5)]
    pairs = [
        (prompt, SamplingParams(temperature=0, max_tokens=12, depth=policy))
        for prompt in prompts
        for policy in policies
    ]
    found = engine.generate([prompt for prompt, _ in pairs], [params for _, params in pairs], use_tqdm=False)
    return [(output.outputs[0].token_ids, output.outputs[0].depths) for output in found]


def matrices(weights: LlamaWeights) -> list[object]:
    of_layers = [matrix for layer in weights.layers for matrix in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    return [*of_layers, weights.lm_head]


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_an_engine_answers_as_with_rows(
    quantized: Callable[..., Path],
    make_prompts: MakePrompts,
    monkeypatch: pytest.MonkeyPatch,
    scheme: str,
    is_tied: bool,
) -> None:
    """Under D3 the library decodes, with early exits PyTorch does; the embedding that is a head too lies in lanes."""
    directory, prompts = quantized(scheme, tie_word_embeddings=is_tied), make_prompts([3, 17, 40])
    monkeypatch.setenv(NATIVE_ISA.name, str(READER))
    with Engine(directory, **OPTIONS) as engine:
        weights = engine.executor.model.weights
        assert all(isinstance(matrix, LanesWeight) for matrix in matrices(weights))
        assert isinstance(weights.embedding, Int8LanesWeight) == is_tied
        assert (weights.embedding is weights.lm_head) == is_tied
        assert engine.stats().executor.startswith(f"native ({READER}")
        found = answers(engine, prompts)
        held = weights.nbytes
    with Engine(directory, enforce_eager=True, **OPTIONS) as engine:
        assert not any(isinstance(matrix, LanesWeight) for matrix in matrices(engine.executor.model.weights))
        assert answers(engine, prompts) == found
        assert held <= 1.4 * engine.executor.model.weights.nbytes  # rows of a few bytes are filled up to 64
    assert len({tuple(tokens) for tokens, _ in found}) > 3, "answers that agree by chance would prove nothing"


def test_ready_weights_come_into_lanes_and_stay_what_they_were(quantized: Callable[..., Path]) -> None:
    directory = quantized("int8", tie_word_embeddings=True)
    weights = load(directory)
    with Engine(directory, weights=weights, **OPTIONS) as engine:
        held = engine.executor.model.weights
        assert isinstance(held.lm_head, LanesWeight) == reads_interleaved()
        assert held.embedding is held.lm_head
        for made, given in zip(matrices(held), matrices(weights), strict=True):
            assert torch.equal(made.dequantize(torch.float32), given.dequantize(torch.float32))  # type: ignore[attr-defined]
    assert not any(isinstance(matrix, LanesWeight) for matrix in matrices(weights))


def test_another_instruction_set_gets_rows(quantized: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    directory = quantized("int4")
    monkeypatch.setenv(NATIVE_ISA.name, "portable")
    with Engine(directory, **OPTIONS) as engine:
        assert engine.stats().executor.startswith("native (portable")
        assert not any(isinstance(matrix, LanesWeight) for matrix in matrices(engine.executor.model.weights))


def test_instruction_set_is_found_where_some_matrices_fill_rows(
    quantized: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An instruction set is found where only some matrices fill interleaved rows."""
    # The rows of what a layer yields are a width that fills none.
    directory = quantized("int8", hidden_size=48)
    monkeypatch.setenv(NATIVE_ISA.name, "auto")
    with Engine(directory, **OPTIONS) as engine:
        layer = engine.executor.model.weights.layers[0]
        assert isinstance(layer.qkv, LanesWeight) == reads_interleaved()
        assert not isinstance(layer.down, LanesWeight)
        assert engine.stats().executor.startswith("native")
