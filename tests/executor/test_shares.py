"""A step shared out computes what it does undivided, and rows of the native library do not meet PyTorch's."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from batches import CONFIG, LAYERS, POLICIES, Request, assert_same, block_bytes, run_together, some_requests
from fixture_types import MakeEngine

from d3engine import D3, DraftAndVerify, Lossless, SelfSpeculative
from d3engine.depth import DepthPolicy
from d3engine.executor.eager import EagerExecutor
from d3engine.executor.interface import Computed
from d3engine.executor.shares import joined, share_of
from d3engine.request.outputs import RequestOutput
from d3engine.request.params import pooling_params
from d3engine.scheduling.plan import Plan

DRAFTING = [Lossless(D3(0.9, 0.5)), SelfSpeculative(D3(0.8, 0.3)), DraftAndVerify(skip_attention=(1, 4), skip_mlp=(3,))]


def policies_of(looked_at: bool) -> list[DepthPolicy]:
    """Those at whose steps the host looks between layers, or the others."""

    def is_left(policy: DepthPolicy) -> bool:
        return policy.exit_rule(LAYERS) is not None or policy.schedule(LAYERS).on_skip == "project"

    return [policy for policy in POLICIES if is_left(policy) == looked_at]


class SharedOut:
    """An eager executor whose steps are divided, sequence by sequence, at random."""

    def __init__(self, executor: EagerExecutor, numbers: random.Random) -> None:
        self._executor = executor
        self._run = executor.run
        self._numbers = numbers
        self.kinds: set[str] = set()  # of what was in a step that was divided

    def run(self, plan: Plan) -> Computed:
        slots = np.unique(plan.slots)
        taken = slots[[self._numbers.random() < 0.5 for _ in slots]]
        if not 0 < taken.size < slots.size:
            return self._run(plan)
        self._note(plan)
        inside = np.isin(plan.slots, taken)
        self._executor.copy_entries(plan.copies_before)
        shares = [share_of(plan, which.nonzero()[0]) for which in (inside, ~inside)]
        found = [(share, self._run(share.plan)) for share in shares]
        self._executor.copy_entries(plan.copies_after)
        return joined(plan, found)

    def _note(self, plan: Plan) -> None:
        drafts = plan.drafts
        there = {
            "copies": plan.copies_after is not None,
            "exits": bool(plan.exits),
            "projections": any(span.projected_rows is not None for span in plan.spans),
            "rows apart": any(span.rows is not None for span in plan.spans),
            "halves": any(span.part != "layer" for span in plan.spans),
            "prompt rows": bool(plan.prompt_rows),
            "captured rows": bool(plan.captured),
            "steered rows": bool(plan.steered),
            "proposing": drafts is not None and bool(drafts.proposing),
            "judging": drafts is not None and bool(drafts.judging),
            "kept": drafts is not None and bool(drafts.kept),
            "resumed": drafts is not None and bool(drafts.resumed),
        }
        self.kinds |= {kind for kind, is_there in there.items() if is_there}


KINDS = {
    *("copies", "exits", "projections", "rows apart", "halves", "prompt rows", "captured rows", "steered rows"),
    *("proposing", "judging", "kept"),
}


def test_a_step_shared_out_computes_what_it_does_undivided(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = some_requests(4, 40)
    for nth in range(0, len(requests), 3):
        params = replace(requests[nth].params, depth=DRAFTING[nth // 3 % len(DRAFTING)])
        requests[nth] = Request(requests[nth].prompt, params)
    for nth in range(1, len(requests), 6):
        requests[nth] = Request(requests[nth].prompt, pooling_params("mean"))
    for nth in range(2, len(requests), 6):
        params = replace(requests[nth].params, capture=range(LAYERS + 1))
        if params.depth is None or params.depth.exit_rule(LAYERS) is None:
            params = replace(params, steer={1: [0.5] * int(CONFIG["hidden_size"])})
        requests[nth] = Request(requests[nth].prompt, params)
    arguments: dict[str, Any] = {"enforce_eager": True, "max_num_batched_tokens": 40}
    alone = make_engine(enable_prefix_caching=False, **arguments)
    engine = make_engine(**arguments)
    assert isinstance(engine.executor, EagerExecutor)
    shared = SharedOut(engine.executor, random.Random(4))
    monkeypatch.setattr(engine.executor, "run", shared.run)
    found = run_together(engine, requests, random.Random(4))
    assert shared.kinds == KINDS | {"resumed"}
    for nth, request in enumerate(requests):
        (wanted,) = alone.generate(list(request.prompt), request.params, use_tqdm=False)
        assert_same(found[nth], wanted)
        if wanted.embedding is not None:
            assert np.allclose(found[nth].embedding, wanted.embedding, atol=1e-5)


def bits(output: RequestOutput) -> list[Any]:
    """Tokens, and every log-probability as it is."""
    return [
        (one.token_ids, [{token: entry.logprob for token, entry in row.items()} for row in one.logprobs or []])
        for one in output.outputs
    ]


@pytest.mark.usefixtures("native_library")
@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_native_rows_keep_their_bits_in_any_company(make_engine: MakeEngine, cache: str) -> None:
    """Rows of the library keep their tokens and bits among rows that the host looks at and half layers of PyTorch."""
    looked_at, own = policies_of(looked_at=True), policies_of(looked_at=False)
    kinds = [(looked_at, own)[nth % 2][nth // 2 % 7] for nth in range(28)]
    kinds[::9] = [DRAFTING[-1]] * len(kinds[::9])
    requests = [
        Request(request.prompt, replace(request.params, logprobs=3, depth=depth))
        for request, depth in zip(some_requests(2, 28), kinds, strict=True)
    ]
    together = make_engine(
        max_num_batched_tokens=24, kv_cache_dtype=cache, kv_cache_memory_bytes=LAYERS * 20 * block_bytes(cache)
    )
    found = run_together(together, requests, random.Random(2))
    stats = together.stats()
    assert stats.num_preemptions > 0
    assert stats.cached_prompt_tokens > 0
    assert stats.eager_steps > 5, "else no half layer ran beside them"
    alone = make_engine(kv_cache_dtype=cache, enable_prefix_caching=False)
    for nth, request in enumerate(requests):
        if kinds[nth] is DRAFTING[-1]:
            continue
        (wanted,) = alone.generate(list(request.prompt), request.params, use_tqdm=False)
        assert [one.token_ids for one in found[nth].outputs] == [one.token_ids for one in wanted.outputs]
        if kinds[nth].schedule(LAYERS).on_skip != "project":  # by PyTorch
            assert bits(found[nth]) == bits(wanted)
    assert alone.stats().eager_steps == 0
