"""Layers with a sliding window answer as transformers' own, however the engine cuts, repeats and drafts its work."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from batches import Request, kv_is_back, run_together
from depth_oracle import ActiveLayers, d3, greedy_at_depth, unified_skip, window_of
from tiny_models import TINY, TinyLlama, random_prompts, save_random
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers_oracle import assert_same_tokens

from d3engine import D3, Engine, FullDepth, Lossless, SamplingParams, SelfSpeculative, UnifiedSkip
from d3engine.depth import DepthPolicy
from d3engine.loading import resolve

LAYERS, WINDOW, LONGEST = 5, 6, 40
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


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyLlama:
    torch.manual_seed(0)
    sizes = TINY | {"num_hidden_layers": LAYERS, "hidden_size": 32, "intermediate_size": 48}
    config = Qwen3Config(**sizes, use_sliding_window=True, sliding_window=WINDOW, layer_types=KINDS)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tiny = save_random(tmp_path_factory.mktemp("windows"), model)
    assert [window_of(layer) for layer in tiny.model.model.layers] == [WINDOW, None, WINDOW, WINDOW, None]
    return tiny


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


@pytest.mark.parametrize("executor", ["eager", "graphs", "native"])
@pytest.mark.parametrize(("rows", "seed"), [(7, 0), (17, 1), (512, 2)])
def test_requests_that_share_batches_and_are_preempted_answer_as_transformers_layers(
    tiny: TinyLlama, executor: str, rows: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolve, "executor_for", lambda *given: executor)
    requests, numbers = requests_of(seed, 21), random.Random(seed)

    def disturb(engine: Engine) -> None:
        for sequence in engine.scheduler.running:
            if numbers.random() < 0.03:
                engine.scheduler._preempt(sequence)

    options: dict[str, Any] = {"block_size": 4, "max_num_batched_tokens": rows, "max_num_seqs": min(rows - 5, 7)}
    with Engine(tiny.directory, skip_tokenizer_init=True, dtype="float32", max_model_len=128, **options) as engine:
        done = run_together(engine, [request for request, _, _ in requests], random.Random(seed), before_step=disturb)
        stats = engine.stats()
        assert stats.num_preemptions > 0
        assert stats.cached_prompt_tokens > 0
        assert kv_is_back(engine)
    for nth, (request, active, on_skip) in enumerate(requests):
        (found,) = done[nth].outputs
        answer = greedy_at_depth(tiny.model, list(request.prompt), len(found.token_ids), active, on_skip)
        assert_same_tokens(found.token_ids, answer)
