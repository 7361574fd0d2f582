"""One perturbed step, and the run that leaves where predictions are settled, against a slow oracle on transformers."""

from typing import Any

import numpy as np
import pytest
from depth_oracle import greedy_at_depth
from fixture_types import MakeLlama
from observers import observer_of
from schedules import layers_run
from transformers_oracle import greedy

from d3engine import Engine, SamplingParams
from d3engine.depth import DepthPolicy, FullDepth
from d3engine.errors import InvalidValueError
from d3engine.research.analysis.copying import (
    AGREEMENT,
    ENTRIES,
    KEPT,
    Grid,
    OneStepCopied,
    Oracle,
    Outcome,
    measure_perturbing,
    oracle_answer,
)

LAYERS, TOKENS = 6, 10
PROMPT = [3, 1, 4, 1, 5, 9, 2]
ALL = set(range(LAYERS))


@pytest.fixture(scope="module")
def model(tiny_llama: MakeLlama) -> Any:
    return tiny_llama(num_hidden_layers=LAYERS)


def test_only_one_step_leaves_layers_out() -> None:
    schedule = OneStepCopied(layers=2, at_step=3).schedule(5)
    assert [layers_run(schedule, step) for step in (0, 2, 3, 4, 99)] == [
        [0, 1, 2, 3, 4],
        [0, 1, 2, 3, 4],
        [0, 1, 2],
        [0, 1, 2, 3, 4],
        [0, 1, 2, 3, 4],
    ]
    assert (schedule.on_skip, OneStepCopied(2, 3, "recomputed").schedule(5).on_skip) == ("copy", "project")


@pytest.mark.parametrize("wrong", [{"layers": -1}, {"layers": 5}, {"at_step": 0}, {"entries": "forgotten"}], ids=str)
def test_what_cannot_be_perturbed_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidValueError, match=next(iter(wrong))):
        OneStepCopied(**{"layers": 1, "at_step": 1, **wrong}).schedule(5)


@pytest.mark.parametrize("entries", ENTRIES)
def test_a_perturbed_answer_is_that_of_the_oracle(model: Any, entries: str) -> None:
    policies = [OneStepCopied(4, step, entries) for step in (1, 3, 6)]
    params = [SamplingParams(temperature=0, max_tokens=TOKENS, depth=policy) for policy in policies]
    with Engine(model.directory, skip_tokenizer_init=True, device="cpu", kv_cache_memory_bytes=2**23) as engine:
        outputs = engine.generate([PROMPT] * 3, params, use_tqdm=False)
    for policy, output in zip(policies, outputs, strict=True):
        expected = greedy_at_depth(
            model.model,
            PROMPT,
            TOKENS,
            lambda step, at=policy.at_step: set(range(2)) if step == at else ALL,
            ENTRIES[entries],
        )
        assert output.outputs[0].token_ids == expected.token_ids
        assert output.outputs[0].depths == expected.depths


def test_kept_kv_gives_the_full_depth_answer(model: Any) -> None:
    """KV that is kept gives full depth's answer, whatever layers are left out."""
    found = oracle_answer(observer_of(model.directory), PROMPT, TOKENS, KEPT)
    assert found.token_ids == greedy(model.model, PROMPT, TOKENS).token_ids
    assert min(found.depths) < LAYERS, "else nothing would be shown"


@pytest.mark.parametrize("entries", ENTRIES)
def test_early_exit_where_settled_answers_as_a_shallow_run(model: Any, entries: str) -> None:
    """An exit where the token is settled answers as a run that goes no deeper."""
    # A schedule with the depths that the oracle found, in transformers' own layers: the same tokens, without looking at
    # the layers above.
    found = oracle_answer(observer_of(model.directory), PROMPT, TOKENS, entries)
    depths = found.depths
    expected = greedy_at_depth(model.model, PROMPT, TOKENS, lambda step: set(range(depths[step])), ENTRIES[entries])
    assert found.token_ids == expected.token_ids
    assert depths[1:] == expected.depths[1:]
    assert all(0 < chance <= 1 for chance in found.confidence)


def test_an_oracles_answer_ends_where_it_is_told_to(model: Any) -> None:
    observer = observer_of(model.directory)
    whole = oracle_answer(observer, PROMPT, TOKENS, KEPT).token_ids
    assert oracle_answer(observer, PROMPT, TOKENS, KEPT, lambda tokens: len(tokens) == 4).token_ids == whole[:4]
    with pytest.raises(InvalidValueError, match="entries"):
        oracle_answer(observer, PROMPT, TOKENS, "lost")


def test_full_depth_runs_once_and_each_pair_for_both_kinds() -> None:
    """Full depth runs once, and every pair for both kinds of KV."""
    asked: list[DepthPolicy] = []

    def outcome(policy: DepthPolicy) -> Outcome:
        asked.append(policy)
        return Outcome(20, 20 - len(asked), 0)

    found = measure_perturbing(outcome, Grid("share", 9, [4, 5, 9], [1, 2], [1, 4]))
    pairs = [(layers, step) for layers in (1, 2) for step in (1, 4)]
    assert asked == [FullDepth(), *(OneStepCopied(*pair, entries) for entries in ENTRIES for pair in pairs)]
    rows = found.table().rows
    assert rows[0][:3] == ("0 (full depth)", "-", "95.0%")
    assert rows[4][:3] == ("2", "4", "75.0%")
    assert rows[4][4] == "55.0%"
    assert rows[4][-1] == "2"
    assert set(found.as_dict()["entries"]) == set(ENTRIES)


def test_the_oracles_table_counts_tokens_after_the_first(model: Any) -> None:
    observer = observer_of(model.directory)
    answers = {KEPT: [oracle_answer(observer, PROMPT, TOKENS, KEPT)]}
    result = Oracle("exact match", LAYERS, answers, {KEPT: [True]})
    mean = np.mean(answers[KEPT][0].depths[1:])
    (row,) = result.table().rows
    assert row[1] == "100.0% (1)"
    assert row[3] == f"{mean:.2f}"
    assert row[-1] == f"{TOKENS - 1}"


@pytest.mark.parametrize(("measure", "again", "said"), [(AGREEMENT, 4, 0), (AGREEMENT, 3, 1), ("exact match", 3, 0)])
def test_a_full_depth_that_does_not_agree_with_itself_is_told_of(measure: str, again: int, said: int) -> None:
    result = measure_perturbing(lambda _: Outcome(4, again, 0), Grid(measure, 8, [8] * 4, [1], [2]))
    notes = result.table().notes
    assert len(notes) == said
    assert all("only 75.0% of its answers again" in note for note in notes)
