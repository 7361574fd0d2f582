"""What is remembered of requests that have come: never more, however many different policies they bring."""

import gc
import weakref
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fixture_types import MakeEngine

import d3engine
from d3engine import D3, AsyncEngine, Engine, FullDepth, InvalidValueError, SamplingParams
from d3engine.depth import Schedule
from d3engine.engine import request_registry
from d3engine.engine.new_requests import NUM_KEPT, NewRequests
from d3engine.engine.request_registry import NominalDepth
from d3engine.model.config import ModelConfig

DEMO = ModelConfig.from_directory(Path(d3engine.__file__).parent / "demo_model")


def new_requests(ranks: int = 1) -> NewRequests:
    """Of an engine at full depth, whose requests name neither bridges nor adapters."""
    settings: Any = SimpleNamespace(config=DEMO, directory=Path("nowhere"), depth=FullDepth(), max_model_len=64, seed=0)
    settings.batch_invariant, settings.tensor_parallel_size = False, ranks
    return NewRequests(settings, None, cast(Any, None), cast(Any, None))


def test_requests_of_new_policies_leave_few_schedules_behind() -> None:
    """Requests of ever new policies leave a bounded number of schedules behind."""
    requests = new_requests()
    nominal = NominalDepth()
    schedules, of_each, promised = [], set(), 0
    for number in range(3 * NUM_KEPT):
        params = SamplingParams(max_tokens=10, depth=D3(alpha=1 - 0.3 / (number + 1), start=0.5))
        sequences = requests.sequences(requests.prepare([5, 6, 7], params), f"request-{number}")
        nominal.count(sequences[0])
        promised += int(sequences[0].schedule.depths(10).sum())
        schedules.append(weakref.ref(sequences[0].schedule))
        of_each.add(sequences[0].schedule.cutoffs.tobytes())
    del sequences, params
    gc.collect()
    kept = [number for number, schedule in enumerate(schedules) if schedule() is not None]
    assert len(of_each) == 3 * NUM_KEPT
    assert kept == list(range(2 * NUM_KEPT, 3 * NUM_KEPT))
    assert nominal.mean() == promised / (10 * 3 * NUM_KEPT)


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
    kept = NUM_KEPT + request_registry.NUM_KEPT
    assert many[0] <= few[0] + kept
    assert many[1] <= few[1] + 20 * kept  # what hangs on each of these, in case the sweeps end unlike
    assert engine.stats().num_waiting == engine.stats().num_running == 0


def test_a_policy_that_many_requests_share_is_worked_out_once() -> None:
    requests = new_requests()
    params = SamplingParams(max_tokens=10, depth=D3(alpha=0.9, start=0.6))
    first, second = (requests.prepare([5, 6, 7], params) for _ in range(2))
    assert first.schedule is second.schedule


def test_steering_over_several_devices_is_refused() -> None:
    requests = new_requests(ranks=2)
    requests.prepare([5, 6, 7], SamplingParams(capture=1))
    with pytest.raises(InvalidValueError, match="steer must be None where tensor_parallel_size is above 1"):
        requests.prepare([5, 6, 7], SamplingParams(steer={1: [0.5] * DEMO.hidden_size}))


@pytest.mark.parametrize("kind", [Engine, AsyncEngine])
def test_a_misspelled_argument_is_named_with_the_nearest(kind: type) -> None:
    """The class that is called refuses it, not the dataclass of its arguments."""
    said = rf"^{kind.__name__}\(\) got an unexpected keyword argument 'max_modellen'; did you mean 'max_model_len'\?$"
    with pytest.raises(TypeError, match=said):
        kind("demo", max_modellen=8)
    with pytest.raises(TypeError, match=rf"^{kind.__name__}\(\) got an unexpected keyword argument 'zzzz'$"):
        kind("demo", zzzz=8)
