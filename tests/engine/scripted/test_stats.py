"""What an engine counts and tells of itself is what it has done."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from scripted import LAYERS, greedy
from stepping import finish

from d3engine import D3, Engine
from d3engine.stats import EngineStats


def test_stats_count_what_the_engine_has_done_and_holds(make_engine: Callable[..., Engine]) -> None:
    policy = D3(0.8, 0.5)
    engine = make_engine(depth=policy, block_size=4, max_num_seqs=2)
    empty = engine.stats()
    total = engine.scheduler.cache.pool.num_blocks
    assert empty == EngineStats(0, 0, 0, 0, 0, 0, 0, None, None, total, 0, 0, 0, 0, 0)
    prompt = list(range(10, 20))
    for name in ("a", "b", "c"):
        engine.add_request(name, prompt, greedy(10, ignore_eos=True))
    assert (engine.stats().num_waiting, engine.stats().num_running) == (3, 0)
    nominal = float(policy.schedule(LAYERS).depths(10).mean())
    assert engine.stats().nominal_mean_layers == pytest.approx(nominal)
    engine.step()
    stats = engine.stats()
    assert (stats.num_waiting, stats.num_running, stats.num_steps) == (1, 2, 1)
    assert (stats.generated_tokens, stats.realised_mean_layers) == (2, LAYERS)
    block_bytes = 2 * 4 * 16 * 4
    # Ten entries of two sequences at the layers of step 1; the other layers' two full blocks are the prefix cache's.
    layers = policy.schedule(LAYERS).depth_at(1)
    assert layers == LAYERS - 1
    assert stats.kv_blocks_cached == 2 * (LAYERS - layers)
    assert stats.kv_blocks_in_use == 2 * 3 * layers
    assert stats.kv_bytes_in_use == stats.kv_blocks_in_use * block_bytes
    assert stats.kv_bytes_saved == 2 * 3 * (LAYERS - layers) * block_bytes
    engine.scheduler._preempt(engine.scheduler.running[1])
    finish(engine)
    stats = engine.stats()
    assert (stats.num_waiting, stats.num_running, stats.num_preemptions) == (0, 0, 1)
    assert (stats.prompt_tokens, stats.cached_prompt_tokens) == (30, 8)  # only the third found the others' prompt
    assert stats.generated_tokens == 30
    assert stats.realised_mean_layers == pytest.approx(nominal)
    assert stats.kv_blocks_in_use == stats.kv_bytes_in_use == stats.kv_bytes_saved == 0
    assert stats.kv_blocks_cached == 2 * LAYERS
    assert stats.kv_bytes_saved_at_end > 0
    engine.reset_prefix_cache()
    assert engine.stats().kv_blocks_cached == 0


def test_realised_depth_is_that_of_the_tokens_that_came_and_nominal_that_of_those_allowed(
    make_engine: Callable[..., Engine],
) -> None:
    policy = D3(0.5, 0.25)
    engine = make_engine({(9,): [100]}, depth=policy)
    engine.generate([9], greedy(20), use_tqdm=False)  # one token and EOS
    schedule = policy.schedule(LAYERS)
    assert engine.stats().realised_mean_layers == pytest.approx(float(schedule.depths(2).mean()))
    assert engine.stats().nominal_mean_layers == pytest.approx(float(schedule.depths(20).mean()))


def test_metrics_come_in_their_order(engine: Engine) -> None:
    output = engine.generate("a", greedy(3), use_tqdm=False)[0].metrics
    assert output.first_token_time is not None
    assert output.finished_time is not None
    assert output.arrival_time <= output.first_token_time <= output.finished_time
    assert output.num_preemptions == 0
