"""What an engine counts and tells of itself is what it has done."""

from dataclasses import replace

import pytest
from fixture_types import MakeEngine
from scripted import LAYERS, greedy
from stepping import finish

from d3engine import D3, Engine
from d3engine.depth.policy import MAX_DRAFT_LENGTH
from d3engine.engine.stats import EngineStats
from d3engine.request.outputs import Histogram, HistogramCounter, Timings


def test_stats_count_what_the_engine_has_done_and_holds(make_engine: MakeEngine) -> None:
    policy = D3(0.8, 0.5)
    engine = make_engine(depth=policy, block_size=4, max_num_seqs=2)
    empty = engine.stats()
    total = engine.scheduler.cache.pool.num_blocks
    nothing = EngineStats(0, 0, 0, 0, 0, 0, 0, None, None, total, 0, 0, 0, 0, 0)
    assert empty == replace(nothing, token_layers=(0,) * (LAYERS + 1), accepted_at=(0,) * MAX_DRAFT_LENGTH)
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


def test_realised_depth_is_of_tokens_that_came(make_engine: MakeEngine) -> None:
    """Realised depth is of the tokens that came, nominal depth of those allowed."""
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
    assert output.first_scheduled_time is not None
    assert output.last_token_time is not None
    times = (output.arrival_time, output.first_scheduled_time, output.first_token_time)
    assert sorted(times) == list(times)
    assert output.first_token_time < output.last_token_time <= output.finished_time
    parts = (output.queue_seconds, output.prefill_seconds, output.decode_seconds)
    assert sum(seconds for seconds in parts if seconds is not None) == pytest.approx(
        output.last_token_time - output.arrival_time
    )
    assert output.num_preemptions == 0


def test_waiting_request_is_scheduled_once_it_has_a_place(make_engine: MakeEngine) -> None:
    """A request that waits for a place has been scheduled when it gets one, and once."""
    engine = make_engine(max_num_seqs=1)
    for name in ("first", "second"):
        engine.add_request(name, "a", greedy(3))
    engine.step()
    (sequence,) = engine.scheduler.running
    scheduled = sequence.scheduled_time
    engine.scheduler._preempt(sequence)
    done = finish(engine)
    first, second = done["first"].metrics, done["second"].metrics
    assert first.first_scheduled_time == scheduled, "it was scheduled before it was sent back"
    assert first.last_token_time is not None
    assert second.first_scheduled_time is not None
    assert second.first_scheduled_time >= first.last_token_time


def test_request_ending_before_its_turn_was_never_scheduled(engine: Engine) -> None:
    """A request that ends before its turn has neither been scheduled nor any token."""
    engine.add_request("a", "a", greedy(3))
    engine.abort_request("a")
    metrics = engine.step()[0].metrics
    assert (metrics.first_scheduled_time, metrics.first_token_time, metrics.last_token_time) == (None, None, None)
    assert (metrics.queue_seconds, metrics.prefill_seconds, metrics.decode_seconds) == (None, None, None)
    assert engine.stats().queue_seconds.count == 0


def test_steps_and_finished_requests_are_in_the_histograms(make_engine: MakeEngine) -> None:
    """Every step and every finished request is in the histograms."""
    policy = D3(0.5, 0.25)
    engine = make_engine(depth=policy, max_num_seqs=2)
    engine.generate([[9, 10, 11]] * 3, greedy(4, ignore_eos=True), use_tqdm=False)
    engine.add_request("left", [9, 10], greedy(9))
    engine.step()
    engine.abort_request("left")
    stats = engine.stats()
    assert stats.step_seconds.count == stats.step_rows.count == stats.num_steps == 9
    # Two prompts of three and their answers, one prompt alone with its answer, and the first step of another.
    assert stats.step_rows.sum == (6 + 3 * 2) + (3 + 3) + 2
    assert dict(zip(stats.step_rows.bounds, stats.step_rows.counts, strict=False)) == {
        **dict.fromkeys(stats.step_rows.bounds, 0),
        1: 3,
        2: 4,
        4: 1,
        8: 1,
    }
    assert stats.queue_seconds.count == stats.prefill_seconds.count == stats.decode_seconds.count == 4
    assert (stats.last_step_rows, stats.layers_full) == (2, 13 * LAYERS)
    depths = [*policy.schedule(LAYERS).depths(4).tolist() * 3, LAYERS]
    assert stats.layers_run == sum(depths)
    assert stats.token_layers == tuple(depths.count(depth) for depth in range(LAYERS + 1))


def test_a_run_of_steps_counts_as_so_many_of_equal_length() -> None:
    timings = Timings()
    timings.count_steps(4, 64, begun=100.0, ended=100.4)
    seconds, rows = timings.step_seconds.histogram(), timings.step_rows.histogram()
    assert (seconds.count, rows.count, rows.sum) == (4, 4, 4 * 64)
    assert seconds.sum == pytest.approx(0.4)
    assert timings.last_step_seconds == pytest.approx(0.1)
    assert rows.counts[rows.bounds.index(64)] == 4


def test_value_at_a_bound_is_counted_below_it() -> None:
    """A value is counted below the least bound that it does not exceed."""
    tally = HistogramCounter((1.0, 2.0))
    for value in (0.0, 1.0, 1.5, 2.0, 2.5, 9.0):
        tally.add(value)
    assert tally.histogram() == Histogram((1.0, 2.0), (2, 2, 2), 16.0)
