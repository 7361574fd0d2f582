"""Who arrives while others decode shares their steps, and the device chooses for all of them all the same."""

from dataclasses import replace
from typing import Any

import pytest
from batches import Request, assert_same, kv_is_back
from fixture_types import MakeEngine
from multi_step import NESTED, Solo, greedy
from stepping import see_steps

from d3engine import Engine
from d3engine.executor.interface import Computed
from d3engine.scheduling.plan import Chosen, Plan

pytestmark = pytest.mark.usefixtures("native_library")

ASKED: dict[str, dict[str, Any]] = {
    "the likeliest": {},
    "a draw": {"temperature": 2.0},
    "cuts": {"temperature": 3.0, "top_k": 9, "top_p": 0.9},
    "penalties": {"frequency_penalty": 1.9, "presence_penalty": 1.5, "repetition_penalty": 1.4},
    "log-probabilities": {"logprobs": 2, "temperature": 1.0},
    "rules": {"allowed_token_ids": [4, 90, 7, 31], "min_tokens": 9, "ignore_eos": False, "stop_token_ids": [31]},
}


def arriving(nth: int, asked: dict[str, Any]) -> Request:
    params = replace(greedy(NESTED[nth % len(NESTED)], 18 - nth), seed=nth, **asked)
    return Request(tuple(range(60, 71 + nth)), params)


def answers(engine: Engine, requests: list[Request], steps_between: int = 2) -> tuple[list[Any], list[bool]]:
    """The last outputs, and whether the device has chosen in each step that has a prompt beside an answer."""
    chosen = []

    def look(plan: Plan, computed: Computed) -> None:
        if (plan.steps < 0).any() and (plan.steps >= 0).any():
            chosen.append(isinstance(computed.logits, Chosen))

    see_steps(engine, after=look)
    waiting, done, step = dict(enumerate(requests)), {}, 0
    while waiting or engine.has_unfinished_requests():
        if waiting and step % steps_between == 0:
            nth = min(waiting)
            request = waiting.pop(nth)
            engine.add_request(str(nth), list(request.prompt), request.params)
        done |= {output.request_id: output for output in engine.step() if output.finished}
        step += 1
    return [done[str(nth)] for nth in range(len(requests))], chosen


@pytest.mark.parametrize("kind", [*ASKED, "all of them"])
def test_native_choice_in_a_prompt_step_is_the_samplers(make_engine: MakeEngine, solo: Solo, kind: str) -> None:
    """The native library chooses in a step that has a prompt as the sampler does."""
    # Prompts are computed in pieces of eight rows, some of which yield no token.
    all_kinds = list(ASKED.values())
    requests = [arriving(nth, ASKED.get(kind, all_kinds[nth % len(all_kinds)])) for nth in range(6)]
    engine = make_engine(max_num_batched_tokens=8, num_scheduler_steps=4, enable_prefix_caching=False)
    found, chosen = answers(engine, requests)
    for output, request in zip(found, requests, strict=True):
        assert_same(output, solo(request))
    assert len(chosen) >= 5
    assert all(chosen)
    assert kv_is_back(engine)


def test_sampler_chooses_where_more_than_tokens_is_wanted(make_engine: MakeEngine, solo: Solo) -> None:
    """Where more is wanted than a token of each row the sampler chooses."""
    requests = [arriving(0, ASKED["a draw"]), arriving(1, {"prompt_logprobs": 1}), arriving(2, {})]
    engine = make_engine(num_scheduler_steps=4, enable_prefix_caching=False)
    found, chosen = answers(engine, requests)
    for output, request in zip(found, requests, strict=True):
        assert_same(output, solo(request))
    assert False in chosen
