"""Deep steps by the kind of their token, against a slow oracle on transformers' own layers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmark_reports import report_of
from depth_oracle import d3, greedy_at_depth
from fixture_types import MakeLlama
from observers import observer_of
from tiny_models import random_prompts

from benchmarks.deep_kinds import LooseEnds, equal_alpha, layers_of, main, with_deep_steps
from d3engine import D3
from d3engine.research.analysis.answers import Answered

LAYERS = 6
TOKENS = 10
POLICY = D3(0.8, 0.4)
DEEP = np.array([step % 3 == 0 for step in range(1, TOKENS)])


@pytest.fixture(scope="module")
def model(tiny_llama: MakeLlama) -> Any:
    return tiny_llama(num_hidden_layers=LAYERS)


def with_deep(step: int) -> set[int]:
    return set(range(LAYERS)) if step % 3 == 0 else d3(LAYERS, 0.8, 0.4)(step)


@pytest.mark.parametrize(("entries", "on_skip"), [("absent", "none"), ("copied", "copy"), ("projected", "project")])
def test_a_text_with_deep_steps_costs_what_it_costs_the_oracle(model: Any, entries: str, on_skip: str) -> None:
    (prompt,) = random_prompts([7])
    oracle = greedy_at_depth(model.model, prompt, TOKENS, with_deep, on_skip)
    text = LooseEnds(observer_of(model.directory), Answered("", prompt, oracle.token_ids, [], [], "", False))
    active = with_deep_steps(layers_of(POLICY.schedule(LAYERS), TOKENS - 1), DEEP)
    assert active.sum(axis=1).tolist() == oracle.depths[1:]
    full = text.full.gather(1, text.full.new_tensor(oracle.token_ids[1:]).long()[:, None])[:, 0].double().numpy()
    extra = text.run(active, entries)[1]
    assert full - extra == pytest.approx(oracle.logprobs[1:], abs=1e-4)
    assert np.abs(extra).max() > 1e-3, "nothing is lost, so nothing is shown"


def test_a_deep_step_among_entries_that_were_kept_is_full_depths(model: Any) -> None:
    prompt, answer = random_prompts([5, TOKENS])
    text = LooseEnds(observer_of(model.directory), Answered("", prompt, answer, [], [], "", False))
    tail = D3(1e-3, 0.4).schedule(LAYERS)  # no layer above the window runs, which would write other entries
    kl = text.run(with_deep_steps(layers_of(tail, TOKENS - 1), DEEP), "kept")[0]
    assert kl[DEEP] == pytest.approx(np.zeros(DEEP.sum()), abs=1e-6)
    assert kl[~DEEP].max() > 1e-3


def test_plain_d3_is_set_to_as_many_layers_and_no_more() -> None:
    lengths = [9, 30]

    def mean(alpha: float) -> float:
        return float(np.concatenate([layers_of(D3(alpha, 0.5).schedule(16), n).sum(axis=1) for n in lengths]).mean())

    for wanted in (9.0, 11.3, 14.5):
        alpha = equal_alpha(0.5, 16, lengths, wanted)
        assert alpha is not None
        assert wanted - 0.3 < mean(alpha) <= wanted
    assert equal_alpha(0.5, 16, lengths, 7.9) is None, "it never runs fewer than 8"


def test_the_comparison_prints_every_group(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--limit", "2", "--max-tokens", "12", "--entries", "absent", "--starts", "0.5"]
    report = report_of(main, tmp_path, *small)
    names = [group["name"] for group in report["groups"]]
    assert names[0] == "none"
    assert "dearest tokens" in names
    for group in report["groups"][1:]:
        deep, plain = group["deep"][0], group["plain"]
        assert all(one["mean_layers"] <= deep["mean_layers"] for one in plain)
        assert deep["mean_layers"] >= report["groups"][0]["deep"][0]["mean_layers"]
    shown = capsys.readouterr().out
    assert all(f"{name}, absent" in shown for name in names[1:])
