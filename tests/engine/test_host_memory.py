"""Sizes that the machine has no memory for are refused by their name, before anything of that size is made."""

import json
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from configs import llama_config
from fixture_types import MakeLlama
from gguf_files import bpe_keys, write_gguf

from d3engine import Engine, FullDepth, InvalidValueError, SamplingParams, Speculative
from d3engine.engine import host as host_memory
from d3engine.engine import memory as cache_size
from d3engine.engine import resolve
from d3engine.engine.engine_config import EngineConfig
from d3engine.engine.settings import EngineSettings
from d3engine.model.config import ModelConfig
from d3engine.model.shard import shard_of
from d3engine.model.weights import random_weights

CONFIG = llama_config(4, num_key_value_heads=4, max_position_embeddings=2048)
GIB = 2**30


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    """`load({config fields}, **engine arguments)`: an engine on a machine of 8 GiB."""
    monkeypatch.setattr("d3engine.engine.memory.machine_bytes", lambda: 8 * GIB)
    monkeypatch.setattr(host_memory, "machine_bytes", lambda: 8 * GIB)

    def make(fields: dict[str, Any], **arguments: Any) -> Engine:
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | fields))
        config = ModelConfig.from_directory(tmp_path)
        weights = random_weights(config, dtype=torch.float32, device="cpu", seed=0)
        return Engine(tmp_path, weights=weights, skip_tokenizer_init=True, device="cpu", depth=FullDepth(), **arguments)

    return make


@pytest.fixture
def settings_of(load: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> Callable[..., EngineSettings]:
    """`settings_of({config fields}, **engine arguments)`: of an engine of which nothing is made."""
    made: list[EngineSettings] = []

    def stop(settings: EngineSettings, *given: Any) -> Any:
        made.append(settings)
        raise InterruptedError

    def resolve(fields: dict[str, Any], **arguments: Any) -> EngineSettings:
        monkeypatch.setattr("d3engine.engine.engine.assemble", stop)
        with pytest.raises(InterruptedError):
            load(fields, **arguments)
        return made.pop()

    return resolve


LONG = [
    {"max_position_embeddings": 2**31 - 1},
    {"max_position_embeddings": 40_000_000},
    {"max_position_embeddings": 2048, "rope_scaling": {"rope_type": "linear", "factor": 1e5}},
    {"max_position_embeddings": 2**31 - 1, "rope_scaling": {"rope_type": "dynamic", "factor": 1e5}},
]


@pytest.mark.parametrize("fields", LONG)
def test_length_that_does_not_fit_is_refused_and_default_fits(
    load: Callable[..., Engine],
    settings_of: Callable[..., EngineSettings],
    fields: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A given length that does not fit is refused, and the default is one that does."""
    engine = load(fields, max_model_len=64, enforce_eager=True)
    assert engine.executor.rope.table.shape[0] == 64  # type: ignore[attr-defined]
    assert engine.generate([1, 2], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)[0].finished
    given = {"max_model_len": 40_000_000}
    with pytest.raises(InvalidValueError, match=r"max_model_len must be a length that this machine has memory for"):
        load(fields, **given)
    with pytest.raises(InvalidValueError, match=r"max_model_len must be .*8\.0 GiB: tables for 64 sequences take"):
        load(fields, **given, kv_cache_memory_bytes=2**20)
    assert not caplog.records
    deep = fields | {"num_hidden_layers": 64}
    whole = settings_of(deep)
    assert "tokens: what the memory has room for beside the weights" in caplog.messages[0]
    assert len(caplog.records) == 1
    beside = 300 * 32 * 4  # of the weights, the embedding alone is more than this
    taken = host_memory.table_bytes(whole) + whole.sequence_blocks * whole.block_bytes
    assert 0.89 * 8 * GIB < taken < 0.9 * 8 * GIB - beside
    assert settings_of(deep, kv_cache_memory_bytes=2**20).max_model_len > whole.max_model_len
    assert settings_of(deep, max_num_seqs=1).max_model_len > whole.max_model_len
    assert settings_of(fields).max_model_len == 2**20
    assert caplog.messages[-1].startswith("max_model_len is 1,048,576 of the model's ")
    assert caplog.messages[-1].endswith(" tokens: a longer one must be given")


def test_default_length_that_is_the_models_is_not_logged(
    settings_of: Callable[..., EngineSettings], caplog: pytest.LogCaptureFixture
) -> None:
    """A default length that is the model's own is not spoken of."""
    assert settings_of({"max_position_embeddings": 131_072}).max_model_len == 131_072
    assert not caplog.records


def test_window_that_transformers_ignores_is_default_and_limit(
    load: Callable[..., Engine], settings_of: Callable[..., EngineSettings], caplog: pytest.LogCaptureFixture
) -> None:
    """A window that transformers ignores is the default length and the longest allowed."""
    fields = {"model_type": "llama", "num_key_value_heads": 4, "max_position_embeddings": 4096, "sliding_window": 2047}
    with pytest.raises(InvalidValueError, match=r"sliding_window must be .*\(max_model_len=2047 is what can be run\)"):
        load(fields, max_model_len=4096)
    assert settings_of(fields).max_model_len == 2047
    assert caplog.messages == ["max_model_len is 2,047 of the model's 4,096 tokens: its sliding window"]


def test_weights_that_leave_no_room_leave_a_length_all_the_same(
    settings_of: Callable[..., EngineSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("d3engine.engine.memory.weight_bytes", lambda *given: 9 * GIB)
    assert settings_of({"max_position_embeddings": 131_072}).max_model_len == 2048


def test_weights_larger_than_the_memory_are_spoken_of(
    tiny_llama: MakeLlama, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning comes before the system may end the process without a word."""
    monkeypatch.setattr(cache_size, "machine_bytes", lambda: 8 * GIB)
    for size, spoken in ((7 * GIB, []), (9 * GIB, ["the weights take 9.0 GiB, and this machine or its container has"])):
        monkeypatch.setattr(cache_size, "weight_bytes", lambda *given, size=size: size)
        resolve.resolve_settings(EngineConfig(model=tiny_llama().directory, device="cpu"))
        assert [message[: len(spoken[0])] for message in caplog.messages] == spoken


def test_weights_that_no_memory_holds_are_refused(
    tiny_llama: MakeLlama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is copied must fit, and what stays in the mapped file is warned of alone."""
    directory = tiny_llama().directory
    file = write_gguf(tmp_path / "model.gguf", types=("Q4_K", "Q6_K"), layers=1, tokenizer=bpe_keys())
    cases = [
        (directory, {"dtype": "bfloat16"}, 0.99, True),  # of float32
        (directory, {"dtype": "float32"}, 0.99, False),
        (directory, {"dtype": "float32"}, 0.3, True),  # stacked matrices are copied
        (file, {"activations": "float32"}, 0.5, False),
        *([(file, {"activations": "int8"}, 0.5, True)] if resolve.multiplies_bytes() else []),
    ]
    for model, given, share, is_refused in cases:
        config = EngineConfig(model=model, device="cpu", **given)
        settings = resolve.resolve_settings(config)
        held = cache_size._held_bytes(settings, shard_of(settings.config, 0, 1))
        with monkeypatch.context() as patch:
            patch.setattr(cache_size, "machine_bytes", lambda held=held, share=share: int(share * held))
            caplog.clear()
            if not is_refused:
                resolve.resolve_settings(config)
                assert caplog.messages[0].startswith("the weights take 0.0 GiB, and this machine or its container has")
                continue
            with pytest.raises(InvalidValueError, match=r"model must be one whose weights fit: .*int4.*got") as caught:
                resolve.resolve_settings(config)
            assert caught.value.value == str(model)
            assert ('activations="float32"' in str(caught.value)) == (model == file)
    on_gpu = replace(settings, device=torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 1))
    with pytest.raises(InvalidValueError, match=r"model must be one whose weights fit: .*this GPU has"):
        cache_size.check_weights(on_gpu, shard_of(settings.config, 0, 1))


def test_default_length_on_a_gpu_fits_its_share_of_memory(
    settings_of: Callable[..., EngineSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU the default length fits its share of the memory next to the weights."""
    here = settings_of({"max_position_embeddings": 131_072}, max_num_seqs=1)
    one = replace(here, device=torch.device("cuda"), config=replace(here.config, num_layers=1000, num_kv_heads=4))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (23 * GIB, 24 * GIB))
    found = [
        cache_size.fitting_length(replace(one, gpu_memory_utilization=share), shard_of(one.config, 0, 1))
        for share in (0.5, 0.9)
    ]
    taken = [one.block_bytes * one.config.num_layers * length // one.block_size for length in found]
    assert taken[1] - taken[0] == pytest.approx(0.4 * 24 * GIB, rel=0.001)
    assert 0.8 * 23 * GIB < taken[1] < 0.9 * 23 * GIB
    assert cache_size.fitting_length(replace(one, kv_cache_memory_bytes=2**30), shard_of(one.config, 0, 1)) > found[1]


def test_default_length_leaves_room_for_a_draft_model(
    settings_of: Callable[..., EngineSettings], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On a GPU its weights and its cache lie beside those of its target: a length without them would be refused."""
    here = settings_of({"max_position_embeddings": 131_072}, max_num_seqs=1)
    assert resolve._drafting(here) is None
    assert resolve._drafting(replace(here, depth=Speculative(str(tmp_path / "none")))) is None
    draft = resolve._drafting(replace(here, depth=Speculative(str(tmp_path))))
    assert draft is not None
    assert draft.config == here.config
    one = replace(here, device=torch.device("cuda"), config=replace(here.config, num_layers=1000, num_kv_heads=4))
    draft = replace(one, config=replace(one.config, num_layers=250))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (23 * GIB, 24 * GIB))
    part = shard_of(one.config, 0, 1)
    alone, beside = (cache_size.fitting_length(one, part, other) for other in (None, draft))
    loaded = sum(cache_size.weight_bytes(each.config, part, torch.float32) for each in (one, draft))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (23 * GIB - loaded, 24 * GIB))
    given = (lambda: cache_size.GRAPH_BYTES, draft.config)
    assert cache_size.num_blocks(replace(one, max_model_len=beside), *given) >= 1000 * beside // one.block_size
    with pytest.raises(InvalidValueError, match="gpu_memory_utilization must be enough for one sequence"):
        cache_size.num_blocks(replace(one, max_model_len=alone), *given)


def test_kv_cache_larger_than_memory_is_refused_by_name(load: Callable[..., Engine]) -> None:
    """A KV cache larger than the memory is refused by its name."""
    with pytest.raises(InvalidValueError, match=rf"kv_cache_memory_bytes must be at most .*{8 * GIB} bytes; got 10+"):
        load({}, kv_cache_memory_bytes=10**17)
    assert load({}, kv_cache_memory_bytes=2**22).stats().kv_blocks_total > 0


def test_machine_memory_is_what_it_has_or_a_process_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's memory is what it has or what a process may take."""
    there = host_memory.machine_bytes()
    assert there is not None
    assert there > 2**26
    monkeypatch.setattr(resource, "getrlimit", lambda what: (2**25, -1))
    assert host_memory.machine_bytes() == 2**25
    monkeypatch.setattr(resource, "getrlimit", lambda what: (-1, -1))  # RLIM_INFINITY
    assert host_memory.machine_bytes() >= there  # type: ignore[operator]
