"""Sequences enter where there is memory for their prompts, and the last in turn gives way where it runs short."""

from typing import Any

import pytest
from sequences import new_sequence

from d3engine.request.params import SamplingParams
from d3engine.scheduling.kv_cache import KVCache
from d3engine.scheduling.plan import Sampled
from d3engine.scheduling.scheduler import Scheduler, SchedulerConfig
from d3engine.scheduling.sequence import Sequence

PROMPT, TOKENS = 4, 12


def sequence(arrival: int, priority: int = 0, prompt: int = PROMPT, max_tokens: int = TOKENS) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    own: dict[str, Any] = {"priority": priority, "shares_prompt": False, "flow": ("", f"r{arrival}")}
    return new_sequence([arrival] * prompt, params, arrival=arrival, **own)


def run(sequences: list[Sequence], num_blocks: int, rows: int) -> Scheduler:
    """Add them all and step to the end; returns the scheduler."""
    cache = KVCache(num_layers=2, num_blocks=num_blocks, block_size=4, max_sequences=3, max_length=PROMPT + TOKENS)
    config = SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=rows, max_model_len=PROMPT + TOKENS)
    scheduler = Scheduler(config, cache)
    for one in sequences:
        scheduler.add(one)
    while scheduler.has_unfinished():
        plan = scheduler.schedule()
        assert plan is not None
        list(scheduler.update(plan, Sampled([[7]] * len(plan.sampled))))
        scheduler.check_integrity()
    return scheduler


@pytest.mark.parametrize(("priorities", "preempted"), [((0, 0, 0), [2]), ((0, 1, 0), [1]), ((1, 0, 0), [0])])
def test_preemption_takes_the_last_in_turn(priorities: tuple[int, ...], preempted: list[int]) -> None:
    """By priority, then by arrival."""
    sequences = [sequence(arrival, priority) for arrival, priority in enumerate(priorities)]
    run(sequences, num_blocks=18, rows=16)
    assert [nth for nth, one in enumerate(sequences) if one.num_preemptions] == preempted


def test_admission_counts_blocks_that_prompts_still_lack() -> None:
    """The blocks of a prompt that is computed in chunks are promised to it: no other enters to be pushed out."""
    sequences = [sequence(arrival, prompt=14, max_tokens=1) for arrival in range(2)]
    scheduler = run(sequences, num_blocks=12, rows=4)
    assert scheduler.counters.preemptions == 0
    assert scheduler.counters.steps == 8
