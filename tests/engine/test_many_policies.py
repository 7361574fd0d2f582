"""A client that sweeps over policies makes nothing grow."""

import gc
from itertools import count

from fixture_types import MakeEngine

from d3engine import D3, SamplingParams
from d3engine.depth import Schedule
from d3engine.engine import new_requests
from d3engine.engine import request_registry as nominal_depth


def objects() -> tuple[int, int]:
    """How many policies and schedules are alive, and how many objects in all."""
    gc.collect()
    alive = gc.get_objects()
    return sum(type(one) in (D3, Schedule) for one in alive), len(alive)


def test_two_thousand_policies_leave_no_more_than_a_hundred(make_engine: MakeEngine) -> None:
    """Two thousand policies leave no more behind than a hundred."""
    # Requests that are only prepared, such that are aborted, and such that are answered.
    engine, numbers = make_engine(max_num_seqs=16), count()

    def sweep(prepared: int, aborted: int, answered: int) -> tuple[int, int]:
        for nth in range(prepared + aborted + answered):
            policy = D3(1 - 1 / (10 + next(numbers)), 0.5)  # no two have one schedule
            request = engine.prepare([5, 6], SamplingParams(temperature=0, max_tokens=2, depth=policy), str(nth))
            if nth >= prepared:
                engine.add(request)
            if prepared <= nth < prepared + aborted:
                engine.abort_request(str(nth))
                engine.step()
        while engine.has_unfinished_requests():
            engine.step()
        return objects()

    sweep(200, 20, 20)  # every memory is full, and every branch was taken
    few = sweep(60, 20, 20)
    many = sweep(1_600, 300, 60)
    kept = new_requests.NUM_KEPT + nominal_depth.NUM_KEPT
    assert many[0] <= few[0] + kept
    assert many[1] <= few[1] + 20 * kept  # what hangs on each of these, in case the sweeps end unlike
    assert engine.stats().num_waiting == engine.stats().num_running == 0
