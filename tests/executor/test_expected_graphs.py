"""An engine's own graphs are captured while it has nothing to do, before the first request asks for them."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from batches import LAYERS
from fixture_types import MakeEngine

from d3engine import D3, Engine, FullDepth, SamplingParams
from d3engine.async_engine.engine_loop import EngineLoop, Stop
from d3engine.depth import DepthPolicy, SelfSpeculative, UnifiedSkip
from d3engine.executor.graph_shapes import expected_shapes
from d3engine.scheduling.sampling_mode import SamplingMode


def prepared(engine: Engine) -> int:
    while engine.executor.prepare_next():
        pass
    return engine.stats().graphs_captured


def test_prepared_graphs_are_all_that_answers_need(graphs: MakeEngine) -> None:
    """What is prepared is all that answers of the engine's policy need."""
    engine = graphs(max_num_seqs=2, depth=D3(0.8, 0.3))
    depths = {int(depth) for depth in D3(0.8, 0.3).schedule(LAYERS).depths(12)[1:]}
    captured = prepared(engine)
    assert captured == 2 * 3 * len(depths)  # rows, ways to choose, depths
    assert len(depths) == 4
    for params in (
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=1, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=1, top_p=0.9, max_tokens=12, ignore_eos=True),
    ):
        for count in (1, 2):
            engine.generate([[n, n + 1] for n in range(count)], params, use_tqdm=False)
    assert engine.stats().graphs_captured == captured
    assert engine.stats().graph_steps > 0


@pytest.mark.parametrize("policy", [D3(0.9, 0.5, on_skip="copy"), SelfSpeculative(D3(0.9, 0.5))])
def test_policies_that_run_no_graphs_of_their_own_prepare_none(graphs: MakeEngine, policy: DepthPolicy) -> None:
    assert prepared(graphs(max_num_seqs=2, depth=policy)) == 0


def test_the_graph_that_needs_most_memory_comes_first() -> None:
    for policy in (FullDepth(), D3(0.9, 0.5), UnifiedSkip(1.5)):
        schedule = policy.schedule(8)
        first, *others = expected_shapes(schedule, [1, 2, 4], 64)
        assert first.rows == 4
        assert len(first.layers) == max(len(shape.layers) for shape in others)
        assert first.choice is SamplingMode.CUT


def test_an_engine_that_waits_prepares_until_somebody_comes() -> None:
    loop: EngineLoop

    def prepare_next() -> bool:
        done.append(1)
        if len(done) == 3:
            loop.inbox.put(Stop())
        return True

    done: list[int] = []
    executor, no = SimpleNamespace(prepare_next=prepare_next), lambda: False
    engine = SimpleNamespace(executor=executor, has_unfinished_requests=no, is_ahead=no)
    loop = EngineLoop(cast(Any, engine), lambda replies: None)
    loop.run()
    assert len(done) == 3
