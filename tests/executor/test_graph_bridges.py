"""Windows are crossed inside the steps that a graph would hold: the rehearsal of graphs on a CPU."""

import shutil
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bridge_files import some_maps, write_maps
from fixture_types import MakeEngine, MakeLlama
from multi_step import greedy, unread

from d3engine import D3, Engine, FullDepth, TailSkip
from d3engine.depth import NEVER, Nested
from d3engine.depth.schedule import windows_of
from d3engine.executor.graph_shapes import Crossed, crossed_at, expected_shapes
from d3engine.model.bridges import BRIDGES_FILE
from d3engine.scheduling.plan import MultiStep
from d3engine.scheduling.sampling_mode import SamplingMode

LAYERS, SIZE = 6, 32
POLICIES = (
    D3(0.9, 0.3, bridges="auto"),
    FullDepth(),
    D3(0.8, 0.3, bridges="auto"),
    D3(0.9, 0.3),
    TailSkip(4, 12, bridges="auto"),
    Nested(0.8, [(1, 3), (4, 5), (3, 4)], bridges="auto"),
)


@pytest.fixture(scope="module", params=[None, 5], ids=["full maps", "maps of low rank"])
def directory(request: pytest.FixtureRequest, tiny_llama: MakeLlama, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tiny_llama(num_hidden_layers=LAYERS, hidden_size=SIZE, intermediate_size=48, seed=3)
    target = tmp_path_factory.mktemp("bridged") / "model"
    shutil.copytree(made.directory, target)
    write_maps(some_maps(LAYERS, SIZE), target, target / BRIDGES_FILE, request.param)
    return target


@pytest.fixture
def make(directory: Path, graphs: MakeEngine) -> MakeEngine:
    def make(**changes: Any) -> Engine:
        options: dict[str, Any] = {"device": "cpu", "kv_cache_memory_bytes": 2**21, "skip_tokenizer_init": True}
        return Engine(directory, **(options | changes))

    return make


def test_bridged_rows_in_graphs_answer_as_step_by_step(make: MakeEngine) -> None:
    """Rows of any ages with and without bridges answer in graphs as step by step."""
    prompts = [[9 + nth, 8, 7, *range(nth)] for nth in range(7)]
    params = [unread(greedy(POLICIES[nth % len(POLICIES)], 14 + nth)) for nth in range(7)]
    with make(max_num_seqs=5) as graphs, make(enforce_eager=True, max_num_seqs=1) as eager:
        found = graphs.generate(prompts, params, use_tqdm=False)
        wanted = eager.generate(prompts, params, use_tqdm=False)
        for mine, theirs in zip(found, wanted, strict=True):
            assert mine.outputs[0].token_ids == theirs.outputs[0].token_ids
            assert mine.outputs[0].depths == theirs.outputs[0].depths
        assert graphs.stats().graph_steps > 10


def test_an_answer_alone_is_all_in_graphs_that_were_prepared(make: MakeEngine) -> None:
    with make(depth=POLICIES[0], max_num_seqs=1) as engine:
        while engine.executor.prepare_next():
            pass
        captured = engine.stats().graphs_captured
        engine.generate([1, 2, 3], unread(greedy(POLICIES[0], 24)), use_tqdm=False)
        stats = engine.stats()
    assert (stats.graphs_captured, stats.eager_steps, stats.graph_steps) == (captured, 1, 23)  # the prompt's is eager


def multi_step(steps: list[int], cutoffs: list[list[int]], bridges: tuple[str | None, ...]) -> MultiStep:
    return MultiStep(4, np.array(steps), np.array(cutoffs), SamplingMode.GREEDY, bridges=bridges)


def test_graph_has_the_windows_of_its_rows() -> None:
    """A graph has the windows of its rows where all are alike, else those that may come."""
    decay = [NEVER, NEVER, 9, 6, 3]
    alike = multi_step([4, 4], [decay, decay], ("auto", "auto"))
    assert crossed_at(alike, 0) == (Crossed(4, 5, "auto"),)
    assert crossed_at(alike, 3) == (Crossed(3, 5, "auto"),)
    mixed = multi_step([4, 7], [decay, decay], ("auto", "auto"))
    assert crossed_at(mixed, 0) == tuple(Crossed(first, 5, "auto") for first in (2, 3, 4))
    assert crossed_at(mixed, 2) == tuple(Crossed(first, 5, "auto") for first in (2, 3))
    assert crossed_at(multi_step([4, 4], [decay, decay], ("auto", None)), 3) == (
        Crossed(2, 5, "auto"),
        Crossed(3, 5, "auto"),
    )
    assert crossed_at(multi_step([4], [decay], ()), 0) == ()
    assert crossed_at(multi_step([4], [[NEVER] * 5], ("auto",)), 0) == ()


def test_expected_graphs_of_bridged_answers_have_windows() -> None:
    """The graphs that bridged answers need are expected with their windows."""
    shapes = list(expected_shapes(D3(0.8, 0.3, bridges="auto").schedule(LAYERS), [1, 2], 64))
    for shape in shapes:
        active = np.isin(np.arange(LAYERS), shape.layers)
        assert shape.crossed == tuple(Crossed(first, stop, "auto") for first, stop in windows_of(active))
    assert any(shape.crossed for shape in shapes)
    assert {(shape.rows, shape.choice) for shape in shapes} == set(
        product((1, 2), (SamplingMode.GREEDY, SamplingMode.CUT, SamplingMode.DRAW))
    )
