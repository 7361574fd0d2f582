"""An engine argument that is not allowed is refused by name; what a model directory says is taken."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from fixture_types import MakeEngine
from scripted import CONFIG, DEMO, LAYERS, Scripted

from d3engine import D3, Engine, InvalidValueError, SamplingParams
from d3engine.depth import DepthPolicy, Schedule
from d3engine.model.config import ModelConfig
from d3engine.model.weights import LlamaWeights, random_weights


class TooShort(DepthPolicy):
    """A user's own policy that is wrong about the model."""

    def schedule(self, num_layers: int) -> Schedule:
        return Schedule.nested([1] * (num_layers - 1))


@pytest.mark.parametrize(
    ("field", "values", "allowed"),
    [
        ("max_num_seqs", [0, -1, 4097, 1.5, "8", True], "an integer from 1 to 4096"),
        ("max_num_batched_tokens", [0, -5, 2.0, None], "an integer of at least 1"),
        ("max_num_batched_tokens", [7], "at least max_num_seqs=8"),
        ("block_size", [0, 1025, "16", False], "an integer from 1 to 1024"),
        ("seed", [-1, 2**63, 0.5, None], "an integer from 0 to"),
        ("max_model_len", [1, 0, 65, 10.0, "64"], "an integer from 2 to 64"),
        ("kv_cache_memory_bytes", [0, -1, 1.5, "1GiB", LAYERS * 16 * 2 * 16 * 4 - 1], "an integer of at least 8192"),
        ("dtype", ["float16", "int8", "bf16", torch.int32, 7], "one of auto, float32, bfloat16 on cpu"),
        ("device", ["tpu", "meta", "gpu"], '"auto", "cpu", "cuda" or "cuda:N"'),
        ("depth", ["d3", 0.9, None, D3], "a DepthPolicy"),
        ("depth", [TooShort()], "a schedule of the model's 4 layers"),
        ("tail", [D3(0.9, 0.5, tail=3)], "at most 2"),
    ],
)
def test_engine_argument_is_refused_by_name_and_value(
    make_engine: MakeEngine, field: str, values: list[Any], allowed: str
) -> None:
    """An engine argument is refused by name value and what is allowed."""
    for value in values:
        with pytest.raises(InvalidValueError) as caught:
            make_engine(**{"depth" if field == "tail" else field: value})
        assert caught.value.field == field
        assert allowed in caught.value.allowed
        assert str(caught.value).startswith(f"{field} must be ")


def test_a_directory_that_is_none_is_refused_by_name() -> None:
    with pytest.raises(InvalidValueError, match=r"model must be .*a directory.*; got 'nowhere at all'"):
        Engine("nowhere at all")
    with pytest.raises(InvalidValueError, match=r"model must be .*a directory.*; got 'A prompt"):
        Engine("A prompt that is longer than any name. " * 10)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("admission", 5),
        ("enforce_eager", "yes"),
        ("enable_prefix_caching", "no"),
        ("skip_tokenizer_init", 0.5),
        ("gpu_memory_utilization", math.nan),
        ("gpu_memory_utilization", 1.5),
        ("tokenizer", 5),
    ],
)
def test_an_engine_argument_of_a_wrong_type_is_refused_by_name(make_engine: MakeEngine, field: str, value: Any) -> None:
    with pytest.raises(InvalidValueError, match=field):
        make_engine(**{field: value})


def test_tokenizer_that_is_no_directory_with_one_is_refused(make_engine: MakeEngine, tmp_path: Path) -> None:
    """For a file, a missing path or a directory without one the error names field, value and what is allowed."""
    for value in (DEMO / "tokenizer.json", tmp_path / "missing", tmp_path, "", "owner/name", "long" * 100):
        with pytest.raises(InvalidValueError) as caught:
            make_engine(tokenizer=value)
        assert (caught.value.field, caught.value.value) == ("tokenizer", str(value))
        assert "a directory with tokenizer.json or tokenizer.model, a GGUF file" in caught.value.allowed


def test_ready_weights_of_another_dtype_are_refused(directory: Path) -> None:
    config = ModelConfig.from_directory(directory)
    narrow = random_weights(config, dtype=torch.bfloat16, device="cpu", seed=0)
    with pytest.raises(ValueError, match=r"weights must be torch.float32 on cpu.*; got 'torch.bfloat16 on cpu'"):
        Engine(directory, weights=narrow, tokenizer=DEMO, device="cpu")


def test_without_parameters_generation_config_decides(directory: Path, weights: LlamaWeights, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.7, "max_new_tokens": 3}')
    engine = Engine(tmp_path, weights=weights, tokenizer=DEMO, device="cpu", enforce_eager=True)
    engine.executor = Scripted({})  # type: ignore[assignment]
    assert engine.default_sampling_params == SamplingParams(temperature=0.0, max_tokens=3)
    assert engine.generate("a", use_tqdm=False)[0].outputs[0].token_ids == [100, 101, 102]
