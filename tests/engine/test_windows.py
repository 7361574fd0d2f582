"""Layers with a sliding window answer as transformers' own, however the engine cuts, repeats and drafts its work.
So do layers with norms behind their sublayers, with soft caps, and with another rope where they have a window."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from batches import Request, kv_is_back, preempting, run_together
from depth_oracle import ActiveLayers, d3, greedy_at_depth, unified_skip, window_of
from tiny_models import TINY, TinyLlama, random_prompts, save_random
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    Olmo3Config,
    PreTrainedConfig,
    Qwen3Config,
)
from transformers_oracle import assert_same_tokens

from d3engine import D3, Engine, FullDepth, Lossless, SamplingParams, SelfSpeculative, UnifiedSkip
from d3engine.depth import DepthPolicy
from d3engine.engine import resolve

LAYERS, WINDOW, LONGEST = 5, 6, 40
KV_BYTES = 160 * 2 * 4 * TINY["num_key_value_heads"] * TINY["head_dim"] * 4
"""Of 160 blocks of 4 entries: two texts of 64 tokens in five layers, or four where three layers have a window."""
KINDS = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"]


def everything(step: int) -> set[int]:
    return set(range(LAYERS))


POLICIES: list[tuple[DepthPolicy, ActiveLayers, str]] = [
    (FullDepth(), everything, "none"),
    (D3(0.9, 0.4), d3(LAYERS, 0.9, 0.4), "none"),
    (D3(0.8, 0.2, on_skip="copy"), d3(LAYERS, 0.8, 0.2), "copy"),
    (UnifiedSkip(1.6, on_skip="copy"), unified_skip(LAYERS, 1.6), "copy"),
    (UnifiedSkip(1.6, on_skip="project"), unified_skip(LAYERS, 1.6), "project"),
    (Lossless(D3(0.7, 0.3), 3), everything, "none"),
    (SelfSpeculative(UnifiedSkip(1.6), 4), everything, "none"),
]
"""Each with the layers that its tokens run, and what it leaves in the others."""


FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "Qwen3": (Qwen3Config, {"use_sliding_window": True}),
    "OLMo 3": (Olmo3Config, {"head_dim": None}),
    "Gemma 2": (Gemma2Config, {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 4}),
    "Gemma 3": (Gemma3TextConfig, {}),
}
MakeTiny = Callable[[str], TinyLlama]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> MakeTiny:
    made: dict[str, TinyLlama] = {}

    def make(family: str) -> TinyLlama:
        if family in made:
            return made[family]
        torch.manual_seed(0)
        kind, changes = FAMILIES[family]
        sizes = TINY | {"num_hidden_layers": LAYERS, "hidden_size": 32, "intermediate_size": 48} | changes
        sizes = {name: value for name, value in sizes.items() if (name, value) != ("head_dim", None)}
        config = kind(**sizes, sliding_window=WINDOW, layer_types=KINDS)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        made[family] = save_random(tmp_path_factory.mktemp("windows"), model)
        windows = [window_of(layer) for layer in made[family].model.model.layers]
        assert windows == [WINDOW, None, WINDOW, WINDOW, None]
        return made[family]

    return make


def requests_of(seed: int, count: int) -> list[tuple[Request, ActiveLayers, str]]:
    """Under each policy in turn; many begin alike."""
    numbers = random.Random(seed)
    bases = random_prompts([LONGEST, LONGEST], seed=seed)
    found = []
    for nth in range(count):
        policy, active, on_skip = POLICIES[nth % len(POLICIES)]
        length, shared = numbers.randint(1, LONGEST), numbers.choice([0, 12, 30])
        prompt = (numbers.choice(bases)[:shared] + random_prompts([LONGEST], seed=nth)[0])[:length]
        params = SamplingParams(temperature=0, max_tokens=numbers.randint(1, 24), ignore_eos=True, depth=policy)
        found.append((Request(tuple(prompt), params), active, on_skip))
    return found


@pytest.mark.parametrize(
    ("family", "rows", "seed"),
    [("Qwen3", 7, 0), ("Qwen3", 17, 1), ("Qwen3", 512, 2), ("OLMo 3", 17, 3), ("Gemma 2", 17, 4), ("Gemma 3", 17, 5)],
)
def test_windowed_requests_answer_as_transformers_layers(
    tiny: MakeTiny, family: str, rows: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that share batches and are preempted answer as transformers' layers, whatever decodes."""
    directory, model = tiny(family)
    requests, active, on_skip = zip(*requests_of(seed, 21), strict=True)
    answers = [
        greedy_at_depth(model, list(one.prompt), one.params.max_tokens, layers, rule)
        for one, layers, rule in zip(requests, active, on_skip, strict=True)
    ]
    options: dict[str, Any] = {"block_size": 4, "max_num_batched_tokens": rows, "max_num_seqs": min(rows - 5, 7)}
    for executor in ("eager", "graphs", "native"):
        monkeypatch.setattr(resolve, "executor_for", lambda *given, executor=executor: executor)
        disturb = preempting(random.Random(seed), 0.03)
        with Engine(directory, skip_tokenizer_init=True, dtype="float32", max_model_len=128, **options) as engine:
            done = run_together(engine, list(requests), random.Random(seed), before_step=disturb)
            stats = engine.stats()
            assert stats.num_preemptions > 0
            assert stats.cached_prompt_tokens > 0
            assert kv_is_back(engine)
        for nth, answer in enumerate(answers):
            assert_same_tokens(done[nth].outputs[0].token_ids, answer)


@pytest.mark.parametrize("policy", [FullDepth(), D3(0.8, 0.2, on_skip="copy")], ids=repr)
def test_blocks_behind_a_window_are_given_back_at_each_step(tiny: MakeTiny, policy: DepthPolicy) -> None:
    """Of the layers with a window a text holds the blocks in it alone, and no layer saves anything else."""
    prompt, size = random_prompts([21])[0], 4
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    options: dict[str, Any] = {"block_size": size, "num_scheduler_steps": 1, "enable_prefix_caching": False}
    with Engine(tiny("Qwen3").directory, skip_tokenizer_init=True, depth=policy, **options) as engine:
        engine.add_request("a", prompt, params)
        for step in range(19):
            engine.step()
            length = len(prompt) + step
            blocks, behind = -(-length // size), (length + 1 - WINDOW) // size
            held = LAYERS * blocks - 3 * behind
            stats = engine.stats()
            assert stats.kv_blocks_in_use == held if policy == FullDepth() else stats.kv_blocks_in_use <= held
            assert (stats.kv_bytes_saved == 0) == (policy == FullDepth() or stats.kv_blocks_in_use == held)
            engine.scheduler.check_integrity()


def test_a_pool_that_few_whole_texts_fill_runs_more_with_windows(tiny: MakeTiny) -> None:
    """Blocks behind windows serve other texts: where these do not fit side by side, none is preempted."""
    found = []
    prompts = random_prompts([8, 8, 8])
    params = SamplingParams(temperature=0, max_tokens=56, ignore_eos=True)
    for window in (WINDOW, None):
        directory = tiny("Qwen3").directory
        options: dict[str, Any] = {"block_size": 4, "enable_prefix_caching": False, "kv_cache_memory_bytes": KV_BYTES}
        with Engine(directory, skip_tokenizer_init=True, dtype="float32", max_model_len=64, **options) as engine:
            if window is None:
                engine.scheduler.cache.has_windows = False
            outputs = engine.generate(prompts, params, use_tqdm=False)
            found.append(([output.outputs[0].token_ids for output in outputs], engine.stats().num_preemptions))
    (tokens, preemptions), (plain_tokens, plain_preemptions) = found
    assert tokens == plain_tokens
    assert preemptions == 0 < plain_preemptions
