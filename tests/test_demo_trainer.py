"""The demo model's trainer: answers in a batch are those of each prompt alone; it learns from what was asked for."""

from __future__ import annotations

from argparse import ArgumentTypeError
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from d3engine.evaluation.procedural import NAMES, all_problems
from d3engine.weights_tools.demo_trainer import DemoConfig, DemoModel, export, load
from d3engine.weights_tools.train_demo import earlier_model, mixed_problems, task_names


@pytest.fixture(scope="module")
def model() -> DemoModel:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 60, "layers": 4, "width": 32, "heads": 4, "kv_heads": 2, "ffn": 48}
    model = DemoModel(DemoConfig(**sizes))
    with torch.no_grad():
        for parameter in (model.out, model.down, model.lm_head):  # a new one's layers do nothing
            parameter.normal_(0.0, 0.3)
    return model


@pytest.mark.parametrize("cutoff", [None, [100, 100, 3, 1]])
def test_a_prompt_answers_in_a_batch_as_alone(model: DemoModel, cutoff: list[int] | None) -> None:
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(2, 60, (length,), generator=generator).tolist() for length in (9, 3, 5, 1, 7)]
    with torch.inference_mode():
        together = model.generate(prompts, max_tokens=12, eos=1, cutoff=cutoff)
        alone = [model.generate([prompt], max_tokens=12, eos=1, cutoff=cutoff)[0] for prompt in prompts]
    assert together == alone
    assert sum(map(len, alone)) >= 30


def test_training_goes_on_from_what_was_exported(model: DemoModel, tmp_path: Path) -> None:
    export(model, b"a tokenizer", {}, tmp_path)
    found = DemoModel(model.config)
    assert load(found, tmp_path) == b"a tokenizer"
    for name, parameter in model.named_parameters():
        assert torch.equal(dict(found.named_parameters())[name], parameter.to(torch.bfloat16).float()), name
        assert parameter.requires_grad


def test_a_mix_has_each_task_as_often_and_one_task_is_its_own_stream() -> None:
    names = ["word-problems", "word-sorting", "dyck-languages"]
    mixed = [problem.question for problem in islice(mixed_problems(names, "train", 0), 300)]
    streams = [iter([problem.question for problem in islice(all_problems(name, "train", 0), 300)]) for name in names]
    counts = dict.fromkeys(names, 0)
    heads = {name: next(stream) for name, stream in zip(names, streams, strict=True)}
    for question in mixed:  # each stream in its own order, none skipped
        name = next(name for name, head in heads.items() if head == question)
        heads[name] = next(streams[names.index(name)])
        counts[name] += 1
    assert min(counts.values()) > 70
    assert list(islice(mixed_problems(names[1:2], "train", 0), 20)) == list(
        islice(all_problems(names[1], "train", 0), 20)
    )


def test_tasks_that_do_not_exist_are_named() -> None:
    assert task_names("all") == list(NAMES)
    assert task_names("word-sorting,word-problems") == ["word-sorting", "word-problems"]
    with pytest.raises(ArgumentTypeError, match="'sorting' is not allowed: all, or some of word-problems, "):
        task_names("word-sorting,sorting")


def test_a_model_to_start_from_is_one_that_the_trainer_made(model: DemoModel, tmp_path: Path) -> None:
    with pytest.raises(ArgumentTypeError, match=r"nowhere' is not allowed: .* no config.json there"):
        earlier_model(str(tmp_path / "nowhere"))
    export(model, b"a tokenizer", {}, tmp_path)
    with pytest.raises(ArgumentTypeError, match="is not allowed: a model of the shape that this script trains"):
        earlier_model(str(tmp_path))
    export(DemoModel(DemoConfig()), b"a tokenizer", {}, tmp_path)
    assert earlier_model(str(tmp_path)) == tmp_path
