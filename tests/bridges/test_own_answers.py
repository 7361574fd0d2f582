"""What a model makes up to be asked, and what policies keep of full depth's answers."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from bridge_files import some_maps, write_maps

from d3engine.depth import D3, FullDepth
from d3engine.engine.engine import Engine
from d3engine.engine.model_directory import model_directory
from d3engine.errors import InvalidValueError
from d3engine.request.params import SamplingParams
from d3engine.research.bridges.judging import Reading
from d3engine.research.bridges.own_answers import OwnAnswers, OwnComparison, made_up_prompts, own_answers


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine("demo", device="cpu", depth=FullDepth(), kv_cache_memory_bytes=2**25) as engine:
        yield engine


def test_made_up_questions_end_and_differ_by_seed(engine: Engine) -> None:
    """A model makes up questions that end, and other seeds have others."""
    asked = made_up_prompts(engine, 5, seed=0)
    assert len(set(asked)) == 5
    assert all(question.endswith("?") and "Question:" not in question for question in asked)
    assert made_up_prompts(engine, 3, seed=0) == asked[:3]
    assert not set(asked) & set(made_up_prompts(engine, 5, seed=1))


def test_a_model_that_ends_none_of_its_questions_is_refused(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("d3engine.research.bridges.own_answers.QUESTION_TOKENS", 2)
    with pytest.raises(InvalidValueError, match="--task must be that of a model which ends the questions"):
        made_up_prompts(engine, 2, seed=0)


def test_a_policy_answers_with_the_file_of_bridges_that_it_names(engine: Engine, tmp_path: Path) -> None:
    file, directory, config = tmp_path / "b.safetensors", model_directory("demo"), engine.config
    write_maps(some_maps(config.num_layers, config.hidden_size, scale=0), directory, file)
    prompts = ["Question: Tom has 2 pens and finds 3. How many?\nAnswer:", "Question: Ann has 9 cups.\nAnswer:"]
    params = SamplingParams(temperature=0, max_tokens=10, depth=D3(0.8, 0.5))
    outputs = engine.generate(prompts, params, use_tqdm=False)
    readings = [Reading([*one.prompt_token_ids, *range(5, 15)], len(one.prompt_token_ids)) for one in outputs]
    found = own_answers(engine, D3(0.8, 0.5, bridges=str(file)), readings)
    assert found == [one.outputs[0].token_ids for one in outputs], "maps that do nothing change nothing"
    with pytest.raises(InvalidValueError, match=r"bridges must be .*is missing"):
        own_answers(engine, D3(0.8, 0.5, bridges=str(tmp_path / "none")), readings)


def test_kept_answers_end_where_they_part_and_cycles_count() -> None:
    """Kept answers end where they part, and cycles are counted."""
    full = OwnAnswers("full", [list(range(64)), [1, 2, 3, 4]])
    other = OwnAnswers("other", [[*range(16), 99, *range(17, 64)], [1, 2]])
    circles = OwnAnswers("circles", [[0, *[7, 8] * 20], [1, 2, 3, 4, 1, 2, 3, 4]])
    result = OwnComparison(full, [other, circles])
    assert [one["kept_of_32"] for one in result.as_dict()["policies"]] == [1, (1 / 2 + 1 / 2) / 2, (1 / 32 + 1) / 2]
    assert [one["kept_of_64"] for one in result.as_dict()["policies"]] == [1, (1 / 4 + 1 / 2) / 2, (1 / 64 + 1) / 2]
    assert [one["distinct"] for one in result.as_dict()["policies"]] == [1, 1, (3 / 38 + 4 / 5) / 2]
    assert [one["circling"] for one in result.as_dict()["policies"]] == [0, 0, 1 / 2]
    row = result.table().rows[1]
    assert row[:3] == ("other", "50.0%", "37.5%")
