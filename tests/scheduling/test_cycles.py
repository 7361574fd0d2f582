"""A device that drafts and verifies by itself answers as where the host looks at every row."""

import random
from dataclasses import replace

import pytest
from batches import Request, assert_same, generate_as_alone, kv_is_back, run_together
from fixture_types import MakeEngine
from multi_step import Solo, greedy, unread
from stepping import see_steps

from d3engine import D3, Engine, FullDepth, LayerTable, Lossless, SelfSpeculative, SkipDecode, UnifiedSkip
from d3engine.depth import DepthPolicy
from d3engine.request.outputs import RequestOutput
from d3engine.request.params import RequestOutputKind
from d3engine.scheduling.plan import Plan

WAKING = [[0, 1, 2, 3, 4, 5], [0, 5], [0, 1, 5], [0, 2, 4], [1, 2, 3], [0]]
DRAFTING: list[DepthPolicy] = [
    Lossless(D3(0.9, 0.5), 3),
    Lossless(D3(0.8, 0.3), 5, adaptive=True),
    Lossless(D3(0.97, 0.7), 1),
    SelfSpeculative(UnifiedSkip(2), 4, adaptive=True),
    SelfSpeculative(SkipDecode(12, 2), 2),
    SelfSpeculative(LayerTable(WAKING, on_skip="project"), 3),
]

pytestmark = pytest.mark.usefixtures("native_library")


def counts(output: RequestOutput) -> list[int]:
    metrics = output.metrics
    return [metrics.num_drafted_tokens, metrics.num_accepted_tokens, metrics.num_verifications]


def watched(engine: Engine) -> list[Plan]:
    """The plans that the engine's executor is given from here on, as they were carried out."""
    plans: list[Plan] = []
    see_steps(engine, after=lambda plan, computed: plans.append(computed.carried_out(plan)))
    return plans


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    """Of all policies and lengths; some end by a token of their own, some are read along."""
    made = []
    for nth in range(12):
        params = greedy(DRAFTING[nth % len(DRAFTING)], 9 + 3 * nth)
        if nth % 3 == 0:
            params = replace(params, stop_token_ids=list(range(nth, 300, 23)))
        if nth % 2:
            params = unread(params)
        made.append(Request(tuple(range(40 + nth, 44 + 2 * nth)), params))
    return made


def test_cycles_begin_wherever_drafts_are(make_engine: MakeEngine, solo: Solo, requests: list[Request]) -> None:
    """Drafting sequences take cycles from wherever their drafts are."""
    # They come one after the other, so most are in the middle of a draft when the next one has its prompt.
    engine = make_engine(max_num_seqs=5)
    plans, begun = watched(engine), set()

    def look(plan: Plan) -> None:
        if plan.multi_step is not None and plan.multi_step.cycles:
            begun.update(len(sequence.draft.token_ids) for sequence in plan.sequences if sequence.draft)

    see_steps(engine, look)
    done = run_together(engine, requests, random.Random(5))
    for nth, request in enumerate(requests):
        assert_same(done[nth], solo(request))
        assert counts(done[nth]) == counts(solo(request)), request.params.depth
    runs = [plan for plan in plans if plan.multi_step is not None and plan.multi_step.cycles]
    assert any(plan.multi_step.control for plan in runs if plan.multi_step)
    assert begun > {0}
    assert engine.stats().native_steps == engine.stats().num_steps
    assert kv_is_back(engine)


@pytest.mark.parametrize("policy", DRAFTING[1:4:2], ids=repr)
def test_a_whole_answer_is_a_few_calls(make_engine: MakeEngine, solo: Solo, policy: DepthPolicy) -> None:
    engine = make_engine(max_num_seqs=4)
    plans = watched(engine)
    asked = [Request(tuple(range(30 + n, 33 + 3 * n)), greedy(policy, 30)) for n in range(3)]
    outputs = engine.generate([list(r.prompt) for r in asked], asked[0].params, use_tqdm=False)
    for output, request in zip(outputs, asked, strict=True):
        assert_same(output, solo(request))
        assert counts(output) == counts(solo(request))
    assert all(plan.multi_step is not None and plan.multi_step.cycles for plan in plans[1:])
    stats = engine.stats()
    assert stats.num_steps == 1 + sum(plan.num_steps for plan in plans[1:])
    assert 3 * len(plans) < stats.verifications


def test_stream_of_cycles_brings_each_token_and_may_be_left(make_engine: MakeEngine, solo: Solo) -> None:
    """A stream brings every token of its cycles and leaves at any of them."""
    engine = make_engine(max_num_seqs=2)
    request = Request(tuple(range(50, 60)), greedy(Lossless(D3(0.9, 0.5), 3), 40))
    params = replace(request.params, output_kind=RequestOutputKind.DELTA)
    wanted = solo(request).outputs[0]
    found = list(engine.stream(list(request.prompt), params))
    assert [token for output in found for token in output.outputs[0].token_ids] == wanted.token_ids
    assert [depth for output in found for depth in output.outputs[0].depths] == wanted.depths
    for place in range(1, 9):
        stream = engine.stream(list(request.prompt), params)
        for _ in range(place):
            next(stream)
        stream.close()
        engine.scheduler.check_integrity()
    assert engine.generate(list(request.prompt), params, use_tqdm=False)[0].outputs[0].token_ids == wanted.token_ids
    assert kv_is_back(engine)


@pytest.mark.parametrize("num_scheduler_steps", [1, 3])
def test_cycles_are_as_few_as_the_host_looks(make_engine: MakeEngine, solo: Solo, num_scheduler_steps: int) -> None:
    engine = make_engine(num_scheduler_steps=num_scheduler_steps)
    plans = watched(engine)
    request = Request(tuple(range(30, 37)), greedy(Lossless(D3(0.9, 0.5), 5), 12))
    assert_same(engine.generate(list(request.prompt), request.params, use_tqdm=False)[0], solo(request))
    found = {plan.multi_step.num_taken if plan.multi_step else 0 for plan in plans[1:]}
    assert found == ({0} if num_scheduler_steps == 1 else {1})


def test_row_without_drafts_makes_the_host_look_at_all(make_engine: MakeEngine, solo: Solo) -> None:
    """A row that does not draft makes the host look at every row of those that do."""
    engine = make_engine()
    plans = watched(engine)
    asked = [Request(tuple(range(30, 37)), greedy(DRAFTING[0], 20)), Request(tuple(range(9)), greedy(FullDepth(), 9))]
    generate_as_alone(engine, asked, solo)
    assert {plan.multi_step for plan in plans if len(plan.slots) == 2} == {None}
    assert [plan.multi_step is not None for plan in plans if len(plan.slots) == 1] == [True]  # once the other has ended
