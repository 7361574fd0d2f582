"""Bridges fitted by normal equations, against the plain solution over stored states of transformers' own layers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fixture_types import MakeLlama, MakePrompts
from observers import observer_of
from torch import Tensor

from d3engine.errors import InvalidValueError
from d3engine.model.bridges import Bridge
from d3engine.research.bridges import fitting
from d3engine.research.bridges.fitting import CHOOSING_EVERY, Fit, measure_held_out, shrink, windows_from
from d3engine.research.bridges.judging import Reading
from d3engine.research.bridges.passage import Passage

LAYERS = 4
RIDGE = 1e-3


@pytest.fixture(scope="module")
def model(tiny_llama: MakeLlama) -> Any:
    return tiny_llama(num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def texts(make_prompts: MakePrompts) -> list[list[int]]:
    return make_prompts([40] * 10, seed=5)


def states_of(model: Any, text: list[int]) -> list[Tensor]:
    """Transformers' residual stream [T, H] before each layer, and behind the last one."""
    with torch.inference_mode():
        seen: list[Tensor] = []

        def see(_: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            seen.append((*given, *named.values())[0][0].double())

        parts = (*model.model.model.layers, model.model.model.norm)
        hooks = [part.register_forward_pre_hook(see, with_kwargs=True) for part in parts]
        model.model(torch.tensor([text]))
        for hook in hooks:
            hook.remove()
    return seen


def ridge_solution(x: Tensor, y: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """Of y ~ W x + c by least squares over stored states, penalised through rows of zeros."""
    mean, change = x.mean(0), y.mean(0)
    size = x.shape[1]
    strength = (ridge * (x - mean).square().sum() / size).sqrt()
    stacked = torch.cat((x - mean, strength * torch.eye(size, dtype=x.dtype)))
    wanted = torch.cat((y - change, torch.zeros(size, size, dtype=x.dtype)))
    weight = torch.linalg.lstsq(stacked, wanted).solution.T
    return weight, change - weight @ mean


def test_sums_of_one_pass_give_the_solution_over_all_states(model: Any, texts: list[list[int]]) -> None:
    """Sums of one pass give the solution over all states of transformers."""
    fit = Fit(Passage(observer_of(model.directory)), windows_from([1, 2], LAYERS))
    for text in texts:
        fit.gather(text)
    stored = [states_of(model, text) for text in texts]
    found = fit.solve(ridges=(RIDGE,))
    assert [one.bridge.window for one in found] == [(1, 2), (1, 3), (1, 4), (2, 3), (2, 4)]
    for one in found:
        first, stop = one.bridge.window
        x = torch.cat([states[first][1:] for states in stored])
        y = torch.cat([states[stop][1:] - states[first][1:] for states in stored])
        weight, offset = ridge_solution(x, y, RIDGE)
        torch.testing.assert_close(one.bridge.weight.double(), weight, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(one.bridge.offset.double(), offset, rtol=1e-3, atol=1e-4)


def test_ridge_is_chosen_by_the_error_on_unseen_texts(model: Any, texts: list[list[int]]) -> None:
    """The ridge is chosen by the error on texts that the solution has not seen."""
    ridges = (1e-6, 0.3, 100.0)
    fit = Fit(Passage(observer_of(model.directory)), [(1, 4)])
    for text in texts:
        fit.gather(text)
    (found,) = fit.solve(ridges=ridges)
    kinds: dict[bool, list[list[Tensor]]] = {False: [], True: []}
    for number, text in enumerate(texts):
        kinds[number % CHOOSING_EVERY == CHOOSING_EVERY - 1].append(states_of(model, text))
    x, y, other_x, other_y = (
        torch.cat([part(states) for states in kinds[chooses]])
        for chooses in (False, True)
        for part in (lambda states: states[1][1:], lambda states: states[4][1:] - states[1][1:])
    )
    errors = []
    for ridge in ridges:
        weight, offset = ridge_solution(x, y, ridge)
        error = (other_y - other_x @ weight.T - offset).square().sum()
        errors.append(float(error / (other_y - other_y.mean(0)).square().sum()))
    assert found.unexplained == pytest.approx(min(errors), rel=1e-4)
    assert found.ridge == ridges[errors.index(min(errors))]


def test_of_all_maps_of_a_rank_the_one_that_loses_least_is_taken(model: Any, texts: list[list[int]]) -> None:
    fit = Fit(Passage(observer_of(model.directory)), [(1, 3)])
    for text in texts:
        fit.gather(text)
    (full,), (low,) = fit.solve(ridges=(RIDGE,)), fit.solve(rank=2, ridges=(RIDGE,))
    assert low.bridge.rank == 2
    x = torch.cat([states_of(model, text)[1][1:] for text in texts]).float()
    wanted, given = full.bridge.crossed(x), low.bridge.crossed(x)
    spread = (wanted - x) - (wanted - x).mean(0)
    least = torch.linalg.svdvals(spread)[2:].square().sum()  # Eckart and Young
    assert float((wanted - given).square().sum()) == pytest.approx(float(least), rel=1e-3)


def test_a_fit_that_was_cut_off_goes_on_where_its_state_ends(
    model: Any, texts: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitting, "SAVE_EVERY", 3)
    whole = Fit(Passage(observer_of(model.directory)), [(1, 3)])
    whole.gather_all(texts, None, "key", lambda: None)
    cut, state = Fit(Passage(observer_of(model.directory)), [(1, 3)]), tmp_path / "state.part"
    cut.gather_all(texts[:7], state, "key", lambda: None)
    read: list[list[int]] = []
    gather = Fit.gather
    monkeypatch.setattr(Fit, "gather", lambda fit, text, first: (read.append(text), gather(fit, text, first))[1])
    later = Fit(Passage(observer_of(model.directory)), [(1, 3)])
    later.gather_all(texts, state, "key", lambda: None)
    assert read == texts[6:]
    assert torch.equal(later.solve()[0].bridge.weight, whole.solve()[0].bridge.weight)
    other = Fit(Passage(observer_of(model.directory)), [(1, 3)])
    other.gather_all(texts[:1], state, "another key", lambda: None)
    assert other.num_texts == 1


def test_windows_are_judged_as_transformers_runs_them(model: Any, texts: list[list[int]]) -> None:
    """The prompt runs every layer, and what follows it is bridged, at every position at once."""
    size, prompt = model.model.config.hidden_size, 12
    generator = torch.Generator().manual_seed(1)
    bridge = Bridge(1, 3, torch.randn(size, size, generator=generator) / size, torch.randn(size, generator=generator))
    result = measure_held_out(
        Passage(observer_of(model.directory)), [bridge], [Reading(text, prompt) for text in texts[:2]]
    )
    divergence = agreed = surprise = count = 0.0
    llama = model.model.model
    with torch.inference_mode():
        for text in texts[:2]:
            full = model.model(torch.tensor([text])).logits[0].log_softmax(-1)
            states = states_of(model, text)
            hidden = states[3].float()
            hidden[prompt:] = bridge.crossed(states[1].float()[prompt:])
            rotation = llama.rotary_emb(hidden[None], position_ids=torch.arange(len(text))[None])
            hidden = llama.layers[3](hidden[None], position_embeddings=rotation)
            given = model.model.lm_head(llama.norm(hidden))[0].log_softmax(-1)
            rows = slice(prompt, len(text) - 1)
            divergence += float((full[rows].exp() * (full[rows] - given[rows])).sum())
            agreed += float((full[rows].argmax(-1) == given[rows].argmax(-1)).sum())
            surprise -= float(given[rows].gather(1, torch.tensor(text[prompt + 1 :])[:, None]).sum())
            count += len(text) - 1 - prompt
    judged = result.bridged[1, 3]
    assert judged.count == count
    assert judged.kl == pytest.approx(divergence / count, rel=1e-4)
    assert judged.agreement == pytest.approx(agreed / count)
    assert judged.surprise == pytest.approx(surprise, rel=1e-4)
    json.dumps(result.as_dict(), allow_nan=False)


def test_a_window_of_other_layers_than_the_models_is_refused(model: Any) -> None:
    with pytest.raises(InvalidValueError, match=r"window must be layers \[first, stop\) of 4; got '2:5'"):
        Fit(Passage(observer_of(model.directory)), [(2, 5)])


def test_a_map_is_shrunk_as_far_as_it_helps(model: Any, make_prompts: MakePrompts) -> None:
    """A map that does twice what the layers do is shrunk, and one that does the contrary as far as can be."""
    passage = Passage(observer_of(model.directory))
    texts = make_prompts([30] * 10, seed=7)
    fit = Fit(passage, [(1, 3)])
    for text in texts:
        fit.gather(text, 5)
    assert fit.num_positions == 10 * 25
    (found,) = fit.solve()
    readings = [Reading(text, 4) for text in texts[:3]]
    doubled, contrary = found.bridge.shrunk(2.0), found.bridge.shrunk(-1.0)
    for bridge, wanted in ((found.bridge, [1.0]), (doubled, [0.75, 0.5, 0.25]), (contrary, [0.25])):
        assert shrink(passage, [bridge], readings, lambda: None)[1, 3] in wanted
    result = measure_held_out(passage, [found.bridge], readings)
    assert result.worse_than_none() == []
    assert measure_held_out(passage, [contrary], readings).worse_than_none() == [(1, 3)]
