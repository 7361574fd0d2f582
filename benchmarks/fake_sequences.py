"""Sequences for a scheduler that runs without a model: made-up tokens, and answers of a known length."""

from __future__ import annotations

from collections.abc import Sequence

from d3engine.depth import Schedule
from d3engine.request.params import SamplingParams
from d3engine.scheduling.plan import Plan, Sampled
from d3engine.scheduling.sequence import Sequence as TokenSequence

FAKE_TOKEN = 7


def fake_sequence(
    number: int, prompt: Sequence[int], tokens: int, schedule: Schedule, *, shares_prompt: bool
) -> TokenSequence:
    """The sequence that arrives as `number`, whose answer has exactly `tokens` tokens."""
    return TokenSequence(
        request_id=str(number),
        index=0,
        prompt_token_ids=list(prompt),
        params=SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True),
        schedule=schedule,
        eos_token_ids=frozenset(),
        seed=0,
        priority=0,
        arrival=number,
        max_length=len(prompt) + tokens,
        shares_prompt=shares_prompt,
    )


def fake_tokens(plan: Plan) -> Sampled:
    """A token for every chunk that yields one."""
    return Sampled([[FAKE_TOKEN]] * len(plan.sampled))


def layers_run(plan: Plan) -> int:
    """Layers that any row of the plan runs: those whose weights the step has to read."""
    return sum(len(span.layers) for span in plan.spans if span.num_rows)
