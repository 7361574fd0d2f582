"""Requests take turns: one with many sequences does not keep one with few waiting, nothing starves, and the last gives
way where memory runs short."""

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from sequences import new_sequence

from d3engine.request.params import SamplingParams
from d3engine.scheduling.kv_cache import KVCache
from d3engine.scheduling.plan import Sampled
from d3engine.scheduling.scheduler import Scheduler, SchedulerConfig
from d3engine.scheduling.sequence import Flow, Sequence, Status
from d3engine.scheduling.waiting import WaitingQueue, giving_way, in_turn

MAX_LENGTH = 128
_arrivals = itertools.count()


def sequence(
    flow: Flow = ("", ""), prompt: int = 4, max_tokens: int = 4, priority: int = 0, name: str | None = None
) -> Sequence:
    arrival = next(_arrivals)
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    given: dict[str, Any] = {"request_id": name or f"r{arrival}", "priority": priority, "flow": flow}
    return new_sequence([1 + arrival % 5] * prompt, params, arrival=arrival, shares_prompt=False, **given)


def scheduler(max_num_seqs: int = 4, rows: int = 32, blocks: int = 512) -> Scheduler:
    cache = KVCache(num_layers=2, num_blocks=blocks, block_size=4, max_sequences=max_num_seqs, max_length=MAX_LENGTH)
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=rows, max_model_len=MAX_LENGTH, enable_prefix_caching=False
    )
    return Scheduler(config, cache)


def add(scheduler: Scheduler, *sequences: Sequence) -> None:
    for one in sequences:
        scheduler.add(one)


def run_out(scheduler: Scheduler) -> None:
    while scheduler.has_unfinished():
        step(scheduler)


def entered(queue: WaitingQueue, sequences: Iterable[Sequence]) -> list[Sequence]:
    """The sequences in the order in which an empty queue lets them enter, none of which leaves again."""
    for one in sequences:
        queue.push(one)
    taken = []
    while queue:
        taken.append(queue.pop())
        queue.entered(taken[-1])
    return taken


def step(scheduler: Scheduler) -> int:
    """Take a step, in which every sampled row yields token 7; returns its rows."""
    plan = scheduler.schedule()
    assert plan is not None
    list(scheduler.update(plan, Sampled([[7]] * len(plan.sampled))))
    scheduler.check_integrity()
    return plan.num_rows


def steps_until(scheduler: Scheduler, done: Sequence, most: int = 1000) -> int:
    for count in range(1, most):
        step(scheduler)
        if done.status is Status.FINISHED:
            return count
    raise AssertionError("it has not finished")


def test_one_flow_or_flows_of_one_are_first_come_first_served() -> None:
    alike = [sequence(("", "call")) for _ in range(5)]
    apart = [sequence(("", f"request-{n}")) for n in range(5)]
    for sequences in (alike, apart):
        assert in_turn(reversed(sequences)) == sequences
        assert entered(WaitingQueue(), reversed(sequences)) == sequences


def test_priority_goes_before_turns() -> None:
    usual = [sequence(("", "many")) for _ in range(3)]
    urgent = [sequence(("", "many"), priority=-1) for _ in range(2)]
    small = sequence(("", "small"))
    assert in_turn([*usual, small, *urgent]) == [*urgent, small, *usual]


def test_keys_take_turns_whatever_number_of_requests_they_send() -> None:
    greedy = [sequence(("greedy", f"request-{n}")) for n in range(6)]
    modest = [sequence(("modest", "a")), sequence(("modest", "b"))]
    assert in_turn([*greedy, *modest])[:4] == [greedy[0], modest[0], greedy[1], modest[1]]
    within = [*(sequence(("key", "many")) for _ in range(3)), sequence(("key", "few"))]
    assert in_turn(within) == [within[0], within[3], within[1], within[2]]


def test_queue_and_order_agree_while_nothing_runs() -> None:
    flows = [("", "a"), ("", "b"), ("k", "a"), ("k", "b"), ("k", "a")]
    sequences = [sequence(flows[n % 5], priority=n % 3) for n in range(40)]
    queue = WaitingQueue()
    taken = entered(queue, sequences)
    assert [one.priority for one in taken] == sorted(one.priority for one in sequences)
    for flow in set(flows):  # within a flow nothing is passed by
        own = [one.order for one in taken if one.flow == flow]
        assert own == sorted(own)
    for one in taken:
        queue.left(one)
    assert not queue._keys


def test_queue_takes_the_key_with_fewest_running_first() -> None:
    """Whatever its other requests: a new one of a key that has some running comes behind a later one of another."""
    queue = WaitingQueue()
    running, waiting, other = sequence(("a", "1")), sequence(("a", "2")), sequence(("b", "1"))
    for one in (running, waiting, other):
        queue.push(one)
    assert queue.pop() is running
    assert queue.first is waiting
    queue.entered(running)
    assert queue.first is other
    queue.left(running)
    assert queue.first is waiting


def test_a_small_request_enters_before_the_rest_of_a_large_one() -> None:
    work = scheduler(max_num_seqs=2)
    add(work, *(sequence(("", "large"), max_tokens=8) for _ in range(20)))
    step(work)
    small = sequence(("", "small"), max_tokens=2)
    work.add(small)
    assert steps_until(work, small) == 2, "it takes a place at once, and a step for each token"


@pytest.mark.parametrize("num_small", [1, 3])
def test_a_full_batch_gives_a_place_to_each_flow_that_has_none(num_small: int) -> None:
    work = scheduler(max_num_seqs=4)
    large = [sequence(("", "large"), max_tokens=40) for _ in range(4)]
    add(work, *large)
    for _ in range(5):
        step(work)
    small = [sequence(("", f"small-{n}"), max_tokens=2) for n in range(num_small)]
    add(work, *small)
    step(work)
    assert all(one.status is Status.RUNNING for one in small)
    assert [one.num_preemptions for one in large] == [0] * (4 - num_small) + [1] * num_small, "the youngest give way"
    run_out(work)
    assert all(one.token_ids == [7] * 40 for one in large)
    assert work.counters.preemptions == num_small, "each has taken one place, once"


def test_nothing_that_runs_alone_gives_way() -> None:
    running = [sequence(("", f"r{n}"), priority=n) for n in range(3)]
    assert giving_way(running, sequence(("", "new"))) == []
    assert giving_way(running, sequence(("", "new"), priority=-5)) == []
    pair = [sequence(("", "pair")), sequence(("", "pair"))]
    assert giving_way(pair, sequence(("", "new"))) == [pair[1]]
    assert giving_way(pair, sequence(("", "pair"))) == [], "its own flow runs already"
    assert giving_way(pair, sequence(("", "new"), priority=1)) == [], "it is less urgent"


def test_a_key_with_several_requests_gives_way_to_another_key() -> None:
    running = [sequence(("key", f"r{n}")) for n in range(4)]
    assert giving_way(running, sequence(("key", "new"))) == []
    assert giving_way(running, sequence(("other", "new")))[0] is running[3]


def test_no_place_is_given_up_where_memory_would_not_do() -> None:
    work = scheduler(max_num_seqs=4, blocks=2 * 20)
    large = [sequence(("", "large"), prompt=8, max_tokens=8) for _ in range(3)]
    add(work, *large)
    step(work)
    work.add(sequence(("", "huge"), prompt=70, max_tokens=8))
    step(work)
    assert [one.num_preemptions for one in large] == [0, 0, 0]
    run_out(work)


def test_prompts_of_one_flow_leave_steps_short_for_another() -> None:
    work = scheduler(max_num_seqs=32, rows=64)
    add(work, *(sequence(("", "large"), prompt=100, max_tokens=2) for _ in range(30)))
    step(work)
    small = sequence(("", "small"), prompt=4, max_tokens=3)
    work.add(small)
    rows = []
    while small.status is not Status.FINISHED:
        rows.append(step(work))
    assert len(rows) == 3, "its prompt is in the next step, and each of its tokens in one more"
    assert max(rows) <= 64 // 4 + 32, "beside single tokens, a quarter of a step's rows"


def test_one_flow_alone_has_all_rows() -> None:
    work = scheduler(max_num_seqs=32, rows=64)
    add(work, *(sequence(("", "alone"), prompt=100, max_tokens=2) for _ in range(4)))
    assert step(work) == 64


def test_small_requests_in_a_stream_do_not_starve_a_large_one() -> None:
    work = scheduler(max_num_seqs=2, rows=16)
    large = [sequence(("", "large"), max_tokens=6) for _ in range(4)]
    add(work, *large)
    for count in range(400):
        if all(one.status is Status.FINISHED for one in large):
            break
        work.add(sequence(("", f"small-{count}"), max_tokens=2))
        step(work)
    assert all(one.status is Status.FINISHED for one in large)
    assert len({len(one.token_ids) for one in large}) == 1
    assert np.all([one.token_ids == [7] * 6 for one in large])


@pytest.mark.parametrize(("priorities", "preempted"), [((0, 0, 0), [2]), ((0, 1, 0), [1]), ((1, 0, 0), [0])])
def test_preemption_takes_the_last_in_turn(priorities: tuple[int, ...], preempted: list[int]) -> None:
    """By priority, then by arrival."""
    sequences = [sequence(("", f"r{n}"), max_tokens=12, priority=priority) for n, priority in enumerate(priorities)]
    work = scheduler(max_num_seqs=3, rows=16, blocks=18)
    add(work, *sequences)
    run_out(work)
    assert [nth for nth, one in enumerate(sequences) if one.num_preemptions] == preempted


def test_admission_counts_blocks_that_prompts_still_lack() -> None:
    """The blocks of a prompt that is computed in chunks are promised to it: no other enters to be pushed out."""
    work = scheduler(max_num_seqs=3, rows=4, blocks=12)
    add(work, *(sequence(("", f"r{n}"), prompt=14, max_tokens=1) for n in range(2)))
    run_out(work)
    assert work.counters.preemptions == 0
    assert work.counters.steps == 8
