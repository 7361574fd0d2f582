"""A real model that stays packed: Qwen2.5-Coder-0.5B-Instruct in Q4_K_M answers as its dequantized weights do.
`d3engine weights fetch qwen2.5-coder-0.5b` gets it; without it, or without the native library, these tests are
skipped."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf", reason="the extra gguf is not installed")

from d3engine import Engine, SamplingParams
from d3engine.engine.model_directory import default_sampling_params, fetched_model
from d3engine.model.config import ModelConfig

NAME = "qwen2.5-coder-0.5b"
QUESTION = [{"role": "user", "content": "Write a Python function that adds two numbers, without comments."}]
GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def fetched() -> Path:
    file = fetched_model(NAME)
    if not file.exists():
        pytest.skip(f"the model is not there: d3engine weights fetch {NAME}")
    return file


def answer(**arguments: Any) -> tuple[int, ...]:
    with Engine(NAME, device="cpu", max_model_len=256, kv_cache_memory_bytes=2**24, **arguments) as engine:
        return tuple(engine.chat(QUESTION, GREEDY, use_tqdm=False)[0].outputs[0].token_ids)


@pytest.mark.usefixtures("native_library")
def test_greedy_chat_is_that_of_the_dequantized_weights(fetched: Path) -> None:
    """Greedy tokens of a chat are those of the dequantized weights."""
    packed = answer(backend="native", activations="float32")
    assert len(packed) == 8
    assert packed == answer(backend="torch", dtype="float32", weight_dtype="float32")


def test_model_name_brings_sampling_and_both_ends_of_text(fetched: Path) -> None:
    """The name brings the authors' sampling and both ends of text."""
    params = default_sampling_params(fetched)
    assert (params.temperature, params.top_p, params.top_k, params.repetition_penalty) == (0.7, 0.8, 20, 1.1)
    assert sorted(ModelConfig.from_directory(fetched).eos_token_ids) == [151643, 151645]
