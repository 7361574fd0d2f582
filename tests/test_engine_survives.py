"""Whatever a caller does with what he holds, his neighbours' requests go on as if he had not."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from d3engine import Engine, RequestOutput, SamplingParams

PROMPT = [11, 12, 13]


def greedy(max_tokens: int = 8, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **more)


def finish(engine: Engine) -> dict[str, RequestOutput]:
    """Step to the end; the last output of every request that was returned."""
    last = {}
    for _ in range(500):
        if not engine.has_unfinished_requests():
            return last
        last |= {output.request_id: output for output in engine.step()}
    raise AssertionError("the engine does not finish")


# -- what a caller keeps in his hands --------------------------------------------------------------------------------


def test_lists_and_mappings_changed_after_add_request_change_nothing(make_engine: Callable[..., Engine]) -> None:
    given: dict[str, Any] = {"logit_bias": {5: 1.0}, "stop_token_ids": [299], "allowed_token_ids": [*range(290)]}

    def answers(spoil: bool) -> list[list[int]]:
        mine = copy.deepcopy(given)
        prompt = list(PROMPT)
        engine = make_engine()
        engine.add_request("innocent", [1, 2], greedy(12))
        engine.add_request("changed", prompt, greedy(min_tokens=4, **mine))
        engine.step()
        if spoil:
            mine["logit_bias"][10**6] = 3.0
            mine["stop_token_ids"].append(10**6)
            mine["allowed_token_ids"][:] = [10**6]
            prompt += [10**6] * 100
        last = finish(engine)
        return [last[name].outputs[0].token_ids for name in ("innocent", "changed")]

    assert answers(spoil=True) == answers(spoil=False)


def test_what_sampling_params_hold_cannot_be_changed_but_copied_compared_hashed_and_pickled() -> None:
    given: dict[str, Any] = {"logit_bias": {5: 1.0}, "stop": ["a"], "stop_token_ids": [1], "allowed_token_ids": [2]}
    params = SamplingParams(**given)
    assert isinstance(params.logit_bias, dict)
    for change in (
        lambda bias: bias.update({6: 1.0}),
        lambda bias: bias.__setitem__(6, 1.0),
        lambda bias: bias.__ior__({6: 1.0}),
        lambda bias: bias.setdefault(6, 1.0),
        lambda bias: bias.pop(5),
        lambda bias: bias.popitem(),
        lambda bias: bias.clear(),
        lambda bias: bias.__delitem__(5),
    ):
        with pytest.raises(TypeError, match="cannot be changed"):
            change(params.logit_bias)
    for other in (SamplingParams(**given), copy.deepcopy(params), pickle.loads(pickle.dumps(params))):
        assert other == params
        assert hash(other) == hash(params)
        with pytest.raises(TypeError, match="cannot be changed"):
            other.logit_bias[6] = 1.0


def test_what_a_reader_does_to_an_output_does_not_reach_the_engine(make_engine: Callable[..., Engine]) -> None:
    params = greedy(20, prompt_logprobs=1, logprobs=1)
    want = make_engine().generate(PROMPT, params, use_tqdm=False)[0]
    last = None
    for last in make_engine().stream(PROMPT, params):
        assert last.prompt_token_ids == PROMPT
        assert last.prompt_logprobs == want.prompt_logprobs
        completion = last.outputs[0]
        seen = list(completion.token_ids)
        assert completion.logprobs is not None
        assert last.prompt_logprobs is not None
        last.prompt_token_ids.extend(completion.token_ids)
        for mine in (last.prompt_logprobs, completion.token_ids, completion.logprobs, completion.depths):
            mine.clear()
    assert last is not None
    assert seen == want.outputs[0].token_ids
    assert last.outputs[0].finish_reason == "length"
