"""A step of prompts and the run behind it are one plan: what comes of them is what each brings alone."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from batches import LAYERS, Request, assert_same, block_bytes, kv_is_back
from fixture_types import MakeEngine
from multi_step import Solo, greedy, not_finite, unread
from stepping import finish, watch

from d3engine import D3, DraftAndVerify, Engine, FullDepth, SamplingParams
from d3engine.executor.sampler import FAULT
from d3engine.request.params import RequestOutputKind
from d3engine.scheduling.plan import Plan

PROMPT, OTHER = tuple(range(50, 60)), tuple(range(20, 25))


@pytest.fixture
def native(native_library: None, make_engine: MakeEngine) -> Callable[..., Engine]:
    """`make_engine` on the native library, with runs of 16 steps."""

    def make(**changes: Any) -> Engine:
        return make_engine(**({"num_scheduler_steps": 16} | changes))

    return make


def add(engine: Engine, *requests: Request) -> None:
    """Queue them, by their numbers, for nobody who reads along."""
    for request in requests:
        name = str(engine.get_num_unfinished_requests())
        engine.add_request(name, list(request.prompt), unread(request.params))


def openings(plans: list[Plan]) -> list[int]:
    """The steps of each plan that opens a run."""
    return [plan.num_steps for plan in plans if plan.multi_step is not None and plan.multi_step.opens]


def test_unread_prompt_and_answer_are_one_plan(native: MakeEngine, solo: Solo) -> None:
    """A prompt and its answer are one plan where no caller streams it."""
    engine, request = native(), Request(PROMPT, greedy(D3(0.9, 0.5), 16))
    plans = watch(engine)
    assert_same(engine.generate(list(PROMPT), request.params, use_tqdm=False)[0], solo(request))
    assert openings(plans) == [16] == [plan.num_steps for plan in plans]
    stats = engine.stats()
    assert (stats.num_steps, stats.native_steps, stats.eager_steps) == (16, 16, 0)
    assert kv_is_back(engine)


def test_prompts_open_a_run_for_answers_of_any_age_beside_them(native: MakeEngine, solo: Solo) -> None:
    engine = native(num_scheduler_steps=4, max_num_batched_tokens=8)  # so that longer prompts come in pieces
    drawn = SamplingParams(temperature=1.5, top_p=0.9, seed=5, max_tokens=21, ignore_eos=True, depth=D3(0.9, 0.5))
    requests = [Request(tuple(range(n, n + 3 + 2 * n)), greedy(D3(0.9, 0.5), 12 + n)) for n in range(6)]
    requests += [Request(PROMPT, drawn), Request(OTHER, replace(drawn, seed=6, top_p=1.0))]
    plans = watch(engine)
    found = {}
    for number, request in enumerate(requests):
        engine.add_request(str(number), list(request.prompt), unread(request.params))
        for _ in range(3):
            found |= {output.request_id: output for output in engine.step()}
            engine.scheduler.check_integrity()
    found |= finish(engine)
    for number, request in enumerate(requests):
        assert_same(found[str(number)], solo(request))
    beside = [plan for plan in plans if plan.multi_step is not None and plan.multi_step.opens and plan.steps.max() >= 1]
    assert beside
    assert kv_is_back(engine)


def test_answer_of_one_token_has_no_row_in_the_run(native: MakeEngine, solo: Solo) -> None:
    """An answer that ends with its first token has no row in the run."""

    def ending(prompt: tuple[int, ...]) -> Request:
        first = solo(Request(prompt, greedy(policy))).outputs[0].token_ids[0]
        return Request(prompt, greedy(policy, stop_token_ids=[first]))

    engine, policy = native(), D3(0.8, 0.3)
    going_on = [Request(tuple(range(n, n + 4)), greedy(policy)) for n in (3, 9)]
    plans = watch(engine)
    for requests in ([ending(PROMPT)], [ending(PROMPT), ending(OTHER)], [going_on[0], ending(PROMPT), going_on[1]]):
        before = engine.stats().native_steps
        add(engine, *requests)
        found = finish(engine)
        for number, request in enumerate(requests):
            assert_same(found[str(number)], solo(request))
        if going_on[0] not in requests:
            assert engine.stats().native_steps - before == 1, "there was nobody to run for"
        assert kv_is_back(engine)
    assert len(openings(plans)) == 3


def test_prompt_that_is_not_finite_ends_alone_without_a_row(native: MakeEngine, solo: Solo) -> None:
    """A prompt whose logits are not finite ends alone and has no row in the run."""
    healthy = Request(OTHER, greedy(D3(0.8, 0.3)))
    wanted = solo(healthy)
    spoilt = next(token for token in range(200, 300) if token not in wanted.outputs[0].token_ids)
    engine = native()
    with not_finite(engine, spoilt):
        faulty = Request((spoilt, 5), greedy(D3(0.8, 0.3)))
        add(engine, faulty)
        alone = finish(engine)["0"]
        assert engine.stats().native_steps == 1
        add(engine, faulty, healthy)
        beside = finish(engine)
    for (broken,) in (alone.outputs, beside["0"].outputs):
        assert (broken.token_ids, broken.finish_reason, broken.stop_reason) == ([], "abort", FAULT)
    assert_same(beside["1"], wanted)
    assert kv_is_back(engine)


def test_first_token_of_an_answer_at_once_is_older(native: MakeEngine) -> None:
    """The first token of an answer that comes at once is older than the last."""
    engine = native()
    (output,) = engine.generate(list(PROMPT), greedy(FullDepth(), 12), use_tqdm=False)
    times = output.metrics
    assert times.first_scheduled_time is not None
    assert times.first_token_time is not None
    assert times.last_token_time is not None
    assert times.first_scheduled_time < times.first_token_time < times.last_token_time
    stats = engine.stats()
    assert stats.step_rows.sum == len(PROMPT) + 11
    assert stats.step_rows.count == stats.step_seconds.count == 12


def test_run_behind_an_opening_takes_blocks_for_its_layers(native: MakeEngine) -> None:
    """The run behind an opening takes blocks for the layers that it runs."""
    # Ten tokens and fifteen of the run are seven blocks of four, where a prompt of ten has three.
    engine, policy = native(), D3(0.9, 0.5)
    engine.add_request("one", list(PROMPT), unread(greedy(policy, 40)))
    seen: list[int] = []
    update = engine.scheduler.update

    def looking(*given: Any) -> Any:
        seen.append(engine.scheduler.cache.pool.num_held)
        return update(*given)

    engine.scheduler.update = looking  # type: ignore[method-assign]
    engine.step()
    depth = int(policy.schedule(LAYERS).depths(2)[1])
    assert 0 < depth < LAYERS
    assert seen == [depth * 7 + (LAYERS - depth) * 3]


def test_prompt_without_room_for_a_run_is_computed_alone(native: MakeEngine, solo: Solo) -> None:
    """A prompt is computed alone where there is no room for a run."""
    # Two prompts of two blocks take all the memory; the one that is sent away comes again as it was.
    requests = [Request(tuple(range(n, n + 8)), greedy(FullDepth(), 8)) for n in (20, 40)]
    engine = native(kv_cache_memory_bytes=LAYERS * 4 * block_bytes(), enable_prefix_caching=False)
    plans = watch(engine)
    add(engine, *requests)
    engine.step()
    assert (openings(plans), len(plans), plans[0].multi_step) == ([], 1, None)
    found = finish(engine)
    for number, request in enumerate(requests):
        assert_same(found[str(number)], solo(request))
    assert engine.stats().num_preemptions == 1
    assert kv_is_back(engine)


def test_a_prompt_that_opened_a_run_is_shared_with_later_ones(native: MakeEngine, solo: Solo) -> None:
    engine, request = native(), Request(PROMPT, greedy(D3(0.9, 0.5), 10))
    for cached in (0, 8):
        (found,) = engine.generate([list(PROMPT)], request.params, use_tqdm=False)
        assert_same(found, solo(request))
        assert found.num_cached_tokens == cached


@pytest.mark.parametrize(
    "wanted",
    [
        {"prompt_logprobs": 1},
        {"logprobs": 1},
        {"repetition_penalty": 1.3},
        {"min_tokens": 3},
        {"max_tokens": 1},
        {"depth": DraftAndVerify(skip_attention=[2], skip_mlp=[2])},
        {"depth": D3(0.9, 0.5, on_skip="copy")},
    ],
    ids=str,
)
def test_prompt_needing_more_than_a_token_is_a_step_by_itself(
    native: MakeEngine, solo: Solo, wanted: dict[str, Any]
) -> None:
    """What needs more of a prompt than a token is a step by itself."""
    engine = native()
    request = Request(PROMPT, replace(greedy(FullDepth(), 12), **wanted))
    plans = watch(engine)
    assert_same(engine.generate(list(PROMPT), request.params, use_tqdm=False)[0], solo(request))
    assert openings(plans) == []
    assert plans[0].num_steps == 1


def test_a_stream_has_its_first_token_before_its_run_begins(native: MakeEngine) -> None:
    """Also beside a request that nobody reads along."""
    engine, params = native(), greedy(D3(0.9, 0.5))
    plans = watch(engine)
    add(engine, Request(OTHER, params))
    engine.add_request("read", list(PROMPT), replace(params, output_kind=RequestOutputKind.DELTA))
    (output,) = engine.step()
    assert [len(answer.token_ids) for answer in output.outputs] == [1]
    assert plans[0].num_steps == 1
    assert not engine.is_ahead()
    finish(engine)
    assert openings(plans) == []


def test_no_prompt_opens_a_run_while_another_could_join(native: MakeEngine) -> None:
    """No prompt opens a run while a request waits that could join."""
    # Two prompts of ten rows do not go into a step of twelve.
    engine = native(max_num_batched_tokens=12)
    plans = watch(engine)
    add(engine, Request(PROMPT, greedy(FullDepth())), Request(OTHER * 2, greedy(FullDepth())))
    engine.step()
    assert plans[0].multi_step is None
    finish(engine)
