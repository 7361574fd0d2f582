"""A model that is spread over ranks answers as one that is not: parts, sums and messages, with threads as ranks."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import BLOCK, LAYERS, MAX_LENGTH, assert_same, kv_is_back, run_together, some_requests
from fixture_types import MakeLlama, MakePrompts
from rank_tests import engine_of, left_to_test_parallel
from thread_ranks import ThreadRanks, over_threads
from tiny_models import TINY, save_random
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma3TextConfig, PreTrainedConfig

from d3engine import D3, Engine, Lossless, RequestOutput, SamplingParams, SelfSpeculative, UnifiedSkip
from d3engine.depth import DepthPolicy
from d3engine.engine import resolve
from d3engine.weights_tools.quantize import quantize_model

LAYOUTS: dict[str, dict[str, Any]] = {
    "grouped-query": {"num_key_value_heads": 2},
    "multi-head": {"num_key_value_heads": 4},
    "multi-query, so that ranks hold the same key head": {"num_key_value_heads": 1},
    "three key heads, dealt out unevenly": {"num_attention_heads": 6, "num_key_value_heads": 3},
    "tied embeddings": {"tie_word_embeddings": True},
    "biases, which are added once": {"attention_bias": True, "mlp_bias": True},
    "odd sizes": {"vocab_size": 123, "hidden_size": 45, "intermediate_size": 53, "num_attention_heads": 5}
    | {"num_key_value_heads": 5, "head_dim": 14},
}


KINDS = ["sliding_attention", "full_attention", "sliding_attention"]


def answers(engine: Engine, prompts: list[list[int]], **params: Any) -> list[Any]:
    asked = SamplingParams(**{"temperature": 0, "max_tokens": 12, "ignore_eos": True} | params)
    with engine:
        outputs = engine.generate(prompts, asked, use_tqdm=False)
    return [(output.outputs[0].token_ids, output.outputs[0].depths) for output in outputs]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_model_over_ranks_answers_as_one_that_is_whole(
    name: str, size: int, tiny_llama: MakeLlama, make_prompts: MakePrompts
) -> None:
    if size > 2:
        left_to_test_parallel()
    directory, model = tiny_llama(**LAYOUTS[name])
    prompts = make_prompts([1, 9, 17], vocab_size=model.config.vocab_size)
    wanted = answers(engine_of(directory), prompts)
    assert answers(over_threads(engine_of(directory), size), prompts) == wanted


def run_mixed(engine: Engine, seed: int) -> dict[int, RequestOutput]:
    """Requests of every policy and kind of sampling, with common beginnings, in little memory."""
    requests = some_requests(seed, 12)
    with engine:
        done = run_together(engine, requests, random.Random(seed))
        stats = engine.stats()
        if seed == 0:  # other seeds have what they happen to have
            assert stats.num_preemptions > 0
            assert stats.cached_prompt_tokens > 0
        assert kv_is_back(engine)
    return done


@pytest.mark.parametrize(
    ("seed", "graphs", "size"), [(0, True, 2), (0, False, 4), (0, True, 4), (1, False, 2), (3, True, 2), (5, True, 4)]
)
def test_every_policy_and_sampling_answers_alike_over_ranks(
    seed: int, graphs: bool, size: int, tiny_llama: MakeLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every policy and sampling, preempted and with prefix hits, answers alike over ranks."""
    if seed or size > 2:
        left_to_test_parallel()
    directory, _ = tiny_llama(num_hidden_layers=LAYERS, max_position_embeddings=MAX_LENGTH)
    blocks = LAYERS * -(-46 // BLOCK)
    options: dict[str, Any] = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 24,
        "kv_cache_memory_bytes": blocks * 2 * BLOCK * 2 * 16 * 4,
    }
    wanted = run_mixed(engine_of(directory, **options), seed)
    if graphs:
        monkeypatch.setattr(resolve, "executor_for", lambda *_: "graphs")
        options |= {"enforce_eager": False, "num_scheduler_steps": 5}  # so that runs become longer
    engine = over_threads(engine_of(directory, **options), size)
    found = run_mixed(engine, seed)
    assert found.keys() == wanted.keys()
    for nth, output in found.items():
        assert_same(output, wanted[nth])


def test_ranks_hear_of_runs_that_become_longer(
    tiny_llama: MakeLlama, make_prompts: MakePrompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs of 3 steps, made longer while they are under way, answer over ranks as steps of one process."""
    directory, _ = tiny_llama(num_key_value_heads=2, num_hidden_layers=LAYERS)
    prompts = make_prompts([3, 14])
    params: dict[str, Any] = {"depth": D3(0.9, 0.3), "max_tokens": 30}
    wanted = answers(engine_of(directory), prompts, **params)
    monkeypatch.setattr(resolve, "executor_for", lambda *_: "graphs")
    engine = over_threads(engine_of(directory, enforce_eager=False, num_scheduler_steps=3), 2)
    assert answers(engine, prompts, **params) == wanted


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize(
    ("kind", "changes"), [(Gemma2Config, {"attn_logit_softcapping": 0.5}), (Gemma3TextConfig, {"layer_types": KINDS})]
)
def test_norms_behind_and_soft_caps_answer_alike_over_ranks(
    kind: type[PreTrainedConfig],
    changes: dict[str, Any],
    graphs: bool,
    make_prompts: MakePrompts,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Layers with norms behind and soft caps answer alike over two ranks."""
    torch.manual_seed(0)
    config = kind(**(TINY | changes), sliding_window=4)
    directory, _ = save_random(tmp_path, AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    prompts = make_prompts([3, 14])
    params: dict[str, Any] = {"depth": D3(0.8, 0.3), "temperature": 0.7, "seed": 5}
    wanted = answers(engine_of(directory), prompts, **params)
    if graphs:
        monkeypatch.setattr(resolve, "executor_for", lambda *_: "graphs")
    assert answers(over_threads(engine_of(directory, enforce_eager=not graphs), 2), prompts, **params) == wanted


@pytest.mark.parametrize("policy", [Lossless(D3(0.8, 0.3), 4), SelfSpeculative(UnifiedSkip(2), 3)], ids=repr)
def test_drafts_are_verified_over_two_ranks(
    policy: DepthPolicy, tiny_llama: MakeLlama, make_prompts: MakePrompts
) -> None:
    if not isinstance(policy, Lossless):
        left_to_test_parallel()
    directory, _ = tiny_llama(num_hidden_layers=LAYERS, max_position_embeddings=MAX_LENGTH)
    prompts = make_prompts([5, 11])
    for temperature in (0.0, 1.5):
        params = {"depth": policy, "temperature": temperature, "seed": 3}
        wanted = answers(engine_of(directory), prompts, **params)
        assert answers(over_threads(engine_of(directory), 2), prompts, **params) == wanted


def test_hidden_states_are_captured_alike_over_two_ranks(tiny_llama: MakeLlama, make_prompts: MakePrompts) -> None:
    directory, _ = tiny_llama(num_hidden_layers=LAYERS)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, capture=range(LAYERS + 1))
    wanted, found = (
        engine.generate(make_prompts([5, 11]), params, use_tqdm=False)
        for engine in (engine_of(directory), over_threads(engine_of(directory), 2))
    )
    for one, other in zip(found, wanted, strict=True):
        assert one.outputs[0].hidden_states is not None
        assert_same(one, other)


@pytest.mark.parametrize(("scheme", "is_tied"), [("int8", True), ("int4", False), ("fp8", False)])
def test_quantized_matrices_answer_alike_over_two_ranks(
    scheme: str, is_tied: bool, tiny_llama: MakeLlama, make_prompts: MakePrompts, tmp_path: Path
) -> None:
    sizes = {"head_dim": 64, "intermediate_size": 256, "tie_word_embeddings": is_tied}
    quantize_model(tiny_llama(**sizes).directory, tmp_path / scheme, scheme)
    prompts = make_prompts([3, 14])
    wanted = answers(engine_of(tmp_path / scheme), prompts)
    assert answers(over_threads(engine_of(tmp_path / scheme), 2), prompts) == wanted


def test_decoding_step_is_sent_by_what_has_changed(tiny_llama: MakeLlama, make_prompts: MakePrompts) -> None:
    """A step of decoding is sent as what has changed and not as its tables."""
    directory, _ = tiny_llama(num_hidden_layers=LAYERS)
    engine = over_threads(engine_of(directory, max_model_len=512, max_num_seqs=8), 2)
    ranks = engine.executor
    assert isinstance(ranks, ThreadRanks)
    answers(engine, make_prompts([40] * 8))
    assert engine.scheduler.cache.tables.nbytes > 20_000
    assert 0 < max(ranks.bytes_sent[1:]) < 3_000


def test_skipped_layer_needs_no_sum_and_a_running_one_two(tiny_llama: MakeLlama, make_prompts: MakePrompts) -> None:
    """A layer that is skipped needs no sum and one that runs two."""
    directory, _ = tiny_llama(num_hidden_layers=LAYERS)
    engine = over_threads(engine_of(directory), 2)
    ranks = engine.executor
    assert isinstance(ranks, ThreadRanks)
    ((_, depths),) = answers(engine, make_prompts([5]), depth=D3(0.8, 0.3))
    assert min(depths) < LAYERS
    assert ranks.sums == [1 + 2 * depth for depth in depths]  # one is the embedding's
