"""Sizes that the machine has no memory for are refused by their name, before anything of that size is made."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from d3engine import Engine, FullDepth, InvalidValueError, SamplingParams
from d3engine.loading import host_memory
from d3engine.model.config import ModelConfig
from d3engine.model.weights import random_weights

CONFIG = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
GIB = 2**30


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    """`load({config fields}, **engine arguments)`: an engine on a machine of 8 GiB."""
    monkeypatch.setattr("d3engine.loading.cache_size.machine_bytes", lambda: 8 * GIB)
    monkeypatch.setattr(host_memory, "machine_bytes", lambda: 8 * GIB)

    def make(fields: dict[str, Any], **arguments: Any) -> Engine:
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | fields))
        config = ModelConfig.from_directory(tmp_path)
        weights = random_weights(config, dtype=torch.float32, device="cpu", seed=0)
        return Engine(tmp_path, weights=weights, skip_tokenizer_init=True, device="cpu", depth=FullDepth(), **arguments)

    return make


@pytest.mark.parametrize(
    "fields",
    [
        {"max_position_embeddings": 2**31 - 1},
        {"max_position_embeddings": 40_000_000},
        {"max_position_embeddings": 2048, "rope_scaling": {"rope_type": "linear", "factor": 1e5}},
        {"max_position_embeddings": 2**31 - 1, "rope_scaling": {"rope_type": "dynamic", "factor": 1e5}},
    ],
)
def test_a_config_of_too_many_positions_is_refused_and_loads_with_a_length_that_fits(
    load: Callable[..., Engine], fields: dict[str, Any]
) -> None:
    with pytest.raises(InvalidValueError, match=r"max_model_len must be a length that this machine has memory for"):
        load(fields)
    with pytest.raises(InvalidValueError, match=r"max_model_len must be .*8\.0 GiB: tables for 64 sequences take"):
        load(fields, kv_cache_memory_bytes=2**20)
    engine = load(fields, max_model_len=64, enforce_eager=True)
    assert engine.executor.rope.table.shape[0] == 64  # type: ignore[attr-defined]
    assert engine.generate([1, 2], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)[0].finished


def test_a_kv_cache_larger_than_the_memory_is_refused_by_its_name(load: Callable[..., Engine]) -> None:
    with pytest.raises(InvalidValueError, match=rf"kv_cache_memory_bytes must be at most .*{8 * GIB} bytes; got 10+"):
        load({}, kv_cache_memory_bytes=10**17)
    assert load({}, kv_cache_memory_bytes=2**22).stats().kv_blocks_total > 0


def test_the_machine_s_memory_is_what_it_has_or_a_process_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    there = host_memory.machine_bytes()
    assert there is not None
    assert there > 2**26
    monkeypatch.setattr(resource, "getrlimit", lambda what: (2**25, -1))
    assert host_memory.machine_bytes() == 2**25
    monkeypatch.setattr(resource, "getrlimit", lambda what: (-1, -1))  # RLIM_INFINITY
    assert host_memory.machine_bytes() >= there  # type: ignore[operator]
