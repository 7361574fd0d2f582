"""The demo model's trainer: answers in a batch are those of each prompt alone; it learns from what was asked for."""

import json
import random
import re
import runpy
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from d3engine.engine.model_directory import model_directory
from d3engine.research.evaluation.procedural import NAMES, all_problems
from d3engine.weights_tools.demo_trainer import (
    DemoConfig,
    DemoModel,
    batch_loss,
    draw_tail,
    exits_loss,
    export,
    load,
    make_batch,
    mixed_problems,
)
from d3engine.weights_tools.train_demo import (
    DemoRun,
    earlier_model,
    exit_depths,
    layers_to_move,
    parse,
    share,
    task_names,
)

TOKENIZER = (model_directory("demo") / "tokenizer.model").read_bytes()


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


@pytest.mark.parametrize("cutoff", [None, [100, 100, 3, 1]])
def test_what_is_trained_is_what_is_generated_at_the_same_depths(model: DemoModel, cutoff: list[int] | None) -> None:
    """Also where the border stands inside the prompt, since a prompt that stops there generates from there on."""
    prompt = torch.randint(2, 60, (7,), generator=torch.Generator().manual_seed(2)).tolist()
    with torch.inference_mode():
        for border in (7, 4, 1):
            (answer,) = model.generate([prompt[:border]], max_tokens=12, eos=1, cutoff=cutoff)
            tokens = torch.tensor([prompt[:border] + answer])
            hidden = model(tokens[:, :-1], border, cutoff)
            logits = torch.nn.functional.linear(hidden, model.lm_head)
            assert logits[0, border - 1 :].argmax(-1).tolist() == answer
            assert len(set(answer)) > 1


def test_an_exit_answers_as_a_model_of_so_many_layers(model: DemoModel) -> None:
    tokens = torch.randint(2, 60, (3, 9), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        found = model.leave_at(tokens, [4, 1, 3])
        for depth, hidden in zip([4, 1, 3], found, strict=True):
            short = DemoModel(replace(model.config, layers=depth))
            for name, parameter in short.named_parameters():
                whole = dict(model.named_parameters())[name]
                parameter.copy_(whole[:depth] if parameter.dim() == 3 else whole)
            assert torch.equal(hidden, short(tokens, 9)), depth


def test_prompt_tail_is_learnt_at_the_depths_of_generation(model: DemoModel) -> None:
    """A prompt's tail is learnt at the depths of generated tokens."""
    batch = make_batch([([1, 7, 8, 9, 5], [4, 3, 1]), ([1, 2, 8, 6, 5], [4, 1])])
    shorter = replace(batch, prompt=3)
    cutoff = [100, 100, 3, 1]
    loss, answers = batch_loss(model, batch, cutoff, tail=2)
    assert torch.equal(loss, batch_loss(model, shorter, cutoff)[0])
    assert not torch.equal(loss, batch_loss(model, batch, cutoff)[0])
    assert not torch.equal(loss, answers)


def test_each_exit_adds_its_loss(model: DemoModel) -> None:
    batch = make_batch([([1, 7, 8, 9, 5], [4, 3, 1]), ([1, 2, 8, 6, 5], [4, 1])])
    loss, by_kind = exits_loss(model, batch, [2, 3])
    full, answers = batch_loss(model, batch, None)
    assert list(by_kind) == ["full", "exit 2", "exit 3"]
    assert torch.equal(by_kind["full"], answers)
    assert torch.equal(exits_loss(model, batch, [])[0], full)
    rest = sum((exits_loss(model, batch, [depth])[0] - full).item() for depth in (2, 3))
    assert (loss - full).item() == pytest.approx(rest, rel=1e-5)


def test_tails_are_drawn_as_often_as_asked_and_are_mostly_short() -> None:
    rng = random.Random(0)
    assert {draw_tail(rng, 20, 0.0) for _ in range(50)} == {0}
    drawn = [draw_tail(rng, 20, 0.5) for _ in range(2000)]
    assert set(drawn) == set(range(20))
    assert 900 < sum(tail > 0 for tail in drawn) < 1100
    assert sum(0 < tail <= 8 for tail in drawn) > 2 * sum(tail > 8 for tail in drawn)
    assert {draw_tail(rng, 2, 1.0) for _ in range(50)} == {1}


def test_record_holds_the_whole_recipe_of_resumed_training(tmp_path: Path) -> None:
    """A record holds the whole recipe, also where training went on."""
    shipped = model_directory("demo")
    words = ["--out", str(tmp_path), "--start-from", str(shipped), "--exits", "9,11", "--tail-share", "0.6"]
    run = DemoRun(parse([*words, "--rate", "0.5", "--threads", "1", "--steps", "1800"]))
    run.schedule.finish(929, 400)
    record = json.loads(json.dumps(run.record()))
    assert record["started_from"] == "demo_model"
    assert record["earlier"] == json.loads((shipped / "training.json").read_text())
    expected = {"exits": [9, 11], "prompt_tail_share": 0.6, "muon_rate": 0.01}
    ends = {"steps": 1329, "steps_planned": 1800, "finished_early_at_step": 929}
    assert (expected | ends).items() <= record["recipe"].items()
    assert "earlier" not in DemoRun(parse(["--out", str(tmp_path), "--threads=1", "--tasks", "word-sorting"])).record()


def test_run_to_end_early_ends_there_after_an_interruption(tmp_path: Path) -> None:
    """A run that is to end early ends there after an interruption too."""
    words = ["--out", str(tmp_path), "--threads", "1", "--steps", "1800", "--refine-steps", "0"]
    run = DemoRun(parse(words))
    run.progress.step = 900
    (tmp_path / "FINISH").write_text("40")
    run.finish_early()
    run.save()
    resumed = DemoRun(parse([*words, "--resume"]))
    assert resumed.load_checkpoint() == 900
    assert resumed.schedule.steps == 940
    assert resumed.schedule.factor(939) == run.schedule.factor(939) > 0


@torch.no_grad()
def test_layers_are_moved_above_all_others_in_their_order(model: DemoModel) -> None:
    moved = DemoModel(model.config)
    moved.load_state_dict(model.state_dict())
    moved.move_to_the_end([2, 0])
    for was, now in zip(model.state_dict().values(), moved.state_dict().values(), strict=True):
        assert torch.equal(now, was[[1, 3, 0, 2]] if len(was) == model.config.layers else was)


def test_run_begins_with_its_layers_in_the_order_asked_for(tmp_path: Path) -> None:
    """A run begins with the layers where it was asked to put them."""
    words = ["--out", str(tmp_path), "--start-from", str(model_directory("demo")), "--threads", "1"]
    run, usual = DemoRun(parse([*words, "--move-to-the-end", "8,5"])), DemoRun(parse(words))
    order = [0, 1, 2, 3, 4, 6, 7, 9, 10, 11, 12, 13, 14, 15, 5, 8]
    assert torch.equal(run.model.down, usual.model.down[order])
    assert torch.equal(run.started_from["qkv"], usual.started_from["qkv"][order])
    recipe = run.record()["recipe"]
    assert isinstance(recipe, dict)
    assert recipe["layers_moved_to_the_end"] == [5, 8]


def test_a_share_of_the_start_is_kept_in_the_mean(tmp_path: Path) -> None:
    words = ["--out", str(tmp_path), "--threads", "1", "--start-from", str(model_directory("demo"))]
    for kept, expected in (("0", 1.0), ("0.25", 0.75), ("1", 0.0)):
        run = DemoRun(parse([*words, "--keep-of-start", kept]))
        before = {name: parameter.clone() for name, parameter in run.model.named_parameters()}
        with torch.no_grad():
            for parameter in run.model.parameters():
                parameter += 1  # all that this training has taught
        run.keep_a_share_of_the_start()
        for name, parameter in run.model.named_parameters():
            torch.testing.assert_close(parameter - before[name], torch.full_like(parameter, expected))


@pytest.mark.parametrize("option", ["--keep-of-start 0.5", "--move-to-the-end 5,8"])
def test_what_is_done_to_a_start_asks_for_one(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--out", str(tmp_path), *option.split()])
    assert f"{option.split()[0]} is of use with --start-from alone" in capsys.readouterr().err


def test_training_goes_on_from_what_was_exported(model: DemoModel, tmp_path: Path) -> None:
    export(model, TOKENIZER, {}, tmp_path)
    found = DemoModel(model.config)
    assert load(found, tmp_path) == TOKENIZER
    for name, parameter in model.named_parameters():
        assert torch.equal(dict(found.named_parameters())[name], parameter.to(torch.bfloat16).float()), name
        assert parameter.requires_grad


def test_mixed_problems_have_each_task_as_often_and_in_order() -> None:
    """A mix has each task as often, and one task is its own stream."""
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


def test_mixed_problems_have_the_share_of_single_steps() -> None:
    """A share of a mix is problems of a single step, which no measured task has."""

    def steps(single_step_share: float) -> list[int]:
        mix = mixed_problems(["word-problems"], "train", 3, single_step_share)
        return [problem.solution.count("=") for problem in islice(mix, 400)]

    assert min(steps(0.0)) == 2
    assert 70 <= steps(0.25).count(1) <= 130
    assert set(steps(1.0)) == {1}


def test_a_share_of_gains_and_losses_is_told_by_who_gives_alone() -> None:
    def found(giver_share: float) -> list[str]:
        mix = mixed_problems(["word-problems"], "train", 3, giver_share=giver_share)
        sentences = (re.findall(r"\w[^.?]*[.]", problem.question)[1:] for problem in islice(mix, 200))
        return [sentence for of_one in sentences for sentence in of_one]

    def share_of_giving(sentences: list[str]) -> float:
        return sum(bool(re.fullmatch(r"\w+ gives \w+ \d+[.]", sentence)) for sentence in sentences) / len(sentences)

    assert share_of_giving(found(0.0)) < 0.2
    assert 0.4 < share_of_giving(found(0.5)) < 0.65
    gains_and_losses = [sentence for sentence in found(1.0) if re.search(r"\d", sentence)]
    assert share_of_giving(gains_and_losses) == 1


@pytest.mark.parametrize(
    ("read", "texts", "message"),
    [
        (exit_depths, ("16", "0", "9,,11", "nine", "-1"), "must be depths from 1 to 15, such as 9,11"),
        (layers_to_move, ("16", "-1", "5;8", "", "5,x"), "must be layers from 0 to 15"),
        (share, ("1.1", "-0.1", "nan", "half"), "must be a number from 0 to 1"),
        (task_names, ("word-sorting,sorting",), r"must be all, or some of word-problems, .*; got 'sorting'"),
    ],
)
def test_option_that_cannot_be_read_is_refused_by_its_bounds(
    read: Callable[[str], Any], texts: tuple[str, ...], message: str
) -> None:
    """Depths, layers, shares and tasks that do not exist are refused with what is allowed."""
    for text in texts:
        with pytest.raises(ArgumentTypeError, match=message):
            read(text)


def test_trainer_starts_as_a_module(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    name = "d3engine.weights_tools.train_demo"
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    monkeypatch.delitem(sys.modules, name)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(name, run_name="__main__")
    assert ended.value.code == 0
    assert "--keep-of-start" in capsys.readouterr().out


def test_options_of_the_trainer_are_read() -> None:
    assert exit_depths("11,9,9") == [9, 11]
    assert share("0.25") == 0.25
    assert task_names("all") == list(NAMES)
    assert task_names("word-sorting,word-problems") == ["word-sorting", "word-problems"]


def test_a_model_to_start_from_is_one_that_the_trainer_made(model: DemoModel, tmp_path: Path) -> None:
    with pytest.raises(ArgumentTypeError, match=r"must be .*; got '.*nowhere', without config.json"):
        earlier_model(str(tmp_path / "nowhere"))
    export(model, TOKENIZER, {}, tmp_path)
    with pytest.raises(ArgumentTypeError, match="must be a model of the shape that this script trains"):
        earlier_model(str(tmp_path))
    export(DemoModel(DemoConfig()), TOKENIZER, {}, tmp_path)
    assert earlier_model(str(tmp_path)) == tmp_path
