"""`batch_invariant=True` on a CPU: the same bits by the native library, and what would take others along is refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from batches import LAYERS, POLICIES, Request, block_bytes, preempting, run_together, some_requests

from d3engine import D3, DraftAndVerify, EarlyExit, Engine, InvalidValueError, SamplingParams
from d3engine.depth import DepthPolicy
from d3engine.request.outputs import RequestOutput

SKIPPING = [
    policy
    for policy in POLICIES
    if policy.exit_rule(LAYERS) is None and policy.schedule(LAYERS).on_skip in ("none", "copy")
]


def bits(output: RequestOutput) -> list[Any]:
    """Tokens, and every log-probability as it is."""
    return [
        (one.token_ids, [{token: entry.logprob for token, entry in row.items()} for row in one.logprobs or []])
        for one in output.outputs
    ]


@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_log_probabilities_are_the_same_bits_whoever_comes_beside_and_whatever_is_cut_preempted_or_cached(
    make_engine: Callable[..., Engine], cache: str
) -> None:
    requests = [
        Request(request.prompt, replace(request.params, logprobs=3, depth=SKIPPING[nth % len(SKIPPING)]))
        for nth, request in enumerate(some_requests(0, 12))
    ]
    numbers = random.Random(0)

    invariant: dict[str, Any] = {"batch_invariant": True, "kv_cache_dtype": cache}
    memory = LAYERS * 30 * block_bytes(cache)
    together = make_engine(max_num_batched_tokens=9, max_num_seqs=7, kv_cache_memory_bytes=memory, **invariant)
    found = run_together(together, requests, random.Random(0), before_step=preempting(numbers, 0.1))
    stats = together.stats()
    assert stats.num_preemptions > 10
    assert stats.cached_prompt_tokens > 0
    assert stats.eager_steps == 0
    alone = make_engine(enable_prefix_caching=False, **invariant)
    for nth, request in enumerate(requests):
        (wanted,) = alone.generate(list(request.prompt), request.params, use_tqdm=False)
        assert bits(found[nth]) == bits(wanted)


@pytest.mark.parametrize(
    ("policy", "allowed"),
    [
        (EarlyExit(0.9, on_skip="copy"), "without early exits"),
        (D3(0.9, 0.5, on_skip="project"), 'with on_skip="none" or "copy"'),
        (DraftAndVerify(skip_mlp=(3,)), "one whose own layers draft nothing"),
    ],
)
def test_a_policy_that_pytorch_would_run_is_refused_in_a_request_and_in_an_engine(
    make_engine: Callable[..., Engine], policy: DepthPolicy, allowed: str
) -> None:
    engine = make_engine(batch_invariant=True)
    with pytest.raises(InvalidValueError, match=r"batch_invariant=True") as caught:
        engine.generate([1, 2], SamplingParams(depth=policy), use_tqdm=False)
    assert caught.value.field == "depth"
    assert allowed in caught.value.allowed
    with pytest.raises(InvalidValueError, match=r"batch_invariant=True"):
        make_engine(batch_invariant=True, depth=policy)


@pytest.mark.parametrize(
    ("arguments", "allowed"),
    [
        ({"enforce_eager": True}, "False on a CPU without the native library"),
        ({"dtype": "bfloat16"}, "False on a CPU without the native library"),
        ({"backend": "torch"}, "False on a CPU without the native library"),
    ],
)
def test_an_engine_whose_sums_have_no_fixed_order_is_refused_by_name(
    make_engine: Callable[..., Engine],
    arguments: dict[str, Any],
    allowed: str,
) -> None:
    with pytest.raises(InvalidValueError) as caught:
        make_engine(batch_invariant=True, **arguments)
    assert (caught.value.field, caught.value.value) == ("batch_invariant", True)
    assert caught.value.allowed.startswith(allowed)


def test_ranks_whose_sums_have_no_fixed_order_are_refused_by_name() -> None:
    with pytest.raises(InvalidValueError, match=r"batch_invariant must be False beside tensor_parallel_size=2, .*True"):
        Engine("demo", batch_invariant=True, tensor_parallel_size=2, device="cpu")


def test_the_switch_is_true_or_false(make_engine: Callable[..., Engine]) -> None:
    with pytest.raises(InvalidValueError, match=r"batch_invariant must be True or False; got 'yes'"):
        make_engine(batch_invariant="yes")
