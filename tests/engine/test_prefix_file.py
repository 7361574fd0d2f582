"""The prefix cache in a file: an engine that starts again finds earlier prompts, and answers what it would without."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save
from tiny_models import save_tiny_llama

from d3engine import D3, AsyncEngine, Engine, EngineDeadError, FullDepth, InvalidValueError, SamplingParams
from d3engine.scheduling.kv_cache import KVCache
from d3engine.scheduling.prefix_cache import PrefixCache, Salt

BLOCK = 4
PROMPTS = [[*range(3, 3 + count)] for count in (9, 21, 30)]
SHARED = sum((len(prompt) - 1) // BLOCK * BLOCK for prompt in PROMPTS)
Make = Callable[..., Engine]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model")).directory


@pytest.fixture
def make(model: Path, tmp_path: Path) -> Make:
    def make(model: Path = model, **changes: Any) -> Engine:
        given: dict[str, Any] = {"prefix_cache_file": tmp_path / "prefixes", "block_size": BLOCK, "max_model_len": 128}
        return Engine(model, device="cpu", skip_tokenizer_init=True, **(given | changes))

    return make


def answers(engine: Engine, **params: Any) -> list[Any]:
    """Of prompts one after the other, with log-probabilities."""
    asked = SamplingParams(temperature=0, max_tokens=6, logprobs=2, ignore_eos=True, detokenize=False, **params)
    outputs = [engine.generate({"prompt_token_ids": one}, asked, use_tqdm=False)[0].outputs[0] for one in PROMPTS]
    return [(one.token_ids, one.logprobs) for one in outputs]


@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "fp8"}, {"backend": "torch"}], ids=str)
def test_second_engine_finds_prompts_and_keeps_their_bits(make: Make, options: dict[str, Any]) -> None:
    """A second engine finds the prompts and answers with the same bits."""
    with make(**options) as engine:
        wanted = answers(engine)
        assert engine.stats().cached_prompt_tokens < SHARED
    with make(**options) as engine:
        again = answers(engine)
        assert engine.stats().cached_prompt_tokens == SHARED
        engine.scheduler.check_integrity()
        deeper = answers(engine, depth=D3(0.9, 0.7))
    if "backend" not in options:  # PyTorch's sums depend on the rows beside
        assert again == wanted
    assert [tokens for tokens, _ in again] == [tokens for tokens, _ in wanted]
    with make(prefix_cache_file=None, **options) as engine:
        assert [tokens for tokens, _ in answers(engine, depth=D3(0.9, 0.7))] == [tokens for tokens, _ in deeper]


def test_a_salt_finds_its_own_blocks_alone(make: Make) -> None:
    with make() as engine:
        answers(engine, cache_salt="one")
    with make() as engine:
        answers(engine)
        plain = engine.stats().cached_prompt_tokens
        answers(engine, cache_salt="one")
        assert engine.stats().cached_prompt_tokens - plain == SHARED
    with make(prefix_cache_file=None) as engine:
        answers(engine)
        assert engine.stats().cached_prompt_tokens == plain


def test_blocks_of_an_adapter_do_not_last() -> None:
    """Its number is another adapter's in the next process."""
    cache = KVCache(num_layers=2, num_blocks=40, block_size=BLOCK, max_sequences=1, max_length=64)
    prefixes, prompt = PrefixCache(cache), np.array(PROMPTS[0])
    salts: list[Salt] = [(1, None), None, (2, "a"), "a"]
    for salt in salts:
        slot = np.array([cache.open()])
        cache.grow(slot, np.full((1, 2), 2))
        prefixes.insert(prompt, prefixes.keys(prompt, salt), int(slot[0]), 0, 2, salt)
        cache.close(int(slot[0]))
    assert len(prefixes) == 8
    kept = {one.key for one in prefixes.lasting()}
    assert kept == {*prefixes.keys(prompt, None), *prefixes.keys(prompt, "a")}


def test_the_last_used_are_kept_where_not_all_fit(make: Make, tmp_path: Path) -> None:
    with make() as engine:
        answers(engine)
    size = (tmp_path / "prefixes").stat().st_size
    with make(prefix_cache_file_bytes=size // 2) as engine:
        answers(engine)
    assert (tmp_path / "prefixes").stat().st_size < size // 2 + 4096
    with make() as engine:
        answers(engine)
        assert 0 < engine.stats().cached_prompt_tokens < SHARED


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


FAULTS: dict[str, tuple[Callable[[Path], Any], dict[str, Any]]] = {
    "a bit": (flip, {}),
    "its end": (lambda path: path.write_bytes(path.read_bytes()[:-10]), {}),
    "all": (lambda path: path.write_bytes(bytes(path.stat().st_size)), {}),
    "nothing, but blocks have another size": (lambda path: None, {"block_size": 8}),
    "nothing, but entries have another type": (lambda path: None, {"kv_cache_dtype": "fp8"}),
    "nothing, but another code computes": (lambda path: None, {"backend": "torch"}),
    "nothing, but sums do not depend on the batch": (lambda path: None, {"batch_invariant": True}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_file_that_is_not_this_engines_is_left_aside_and_said(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    damage, changes = FAULTS[fault]
    with make() as engine:
        answers(engine)
    damage(tmp_path / "prefixes")
    with caplog.at_level(logging.WARNING), make(**changes) as engine:
        assert "left aside, the prefix cache begins empty" in caplog.text
        assert len(engine.scheduler.prefix_cache) == 0
        engine.scheduler.check_integrity()
        found = answers(engine)
    with make(prefix_cache_file=None, **changes) as engine:
        assert answers(engine) == found
    with make(**changes) as engine:  # which the engine before has written anew
        assert len(engine.scheduler.prefix_cache) > 0


@pytest.mark.parametrize("content", [b"notes", save({"a": torch.ones(2)})])
def test_a_file_of_something_else_is_not_written_over(make: Make, tmp_path: Path, content: bytes) -> None:
    """A file that no engine has written is refused, and stays as it is."""
    (tmp_path / "prefixes").write_bytes(content)
    with pytest.raises(InvalidValueError, match="prefix_cache_file must be a new file, or one of prefixes"):
        make()
    assert (tmp_path / "prefixes").read_bytes() == content


def test_blocks_of_other_ropes_are_left_aside(make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A longrope's factors follow from max_model_len alone, and all else of the two engines is the same."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [1.0 + pair for pair in range(8)]}
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 64, "rope_theta": 1e4, **factors}
    model = save_tiny_llama(tmp_path / "model", rope_parameters=rope).directory
    found = {}
    for length in (64, 96, 512):
        with caplog.at_level(logging.WARNING), make(model, max_model_len=length) as engine:
            found[length] = answers(engine), engine.stats().cached_prompt_tokens
    assert caplog.text.count("left aside, the prefix cache begins empty") == 1
    assert found[96][1] < found[512][1] == SHARED
    assert found[64][0] != found[96][0]
    assert [tokens for tokens, _ in found[96][0]] == [tokens for tokens, _ in found[512][0]]


def test_prefix_file_of_other_weights_is_left_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The weights at the model's own place may have changed since the file was written."""
    given: dict[str, Any] = {"prefix_cache_file": tmp_path / "prefixes", "block_size": BLOCK, "max_model_len": 128}
    for seed in (0, 1):
        directory = save_tiny_llama(tmp_path / "model", seed=seed).directory
        caplog.clear()
        with Engine(directory, device="cpu", skip_tokenizer_init=True, **given) as engine:
            assert len(engine.scheduler.prefix_cache) == 0
            assert ("written by another model" in caplog.text) == bool(seed)
            answers(engine)


def test_engine_that_a_fault_ends_leaves_the_file(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that a fault has ended leaves the file as it is."""
    with make() as engine:
        answers(engine, cache_salt="one")
        monkeypatch.setattr(engine.executor, "run", lambda plan: 1 / 0)
        with pytest.raises(EngineDeadError):
            answers(engine)
    assert not (tmp_path / "prefixes").exists()


@pytest.mark.parametrize("transport", ["thread", "process"])
def test_an_engine_that_serves_writes_it_when_it_closes(model: Path, tmp_path: Path, transport: str) -> None:
    """On a thread, and in the process that is the default on a GPU."""

    async def ask() -> None:
        options: dict[str, Any] = {"block_size": BLOCK, "max_model_len": 128, "skip_tokenizer_init": True}
        options |= {"transport": transport, "prefix_cache_file": tmp_path / "prefixes"}
        engine = AsyncEngine(model, device="cpu", **options)
        asked = SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False)
        async for _ in engine.generate({"prompt_token_ids": PROMPTS[2]}, asked):
            pass
        await engine.close()

    asyncio.run(ask())
    with safe_open(tmp_path / "prefixes", framework="np") as file:
        assert file.get_tensor("keys").shape == (len(PROMPTS[2]) // BLOCK, 32)


@pytest.mark.parametrize(
    "changes",
    [
        {"prefix_cache_file": 5},
        {"prefix_cache_file": "/not/there/prefixes"},
        {"enable_prefix_caching": False},
        {"tensor_parallel_size": 2},
        {"prefix_cache_file_bytes": 0},
    ],
    ids=str,
)
def test_what_cannot_keep_prefixes_is_refused(make: Make, changes: dict[str, Any]) -> None:
    field = "prefix_cache_file_bytes" if "prefix_cache_file_bytes" in changes else "prefix_cache_file"
    with pytest.raises(InvalidValueError, match=f"^{field} must be"):
        make(depth=FullDepth(), **changes)
