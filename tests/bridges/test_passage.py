"""A text read at the depths of a schedule, against decoding with bridges on transformers' own layers, and what is made
of it: the order of nested windows, and tuned bridges."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from depth_oracle import greedy_at_depth, nested
from fixture_types import MakeLlama, MakePrompts
from observers import observer_of

from d3engine.depth import LayerTable, Nested, TailSkip
from d3engine.errors import InvalidValueError
from d3engine.model.bridges import Bridge
from d3engine.model.config import ModelConfig
from d3engine.model.weights import LayerWeights, load_weights
from d3engine.research.analysis.observer import Observer
from d3engine.research.bridges import tuning
from d3engine.research.bridges.decoded import Candidate, measure_decoded
from d3engine.research.bridges.fitting import Fit, measure_held_out
from d3engine.research.bridges.judging import FullText, Reading, window_schedule
from d3engine.research.bridges.nesting import choose_order, grid_of
from d3engine.research.bridges.passage import Passage
from d3engine.research.bridges.tuning import Tuning, TuningOptions

LAYERS, SIZE = 6, 32
WINDOWS = [[4, 5], [1, 3], [3, 4]]


@pytest.fixture(scope="module")
def model(tiny_llama: MakeLlama) -> Any:
    return tiny_llama(num_hidden_layers=LAYERS, hidden_size=SIZE, intermediate_size=48)


@pytest.fixture(scope="module")
def passage(model: Any) -> Passage:
    return Passage(observer_of(model.directory))


@pytest.fixture(scope="module")
def texts(make_prompts: MakePrompts) -> list[list[int]]:
    return make_prompts([30] * 10, seed=5)


def some_bridges(windows: list[tuple[int, int]]) -> dict[tuple[int, int], Bridge]:
    numbers = torch.Generator().manual_seed(2)
    return {
        window: Bridge(*window, torch.randn(SIZE, SIZE, generator=numbers) / 10, torch.randn(SIZE, generator=numbers))
        for window in windows
    }


@pytest.mark.parametrize("bridged", [True, False])
def test_one_pass_over_a_text_gives_what_decoding_it_gives(model: Any, passage: Passage, bridged: bool) -> None:
    schedule = Nested(0.95, WINDOWS).schedule(LAYERS)
    bridges = some_bridges(schedule.windows())
    maps = {window: (bridge.weight, bridge.offset) for window, bridge in bridges.items()}
    prompt = [5, 6, 7, 8]
    answer = greedy_at_depth(model.model, prompt, 20, nested(LAYERS, 0.95, WINDOWS), "none", maps if bridged else None)
    hidden = passage.embedded(prompt + answer.token_ids[:-1])
    hidden = passage.run(hidden, 0, len(prompt), schedule, bridges if bridged else None)
    logprobs = passage.logits(hidden)[len(prompt) - 1 :].log_softmax(-1)
    assert logprobs.argmax(-1).tolist() == answer.token_ids
    torch.testing.assert_close(logprobs.max(-1).values, torch.tensor(answer.logprobs), rtol=1e-4, atol=1e-4)


def test_policies_are_measured_by_step_with_bridge_cost(passage: Passage, texts: list[list[int]]) -> None:
    """Policies are measured by step, with what their bridges cost."""
    schedule = TailSkip(4.5, 16).schedule(LAYERS)  # 5 layers up to step 6, then 4
    bridges = some_bridges(schedule.windows())
    candidates = [Candidate("skipped", schedule, None), Candidate("bridged", schedule, bridges)]
    result = measure_decoded(passage, candidates, [Reading(text, 8) for text in (*texts[:3], texts[0][:9])])
    skipped, bridged = result.policies
    assert [text.shape for text in skipped.texts] == [(3, 21)] * 3
    assert skipped.mean_cost == skipped.mean_layers == bridged.mean_layers
    depths = schedule.depths(22)[1:]
    assert skipped.mean_layers == pytest.approx(depths.mean())
    layer = passage.config
    matrices = 2 * (layer.num_heads + layer.num_kv_heads) * layer.head_dim * SIZE + 3 * SIZE * layer.intermediate_size
    assert bridged.mean_cost - bridged.mean_layers == pytest.approx((SIZE * SIZE + SIZE) / matrices)
    assert [(group.start, group.stop) for group in result.groups] == [(1, 2), (2, 4), (4, 8), (8, 16), (16, 22)]
    full = FullText(passage, Reading(texts[1], 8), set())
    for one, has in ((skipped, None), (bridged, bridges)):
        states = passage.run(passage.embedded(texts[1]), 0, 8, schedule, has)
        given = passage.logits(states[8:-1]).log_softmax(-1)
        kl = (full.logprobs.exp() * (full.logprobs - given)).sum(-1)
        np.testing.assert_allclose(one.texts[1][0], kl.numpy(), atol=1e-4)
        assert one.texts[1][2].tolist() == (full.logprobs.argmax(-1) == given.argmax(-1)).tolist()
    every = np.concatenate([text[0, 3:7] for text in bridged.texts])
    assert bridged.mean("kl", range(4, 8)).value == pytest.approx(every.mean())


def test_a_window_of_layers_that_do_nothing_goes_first(tiny_llama: MakeLlama, texts: list[list[int]]) -> None:
    made = tiny_llama(num_hidden_layers=LAYERS, hidden_size=SIZE, intermediate_size=48, seed=3)
    observer = observer_of(made.directory)
    for layer in (4, 5):
        weights: LayerWeights = observer.weights.layers[layer]
        object.__setattr__(weights, "output", torch.zeros_like(weights.output))
        object.__setattr__(weights, "down", torch.zeros_like(weights.down))
    passage = Passage(observer)
    windows = [(0, 2), (2, 4), (4, 6), (2, 6), (0, 4)]
    bridges = {window: Bridge(*window, torch.zeros(SIZE, SIZE), torch.zeros(SIZE)) for window in windows}
    candidates = grid_of(bridges, 2)
    assert candidates == [(0, 2), (2, 4), (4, 6)]
    full = [FullText(passage, Reading(text, 8), {0, 2, 4}) for text in texts[:2]]
    tried = []
    order = choose_order(full, bridges, candidates, 3, lambda: tried.append(1))
    assert order.chosen[0].window == (4, 6)
    assert order.chosen[0].kl == pytest.approx(0, abs=1e-6)
    assert order.chosen[0].agreement == 1
    assert [one.window for one in order.chosen][1:] in ([(0, 2)], [(2, 4)])  # there is no bridge over all six
    assert len(tried) == 3 + 2
    second = [np.concatenate([text.judge(window_schedule([(4, 6), w], LAYERS), bridges) for text in full], 1)
              for w in ((0, 2), (2, 4))]  # fmt: skip
    assert order.chosen[1].kl == pytest.approx(min(float(found[0].mean()) for found in second))


def fitted(passage: Passage, texts: list[list[int]], rank: int | None = None) -> dict[tuple[int, int], Bridge]:
    fit = Fit(passage, [(1, 3), (4, 5), (1, 4)])
    for text in texts:
        fit.gather(text)
    return {one.bridge.window: one.bridge for one in fit.solve(rank)}


@pytest.mark.parametrize("rank", [None, 3])
@pytest.mark.parametrize("from_nothing", [False, True])
def test_tuning_nears_full_depth_and_leaves_the_model_alone(
    passage: Passage, texts: list[list[int]], rank: int | None, from_nothing: bool
) -> None:
    """Tuning brings the next token nearer to full depth's and leaves the model alone."""
    schedule = window_schedule([(4, 5), (1, 3)], LAYERS)
    bridges = fitted(passage, texts, rank)
    if from_nothing:
        bridges = {window: bridge.of_nothing() for window, bridge in bridges.items()}
    full = [FullText(passage, Reading(text, 8), {1}) for text in texts]
    before = passage.logits(full[0].last)
    run = Tuning(bridges, schedule, TuningOptions(steps=40, rows=16, rate=3e-3))
    run.run(full, None, "key")
    assert run.bridges.keys() == {(4, 5), (1, 3)}
    kl = [np.mean([text.judge(schedule, has)[0].mean() for text in full]) for has in (bridges, run.bridges)]
    if from_nothing:
        assert kl[0] == np.mean([text.judge(schedule, None)[0].mean() for text in full])
    assert kl[1] < 0.9 * kl[0]
    assert torch.equal(passage.logits(FullText(passage, Reading(texts[0], 8), set()).last), before)


def test_tuning_that_was_cut_off_ends_as_if_it_had_not_been(
    passage: Passage, texts: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "SAVE_EVERY", 2)
    schedule = window_schedule([(4, 5)], LAYERS)
    bridges = fitted(passage, texts)
    full = [FullText(passage, Reading(text, 8), {4}) for text in texts]
    options, state = TuningOptions(steps=6, rows=8), tmp_path / "state.part"

    def runs(key: str, stop_at: int | None, path: Path | None) -> tuple[list[float], Tuning]:
        heard: list[float] = []

        def hear(loss: float) -> None:
            heard.append(loss)
            if len(heard) == stop_at:
                raise KeyboardInterrupt

        run = Tuning(bridges, schedule, options)
        with suppress(KeyboardInterrupt):
            run.run(full, path, key, hear)
        return heard, run

    whole, uncut = runs("key", None, None)
    runs("key", 5, state)
    later, resumed = runs("key", None, state)
    assert np.isnan(later[:4]).all()
    assert later[4:] == whole[4:]
    assert torch.equal(resumed.bridges[4, 5].weight, uncut.bridges[4, 5].weight)
    other, _ = runs("another key", None, state)
    assert other == whole


def test_maps_of_float32_are_measured_beside_weights_of_bfloat16(model: Any, texts: list[list[int]]) -> None:
    config = ModelConfig.from_directory(model.directory)
    weights = load_weights(model.directory, config, dtype=torch.bfloat16, device="cpu")
    passage = Passage(Observer(config, weights))
    bridge = some_bridges([(1, 3)])[1, 3]
    result = measure_held_out(passage, [bridge], [Reading(texts[0], 8)])
    schedule = window_schedule([(1, 3)], LAYERS)
    wide = Passage(observer_of(model.directory))
    wanted = FullText(wide, Reading(texts[0], 8), {1}).judge(schedule, {(1, 3): bridge})[0].mean()
    assert result.bridged[1, 3].kl == pytest.approx(wanted, rel=0.1)
    assert result.skipped[1, 3].kl != pytest.approx(wanted, rel=0.2)


def test_text_is_not_read_at_depths_of_reactivated_layers(passage: Passage) -> None:
    """A text is not read at the depths of layers that are reactivated."""
    waking = LayerTable([list(range(LAYERS)), [0, 1], [0, 1, 2]]).schedule(LAYERS)
    with pytest.raises(InvalidValueError, match="schedule must be one whose skipped layers stay skipped"):
        passage.run(passage.embedded([1, 2, 3]), 0, 1, waking)
