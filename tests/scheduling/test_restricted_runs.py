"""Who asks for rules of what may come, or for log-probabilities, runs ahead with everybody else on a CPU."""

from dataclasses import replace
from typing import Any

import pytest
from batches import Request, kv_is_back, step_as_alone
from fixture_types import MakeEngine
from multi_step import NESTED, PLAIN, Solo, greedy, unread
from stepping import see_steps

from d3engine.request.params import RequestOutputKind
from d3engine.scheduling.sampling_mode import SamplingMode

ASKED: list[dict[str, Any]] = [
    {"logit_bias": {5: 30.0, 17: 28.0}, "temperature": 4.0},
    {"allowed_token_ids": [4, 90, 299]},
    {"allowed_token_ids": [4, 90, 7, 31], "min_tokens": 12, "ignore_eos": False, "stop_token_ids": [31]},
    {"logprobs": 3},
    {"logprobs": 0, "temperature": 2.0, "top_p": 0.9, "frequency_penalty": 1.0, "prompt_logprobs": 2},
    {},
    {"temperature": 1.0},
]


def requests() -> list[Request]:
    return [
        Request(tuple(range(60, 64 + n)), replace(greedy(NESTED[n % 5], 24 - n), seed=n, **asked))
        for n, asked in enumerate(ASKED)
    ]


@pytest.mark.parametrize("streamed", [False, True])
def test_they_answer_as_alone_in_runs_of_many_steps(multi_step: MakeEngine, solo: Solo, streamed: bool) -> None:
    """With graphs the host chooses for all of them; with the native library for none."""
    engine = multi_step(num_scheduler_steps=8)
    calls: list[int] = []
    see_steps(engine, lambda plan: calls.append(plan.num_rows))
    asked = [unread(request.params) for request in requests()]
    if streamed:
        asked[1::2] = [replace(params, output_kind=RequestOutputKind.CUMULATIVE) for params in asked[1::2]]
    step_as_alone(engine, requests(), solo, asked)
    assert kv_is_back(engine)
    stats = engine.stats()
    if engine.executor.capabilities.choice is SamplingMode.REPORT:
        assert stats.native_steps == stats.num_steps
        assert len(calls) < stats.num_steps or streamed


def test_logprobs_of_a_run_have_the_bits_of_single_steps(make_engine: MakeEngine) -> None:
    """Log probabilities of a run have the bits of those step by step."""
    asked = [(list(r.prompt), r.params) for r in requests() if r.params.logprobs is not None]
    found = []
    for steps in (1, 16):
        engine = make_engine(num_scheduler_steps=steps)
        if engine.executor.capabilities.choice is not SamplingMode.REPORT:
            pytest.skip("there is no native library here")
        outputs = engine.generate([prompt for prompt, _ in asked], [params for _, params in asked], use_tqdm=False)
        found.append([output.outputs[0].logprobs for output in outputs])
    assert found[0] == found[1]


def test_what_was_ruled_out_came_without_the_rules(solo: Solo) -> None:
    """So the rules above are no idle ones."""
    for request in requests()[:3]:
        free = replace(request.params, logit_bias=None, allowed_token_ids=None, min_tokens=0, **PLAIN)
        assert solo(request).outputs[0].token_ids != solo(replace(request, params=unread(free))).outputs[0].token_ids
