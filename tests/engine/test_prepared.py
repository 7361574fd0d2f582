"""A request is read and checked apart from being queued: by any thread, at any time, and without a trace."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import pytest
from fixture_types import MakeEngine
from stepping import finish, greedy, see_steps

from d3engine import InvalidValueError, SamplingParams

PROMPT, OTHER = [11, 12, 13], [21, 22]


def test_a_prepared_request_gives_the_answer_of_an_added_one(make_engine: MakeEngine) -> None:
    params = SamplingParams(n=2, max_tokens=6, seed=5, logprobs=1, prompt_logprobs=1)
    direct, engine = make_engine(), make_engine()
    direct.add_request("a", PROMPT, params, priority=3)
    prepared = engine.prepare(PROMPT, params, "a", 3)
    assert engine.add(prepared) == "a"
    assert finish(engine)["a"].outputs == finish(direct)["a"].outputs
    assert engine.add(prepared) == "a"  # it may be added again once its answer is there


def test_preparing_changes_nothing_that_anyone_can_see(make_engine: MakeEngine) -> None:
    engine = make_engine()
    before = asdict(engine.stats())
    for _ in range(3):
        engine.prepare(PROMPT, SamplingParams(n=4, max_tokens=6))
    with pytest.raises(InvalidValueError, match="prompt_token_ids"):
        engine.prepare([10**6])
    assert asdict(engine.stats()) == before
    assert not engine.has_unfinished_requests()


def test_sampled_answers_follow_the_order_of_adding(make_engine: MakeEngine) -> None:
    """Sampled answers follow the order of adding and not of preparing."""
    params = SamplingParams(max_tokens=8, ignore_eos=True)  # without a seed of its own
    direct, engine = make_engine(), make_engine()
    for name, prompt in (("a", PROMPT), ("b", OTHER)):
        direct.add_request(name, prompt, params)
    want = {name: output.outputs for name, output in finish(direct).items()}
    second, first = engine.prepare(OTHER, params, "b"), engine.prepare(PROMPT, params, "a")
    engine.prepare(OTHER, params, "never added")
    engine.add(first)
    engine.add(second)
    assert {name: output.outputs for name, output in finish(engine).items()} == want
    assert want["a"][0].token_ids != want["b"][0].token_ids


def test_another_thread_prepares_in_the_middle_of_a_step(make_engine: MakeEngine) -> None:
    engine, prepared = make_engine(), []
    want = make_engine().generate(OTHER, greedy(), use_tqdm=False)[0].outputs
    engine.add_request("a", PROMPT, greedy())
    with ThreadPoolExecutor(1) as pool:
        see_steps(engine, lambda plan: prepared.append(pool.submit(engine.prepare, OTHER, greedy(), "b").result()))
        engine.step()
        engine.add(prepared[0])
        assert finish(engine)["b"].outputs == want


def test_a_request_without_an_id_gets_an_unused_one(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add_request("request-1", PROMPT, greedy(3))
    given = engine.add(engine.prepare(OTHER, greedy(3)))
    assert given != "request-1"
    assert finish(engine).keys() == {"request-1", given}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": PROMPT, "params": "greedy"}, "sampling_params"),
        ({"prompt": PROMPT, "request_id": ""}, "request_id"),
        ({"prompt": PROMPT, "request_id": 7}, "request_id"),
        ({"prompt": PROMPT, "priority": 0.5}, "priority"),
    ],
)
def test_what_can_never_run_is_refused_by_name(make_engine: MakeEngine, arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidValueError, match=f"^{named} must be"):
        make_engine().prepare(**arguments)


def test_request_that_never_fits_is_refused_when_prepared(make_engine: MakeEngine) -> None:
    """A request that would never fit the cache is refused when it is prepared."""
    engine = make_engine(kv_cache_memory_bytes=2**14)
    with pytest.raises(InvalidValueError, match="kv_cache_memory_bytes allows"):
        engine.prepare(PROMPT, greedy(200))


def test_only_what_this_engine_has_prepared_can_be_added(make_engine: MakeEngine) -> None:
    engine, other = make_engine(), make_engine()
    with pytest.raises(InvalidValueError, match=r"prepared by this engine"):
        engine.add(other.prepare(PROMPT, greedy()))
    with pytest.raises(InvalidValueError, match=r"what prepare\(\) returns"):
        engine.add(PROMPT)  # type: ignore[arg-type]
    engine.add(engine.prepare(PROMPT, greedy(), "a"))
    with pytest.raises(InvalidValueError, match="request_id must be an id of no unfinished request"):
        engine.add(engine.prepare(PROMPT, greedy(), "a"))
    assert finish(engine).keys() == {"a"}
