"""A layer that has fallen asleep gives its KV memory back, at the step the formula says, and others can use it."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from configs import llama_config
from fixture_types import MakeEngine

from d3engine import (
    D3,
    Engine,
    FullDepth,
    InvalidValueError,
    LayerTable,
    Nested,
    SamplingParams,
    SkipDecode,
    TailSkip,
    UnifiedSkip,
)
from d3engine.depth import DepthPolicy
from d3engine.model.config import ModelConfig
from d3engine.model.weights import random_weights
from d3engine.scheduling.kv_cache import KVCache
from d3engine.scheduling.scheduler import peak_blocks

LAYERS, MAX_LENGTH = 8, 96
KV_CHANNELS = 2 * 8  # kv heads x channels
CONFIG = llama_config(LAYERS, max_position_embeddings=MAX_LENGTH)
NESTED: list[DepthPolicy] = [
    D3(0.9, 0.5),
    D3(0.95, 0.25),
    D3(0.8, 0.3, tail=1),
    D3(0.5, 0.1),  # no layer at all is left in the end
    SkipDecode(20, 2),
    SkipDecode(12, 3, warmup=2),
    UnifiedSkip(2),
    TailSkip(4.5, 20),
    Nested(0.9, [[3, 5], [1, 2], [2, 3]]),
]


def greedy(max_tokens: int, depth: DepthPolicy | None = None) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, depth=depth)


def ceil(entries: int, block_size: int) -> int:
    return -(-entries // block_size)


@pytest.fixture(scope="module")
def make_engine(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Engine]:
    directory = tmp_path_factory.mktemp("model")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    weights = random_weights(ModelConfig.from_directory(directory), dtype=torch.float32, device="cpu", seed=0)

    def make(*, block_size: int = 4, blocks: int | None = None, **changes: Any) -> Engine:
        arguments: dict[str, Any] = {"max_num_seqs": 4, "device": "cpu", "enable_prefix_caching": False}
        if blocks is not None:
            arguments["kv_cache_memory_bytes"] = blocks * 2 * block_size * KV_CHANNELS * 4
        # Whoever steps reads along; blocks of a run of steps would be taken before its first one.
        arguments |= {"block_size": block_size, "weights": weights, "skip_tokenizer_init": True}
        arguments |= {"num_scheduler_steps": 1}
        return Engine(directory, **(arguments | changes))

    return make


@pytest.mark.parametrize("block_size", [1, 4, 5])
@pytest.mark.parametrize("policy", [FullDepth(), *NESTED], ids=repr)
def test_blocks_in_use_are_those_of_layers_still_to_run(
    make_engine: MakeEngine, policy: DepthPolicy, block_size: int
) -> None:
    """After every step the blocks in use are those of layers that the next step runs."""
    prompt, max_tokens = 11, 26
    engine = make_engine(block_size=block_size, depth=policy)
    cutoffs = policy.schedule(LAYERS).cutoffs
    engine.add_request("a", list(range(prompt)), greedy(max_tokens))
    for step in range(max_tokens - 1):
        engine.step()
        held = sum(ceil(prompt + step, block_size) for cutoff in cutoffs if cutoff > step + 1)
        stats = engine.stats()
        assert stats.kv_blocks_in_use == held
        assert stats.kv_bytes_in_use == held * 2 * block_size * KV_CHANNELS * 4
        whole = LAYERS * ceil(prompt + step, block_size)
        assert stats.kv_bytes_saved == (whole - held) * 2 * block_size * KV_CHANNELS * 4
        engine.scheduler.check_integrity()
    assert (held < whole) == (policy != FullDepth())
    engine.step()
    assert engine.stats().kv_blocks_in_use == 0
    assert not engine.has_unfinished_requests()


def test_shared_prompt_outlives_a_layer_of_one_request(make_engine: MakeEngine) -> None:
    """Blocks of a shared prompt outlive the layer that one of its requests runs no more."""
    engine = make_engine(enable_prefix_caching=True, depth=FullDepth())
    prompt = list(range(13))  # three full blocks, shared, and a fourth
    engine.generate(prompt, greedy(1), use_tqdm=False)
    engine.add_request("deep", prompt, greedy(30))
    engine.add_request("shallow", prompt, greedy(30, UnifiedSkip(2)))
    engine.step()
    kept = len(UnifiedSkip(2).kept_layers(LAYERS))
    own_blocks = LAYERS + kept  # the fourth block of each; what the other keeps is shared
    assert engine.stats().kv_blocks_in_use == 3 * LAYERS + own_blocks
    engine.abort_request("deep")
    assert engine.stats().kv_blocks_in_use == 4 * kept
    assert engine.stats().kv_blocks_cached == 3 * (LAYERS - kept)
    engine.scheduler.check_integrity()


def test_the_bytes_saved_at_the_end_of_finished_requests_add_up(make_engine: MakeEngine) -> None:
    engine = make_engine(depth=D3(0.9, 0.5))
    engine.generate([list(range(10))] * 3, greedy(12), use_tqdm=False)
    # The last step is number 11; 10 + 11 entries are in the layers that it ran.
    asleep = LAYERS - D3(0.9, 0.5).schedule(LAYERS).depth_at(11)
    assert asleep == 4
    assert engine.stats().kv_bytes_saved_at_end == 3 * asleep * ceil(21, 4) * 2 * 4 * KV_CHANNELS * 4


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("policy", [FullDepth(), *NESTED, D3(0.9, 0.5, on_skip="copy")], ids=repr)
def test_peak_blocks_is_the_most_that_any_step_holds(policy: DepthPolicy, block_size: int) -> None:
    schedule = policy.schedule(LAYERS)
    cache = KVCache(num_layers=LAYERS, num_blocks=8, block_size=block_size, max_sequences=1, max_length=MAX_LENGTH)
    for prompt in (1, 2, 7, 16, 33, 60):
        for max_tokens in (1, 2, 3, 9, 17, 36):
            layers = [schedule.depth_at(step) if schedule.on_skip == "none" else LAYERS for step in range(max_tokens)]
            held = [depth * ceil(prompt + step, block_size) for step, depth in enumerate(layers)]
            assert peak_blocks(schedule, prompt, prompt + max_tokens, cache) == max(held)


@pytest.mark.parametrize("policy", [FullDepth(), *NESTED], ids=repr)
def test_peak_blocks_are_reached_and_never_exceeded(make_engine: MakeEngine, policy: DepthPolicy) -> None:
    """No run ever holds more than peak blocks and every run reaches it."""
    for prompt, max_tokens in ((3, 30), (17, 12), (30, 5)):
        engine = make_engine(depth=policy, enforce_eager=True)  # who runs ahead takes more, but only what is free
        pool = engine.scheduler.cache.pool
        peak = 0
        allocate = pool.allocate

        def watched(count: int, pool: Any = pool, allocate: Any = allocate) -> Any:
            nonlocal peak
            blocks = allocate(count)
            peak = max(peak, pool.num_held)
            return blocks

        pool.allocate = watched  # type: ignore[method-assign]
        engine.generate(list(range(prompt)), greedy(max_tokens), use_tqdm=False)
        wanted = peak_blocks(policy.schedule(LAYERS), prompt, prompt + max_tokens, engine.scheduler.cache)
        assert peak == wanted


def test_request_that_fits_only_by_freed_memory_runs(make_engine: MakeEngine) -> None:
    """A request runs that fits only because D3 gives memory back."""
    policy, prompt, max_tokens = D3(0.7, 0.25), 20, 60
    cache = make_engine().scheduler.cache
    peak = peak_blocks(policy.schedule(LAYERS), prompt, prompt + max_tokens, cache)
    whole = peak_blocks(FullDepth().schedule(LAYERS), prompt, prompt + max_tokens, cache)
    assert (peak, whole) == (40, 160)
    engine = make_engine(blocks=peak)
    alone = make_engine().generate(list(range(prompt)), greedy(max_tokens, policy), use_tqdm=False)[0]
    found = engine.generate(list(range(prompt)), greedy(max_tokens, policy), use_tqdm=False)[0]
    assert found.outputs[0].token_ids == alone.outputs[0].token_ids
    assert len(found.outputs[0].token_ids) == max_tokens
    assert engine.stats().num_preemptions == 0

    for refused in (FullDepth(), D3(0.7, 0.25, on_skip="copy"), D3(0.7, 0.25, on_skip="project")):
        with pytest.raises(
            InvalidValueError, match=r"max_tokens must be .*20 tokens.*160 blocks of 4.*bytes allows 40.*; got 60"
        ):
            engine.generate(list(range(prompt)), greedy(max_tokens, refused), use_tqdm=False)
    assert engine.stats().num_waiting == 0

    smaller = make_engine(blocks=peak - 1)
    with pytest.raises(InvalidValueError, match=r"max_tokens must be .*; got 60"):
        smaller.add_request("too long by one block", list(range(prompt)), greedy(max_tokens, policy))
    assert not smaller.has_unfinished_requests()


def test_two_requests_run_where_full_depth_has_room_for_one(make_engine: MakeEngine) -> None:
    """Two requests run at once where full depth has room for one."""
    blocks = LAYERS * ceil(8 + 40, 4)
    preemptions = {}
    for policy in (FullDepth(), UnifiedSkip(2)):
        engine = make_engine(blocks=blocks, depth=policy)
        outputs = engine.generate([list(range(8)), list(range(8, 16))], greedy(40), use_tqdm=False)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [40, 40]
        preemptions[policy.name] = engine.stats().num_preemptions
    assert preemptions == {"full": 1, "unified": 0}


def test_waking_table_keeps_blocks_and_shares_equal_ones(make_engine: MakeEngine) -> None:
    """A table that wakes layers up keeps their blocks and shares what is equal."""
    every = list(range(LAYERS))
    table = LayerTable([every, *[[0, 1]] * 9, every], on_skip="copy")
    engine = make_engine(depth=table)
    engine.add_request("a", list(range(8)), greedy(30))
    for _ in range(1 + 8):  # eight tokens at two layers: two blocks that six layers share with layer 1
        engine.step()
    assert engine.stats().kv_blocks_in_use == LAYERS * 2 + 2 * 2
    while engine.has_unfinished_requests():
        engine.step()
        engine.scheduler.check_integrity()
    assert engine.stats().kv_blocks_in_use == 0
