"""What is remembered of requests that have come: never more, however many different policies they bring."""

import gc
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import d3engine
from d3engine import D3, FullDepth, InvalidValueError, SamplingParams
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
