"""What planning a step costs: `schedule()`, `update()` and `spans_of`, with fake tokens and no model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.fake_sequences import FAKE_TOKEN, fake_scheduler, fake_sequence, fake_tokens
from d3engine.depth import D3, DepthPolicy, FullDepth
from d3engine.scheduling.plan import Plan, Sampled, spans_of

NUM_LAYERS, PROMPT_TOKENS = 32, 16
ROUNDS, WARM_UP = 200, 20
SLOW_DECAY = D3(alpha=0.999, start=0.6)
POLICIES: dict[str, DepthPolicy] = {"full depth": FullDepth(), "D3": SLOW_DECAY}


class Decoding:
    """A scheduler in the middle of its work, whose steps yield the same token over and over.

    `join(1)` before each of many steps gives a batch of many ages, and so of many depths.
    """

    def __init__(self, policy: DepthPolicy, batch: int, num_tokens: int) -> None:
        length, batched = PROMPT_TOKENS + num_tokens, batch * PROMPT_TOKENS
        options = {"batched_tokens": batched, "enable_prefix_caching": False}
        self.scheduler = fake_scheduler(NUM_LAYERS, batch, length, **options)
        self._schedule, self._num_tokens = policy.schedule(NUM_LAYERS), num_tokens
        self._joined = 0

    def join(self, count: int) -> None:
        for _ in range(count):
            self._joined += 1
            prompt = [FAKE_TOKEN] * PROMPT_TOKENS
            self.scheduler.add(
                fake_sequence(self._joined, prompt, self._num_tokens, self._schedule, shares_prompt=False)
            )

    def plan(self) -> Plan:
        plan = self.scheduler.schedule()
        assert plan is not None
        return plan

    def update(self, plan: Plan) -> None:
        list(self.scheduler.update(plan, fake_tokens(plan)))

    def step(self) -> None:
        self.update(self.plan())


def one_age(policy: DepthPolicy, batch: int = 256, num_tokens: int = 512) -> Decoding:
    decoding = Decoding(policy, batch, num_tokens)
    decoding.join(batch)
    decoding.step()
    return decoding


def one_sequence(policy: DepthPolicy) -> Decoding:
    return one_age(policy, 1, num_tokens=1024)


def many_ages(policy: DepthPolicy) -> Decoding:
    decoding = Decoding(policy, 256, num_tokens=1024)
    for _ in range(256):
        decoding.join(1)
        decoding.step()
        decoding.step()
    return decoding


def time_schedule(benchmark: BenchmarkFixture, decoding: Decoding, joining: int = 0) -> None:
    """Time `schedule()` once a step; `joining` sequences come before each."""
    last: list[Plan] = []

    def setup() -> None:
        if last:
            decoding.update(last.pop())
        decoding.join(joining)

    def schedule() -> None:
        last.append(decoding.plan())

    benchmark.pedantic(schedule, setup=setup, rounds=ROUNDS, warmup_rounds=WARM_UP)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("sequences", [one_sequence, one_age, many_ages])
def test_schedule(benchmark: BenchmarkFixture, sequences: Callable[[DepthPolicy], Decoding], policy: str) -> None:
    benchmark.group = f"schedule(), {1 if sequences is one_sequence else 256} sequences x 32 layers"
    time_schedule(benchmark, sequences(POLICIES[policy]))


@pytest.mark.benchmark(group="schedule(), 256 sequences x 32 layers")
def test_schedule_one_joins_and_one_leaves_at_every_step(benchmark: BenchmarkFixture) -> None:
    decoding = Decoding(SLOW_DECAY, 256, num_tokens=256)
    for _ in range(300):
        decoding.join(1)
        decoding.step()
    time_schedule(benchmark, decoding, joining=1)


@pytest.mark.benchmark(group="update()")
@pytest.mark.parametrize("batch", [1, 256])
def test_update(benchmark: BenchmarkFixture, batch: int) -> None:
    decoding = one_sequence(SLOW_DECAY) if batch == 1 else many_ages(SLOW_DECAY)

    def setup() -> tuple[tuple[Any, ...], dict[str, Any]]:
        plan = decoding.plan()
        return (plan, fake_tokens(plan)), {}

    def update(plan: Plan, sampled: Sampled) -> None:
        list(decoding.scheduler.update(plan, sampled))

    benchmark.pedantic(update, setup=setup, rounds=ROUNDS, warmup_rounds=WARM_UP)


@pytest.mark.benchmark(group="spans_of, 32 layers")
@pytest.mark.parametrize("batch", [1, 32, 256])
def test_spans_of(benchmark: BenchmarkFixture, batch: int) -> None:
    depths = np.sort(np.linspace(20, NUM_LAYERS, batch).astype(int))[::-1]
    active = np.arange(NUM_LAYERS) < depths[:, None]
    benchmark(spans_of, active, None, np.arange(batch + 1))
