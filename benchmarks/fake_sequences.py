"""A scheduler that runs without a model, and its sequences: made-up tokens, and answers of a known length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from d3engine.depth import Schedule
from d3engine.request.params import SamplingParams
from d3engine.scheduling.kv_cache import KVCache
from d3engine.scheduling.plan import Plan, Sampled
from d3engine.scheduling.scheduler import Scheduler, SchedulerConfig
from d3engine.scheduling.sequence import Sequence as TokenSequence

FAKE_TOKEN = 7
BLOCK_SIZE = 16


def fake_scheduler(
    num_layers: int, slots: int, length: int, *, batched_tokens: int, spare_blocks: int = 0, **options: Any
) -> Scheduler:
    """A scheduler with room for `slots` sequences of `length` tokens, and `spare_blocks` more a layer.

    `options` are further ones of `SchedulerConfig`.
    """
    cache = KVCache(
        num_layers=num_layers,
        num_blocks=num_layers * (slots * -(-length // BLOCK_SIZE) + spare_blocks),
        block_size=BLOCK_SIZE,
        max_sequences=slots,
        max_length=length,
    )
    config = SchedulerConfig(max_num_seqs=slots, max_num_batched_tokens=batched_tokens, max_model_len=length, **options)
    return Scheduler(config, cache)


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
