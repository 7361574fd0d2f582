"""`d3engine depth`: own answers, students distilled from them, and what these are judged by."""

import json
import random
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from invoking import invoke, refused, report_of, succeed
from tiny_models import TinyLlama

from d3engine import D3, Distilled, Engine, FixedSkip, FullDepth, SamplingParams, Width
from d3engine.depth import DepthPolicy
from d3engine.engine.model_directory import model_directory
from d3engine.model.bridges import Bridge
from d3engine.model.config import ModelConfig
from d3engine.model.expected_tensors import fingerprint
from d3engine.model.students import MATRICES, NEURONS, Student, read_student, write_student
from d3engine.model.weights import load_weights
from d3engine.research.analysis.answers import same_beginning
from d3engine.research.bridges.judging import skipping
from d3engine.research.distillation import training as module
from d3engine.research.distillation import widths
from d3engine.research.distillation.corpus import OwnAnswer, add_answers, asked_of, read_corpus
from d3engine.research.distillation.judging import Agreement, Judgeable, judge, judgeable_of
from d3engine.research.distillation.passes import AnswerPass, layers_of, replaced
from d3engine.research.distillation.prompts import KINDS, is_held_out, written_prompts
from d3engine.research.distillation.training import (
    Distillation,
    Shape,
    TrainingOptions,
    best_kept,
    best_window,
    narrowed_shape,
    window_shape,
)
from d3engine.research.distillation.widths import Refitting, kept_neurons, narrow, neuron_scores

LAYERS, TOKENS = 6, 24
SHAPES = {"num_hidden_layers": LAYERS, "hidden_size": 32, "intermediate_size": 128}


@pytest.fixture(scope="module")
def model(tiny_llama: Callable[..., TinyLlama]) -> TinyLlama:
    return tiny_llama(**SHAPES, initializer_range=0.15)


@pytest.fixture(scope="module")
def run(model: TinyLlama) -> AnswerPass:
    config = ModelConfig.from_directory(model.directory)
    return AnswerPass(config, load_weights(model.directory, config, dtype=torch.float32, device="cpu"))


def answered(model: TinyLlama, count: int, policy: DepthPolicy | None = None, **changes: Any) -> list[OwnAnswer]:
    numbers = random.Random(count)
    prompts = [[numbers.randrange(300) for _ in range(numbers.randint(3, 9))] for _ in range(count)]
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, depth=policy or FullDepth())
    with Engine(model.directory, depth=policy or FullDepth(), skip_tokenizer_init=True, device="cpu") as engine:
        outputs = engine.generate(prompts, params, use_tqdm=False)
    return [
        OwnAnswer("ab"[nth % 2], False, f"{nth}", prompt, list(output.outputs[0].token_ids))
        for nth, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
    ]


@pytest.fixture(scope="module")
def texts(model: TinyLlama) -> list[OwnAnswer]:
    return answered(model, 24)


def test_written_prompts_of_each_kind_split_without_overlap() -> None:
    """Each kind has prompts to train on and held-out prompts, and no prompt is in both parts."""
    for kind in KINDS:
        parts = [set(written_prompts(kind, 300, 0, held_out=held_out)) for held_out in (False, True)]
        assert len(parts[0]) == 300
        assert len(parts[1]) >= 40
        assert not parts[0] & parts[1]
        assert all(map(is_held_out, parts[1]))
        assert written_prompts(kind, 5, 0, held_out=True) == written_prompts(kind, 5, 0, held_out=True)


def test_a_pass_takes_the_tokens_that_the_engine_decodes(model: TinyLlama, run: AnswerPass, tmp_path: Path) -> None:
    """At full depth, with layers left out, and with a student that is narrower and has its own block."""
    shape = window_shape(run, 2, 5, [3])
    torch.manual_seed(0)
    block = {name: tensor + 0.05 * torch.randn_like(tensor) for name, tensor in shape.start[3].items()}
    neurons = torch.arange(0, 128, 2)
    narrower = {NEURONS: neurons, "down": torch.randn(32, 64) * 0.1}
    student = Student(fingerprint(model.directory), LAYERS, 32, (2, 4), {3: block, 1: narrower})
    path = tmp_path / "student.safetensors"
    write_student(student, path)
    cases: list[tuple[DepthPolicy, Any, Any]] = [
        (FullDepth(), skipping((), LAYERS), {}),
        (FixedSkip([2, 3]), skipping((2, 3), LAYERS), {}),
        (Distilled((2, 4), str(path)), skipping((2, 4), LAYERS), layers_of(student, run.weights)),
    ]
    for policy, schedule, layers in cases:
        for text in answered(model, 3, policy):
            full = run.at_full_depth(text.prompt_ids, text.token_ids, {0})
            logits = run.logits(run.run(full, schedule, layers=layers))
            assert logits.argmax(-1).tolist() == text.token_ids[1:], policy


def test_saved_layers_count_the_bridges_that_are_crossed(run: AnswerPass) -> None:
    """As a window grows one bridge takes the place of another: a token crosses one, and not all of them."""
    schedule = D3(0.9, 0.5).schedule(LAYERS)
    windows = schedule.windows()
    bridges = {(a, b): Bridge(a, b, torch.zeros(32, 32), torch.zeros(32)) for a, b in windows}
    assert len(windows) == 3
    bare, bridged = (Judgeable("", schedule, bridges=one).saved(run.config, 9) for one in (None, bridges))
    crossing = sum(int(schedule.depth_at(step) < LAYERS) for step in range(1, 10)) / 9
    assert bare - bridged == pytest.approx(crossing * (32 * 32 + 32) / run.config.layer_parameters)


def test_agreement_by_position_is_the_mean_of_those_steps() -> None:
    """Each group of generation steps has its own mean, of the texts that are so long."""
    rows = np.arange(100.0)
    long, short = np.stack((rows, rows < 96)), np.stack((np.full(20, 4.0), np.ones(20)))
    found = Agreement([("a", long), ("b", short)]).by_position()
    assert list(found) == ["1-48", "49-96", "97-144"]
    assert found["1-48"]["kl"] == pytest.approx((rows[:48].sum() + 80) / 68)
    assert (found["49-96"]["kl"], found["49-96"]["kl_95"]) == (rows[48:96].mean(), None)  # of one text no interval
    assert [one["agreement"] for one in found.values()] == [1, 1, 0]


def test_a_policy_of_several_students_is_judged_by_step(model: TinyLlama, run: AnswerPass, tmp_path: Path) -> None:
    """Each row runs the layers of its step as the engine does, and what they save is a mean over the steps."""
    torch.manual_seed(1)
    block = {name: t + 0.05 * torch.randn_like(t) for name, t in window_shape(run, 2, 5, [3]).start[3].items()}
    names = [str(tmp_path / name) for name in ("wide", "narrow")]
    for name, kept in zip(names, (96, 32), strict=True):
        own = {NEURONS: torch.arange(kept), "down": torch.randn(32, kept) * 0.1}
        layers = {1: own, **({3: block} if kept == 32 else {})}
        write_student(Student(fingerprint(model.directory), LAYERS, 32, (), layers), name)
    policy = Width(names, steps=[3, 8])
    judgeable = judgeable_of(run, model.directory, "words", policy, fingerprint(model.directory))
    assert judgeable.first == 1
    for text in answered(model, 3, policy):
        full = run.at_full_depth(text.prompt_ids, text.token_ids, {1})
        state = run.run(full, judgeable.schedule, first=1, layers=judgeable.layers, later=judgeable.later)
        assert run.logits(state).argmax(-1).tolist() == text.token_ids[1:]
    fewer = [3 * 32 * (128 - kept) / run.config.layer_parameters for kept in (96, 32)]
    assert judgeable.saved(run.config, 10) == pytest.approx((5 * fewer[0] + 3 * fewer[1]) / 10)
    assert judgeable.saved(run.config, 2) == 0


def test_training_brings_a_block_nearer_than_the_layers_left_out(run: AnswerPass, texts: list[OwnAnswer]) -> None:
    kept = best_kept(run, 2, 5, texts[:2], TOKENS)
    shape = window_shape(run, 2, 5, [kept])
    options = TrainingOptions(hidden_steps=60, steps=40, rate=3e-2, rows=16, judge_every=50)
    training = Distillation(run, shape, options)
    training.train(texts, texts[:4], None, "")  # a random model has nothing general to learn: judged on what is seen
    first, *_, last = training.curve.points
    assert [point["step"] for point in training.curve.points] == [0, 50, 100]
    assert last["kl"] < 0.7 * first["kl"]
    assert sum(training.curve.losses[50:60]) < 0.7 * sum(training.curve.losses[:10])
    left_out = Judgeable("left out", skipping(range(2, 5), LAYERS))
    found = judge(run, texts[:4], [left_out, training.judgeable("student")], TOKENS)
    assert found[1].mean(0).value < found[0].mean(0).value
    assert found[1].kinds == ["a", "b"]
    assert found[1].positions() == 4 * (TOKENS - 1)


def test_the_window_that_answers_can_spare_is_found(run: AnswerPass, texts: list[OwnAnswer], answers: Path) -> None:
    """Two layers that change nothing are the window of two; a command that names a number says which it takes."""
    layers = list(run.weights.layers)
    for number in (2, 3):
        silent = {name: torch.zeros(getattr(layers[number], name).shape) for name in ("output", "down")}
        layers[number] = replaced(layers[number], silent, torch.float32)
    spared = AnswerPass(run.config, replace(run.weights, layers=layers))
    assert best_window(spared, 2, texts[:3], TOKENS, lambda: None) == (2, 4)
    words = [
        "depth",
        "train",
        "demo",
        "--answers",
        str(answers),
        "--window",
        "2",
        "--out",
        str(answers.with_name("two")),
    ]
    found = succeed([*words, "--json"])
    (left_out,), (own,) = (json.loads(found.stdout)[name] for name in ("skip_layers", "own_layers"))
    assert f"the window {min(left_out, own)}:{max(left_out, own) + 1}" in found.stderr
    assert abs(left_out - own) == 1


def test_low_rank_training_changes_matrices_by_that_rank(run: AnswerPass, texts: list[OwnAnswer]) -> None:
    """Maps of rank 2 bring two kept layers nearer to the window, with a small part of the numbers."""
    shape = window_shape(run, 2, 5, [2, 4])
    options = TrainingOptions(hidden_steps=60, rate=3e-2, judge_every=60)
    whole, training = Distillation(run, shape, options), Distillation(run, shape, replace(options, rank=2))
    assert training.num_trained < whole.num_trained / 5
    training.train(texts, texts[:4], None, "")
    first, last = training.curve.points
    assert last["kl"] < 0.9 * first["kl"]
    for layer, named in training.tensors().items():
        for name in MATRICES:
            assert int(torch.linalg.matrix_rank(named[name] - shape.start[layer][name], rtol=1e-4)) == 2


@pytest.mark.parametrize("rank", [None, 2])
def test_a_run_that_was_cut_off_ends_as_one_that_was_not(
    rank: int | None, run: AnswerPass, texts: list[OwnAnswer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SAVE_EVERY", 3)
    shape = window_shape(run, 2, 4, [2])
    options = TrainingOptions(hidden_steps=5, steps=6, rate=1e-2, rows=8, judge_every=4, rank=rank)

    def trained(state: Path | None, steps_before_the_end: int | None) -> Distillation:
        training = Distillation(run, shape, options)

        def progress(taken: int, words: str) -> None:
            if steps_before_the_end is not None and training.curve.num_steps >= steps_before_the_end:
                raise KeyboardInterrupt

        training.train(texts[2:], texts[:2], state, "key", progress)
        return training

    whole, state = trained(None, None), tmp_path / "state"
    with pytest.raises(KeyboardInterrupt):
        trained(state, 7)
    resumed = trained(state, None)
    assert resumed.curve.losses == whole.curve.losses
    for layer, tensors in whole.tensors().items():
        assert all(torch.equal(resumed.tensors()[layer][name], tensor) for name, tensor in tensors.items())


def judged_kl(run: AnswerPass, shape: Shape, texts: list[OwnAnswer]) -> float:
    training = Distillation(run, shape, TrainingOptions())
    (found,) = judge(run, texts, [training.judgeable("student")], TOKENS)
    return found.mean(0).value


def cut(run: AnswerPass, kept: dict[int, torch.Tensor]) -> Shape:
    """Neurons left out, and nothing refitted."""
    down = {layer: run.weights.layers[layer].down for layer in kept}
    return Shape((), {layer: {NEURONS: own, "down": down[layer][:, own]} for layer, own in kept.items()})  # type: ignore[index]


def test_refitted_width_is_nearer_to_full_depth_than_a_cut_one(run: AnswerPass, texts: list[OwnAnswer]) -> None:
    """A refitted width is nearer to full depth than a cut one, and the whole width equals full depth."""
    every = range(LAYERS)
    whole, narrower = (
        narrowed_shape(run, Shape((), {}), every, width, texts[4:], lambda parts: None) for width in (1.0, 0.75)
    )
    assert sum(len(own[NEURONS]) for own in whole.start.values()) == LAYERS * 128
    assert sum(len(own[NEURONS]) for own in narrower.start.values()) == pytest.approx(0.75 * LAYERS * 128, rel=0.05)
    assert judged_kl(run, whole, texts[4:]) < 1e-6
    kept = {layer: own[NEURONS] for layer, own in narrower.start.items()}
    assert judged_kl(run, narrower, texts[4:]) < judged_kl(run, cut(run, kept), texts[4:])


def test_refitting_makes_up_for_layers_left_out_below(run: AnswerPass, texts: list[OwnAnswer]) -> None:
    """A refit behind a window that was left out is nearer to full depth than the same widths refitted without it."""
    window = window_shape(run, 1, 3, [2])
    kept = {layer: torch.arange(0, 128, 2) for layer in (3, 4, 5)}
    found = []
    for skip in ((1,), ()):
        down = narrow(run, texts[4:], Refitting(kept), skip)
        own = {layer: {NEURONS: kept[layer], "down": down[layer]} for layer in kept}
        found.append(judged_kl(run, Shape((1,), {**window.start, **own}), texts[4:]))
    assert found[0] < found[1]


def test_neurons_of_low_scores_cost_less_than_others(run: AnswerPass, texts: list[OwnAnswer]) -> None:
    """Leaving out the lower half of each layer's neurons costs less than a random half, which costs less."""
    scores = neuron_scores(run, texts[4:], range(LAYERS))
    torch.manual_seed(0)
    orders = (scores, {layer: torch.rand(128) for layer in scores}, {layer: -own for layer, own in scores.items()})
    losses = [
        judged_kl(run, cut(run, {n: own.topk(64).indices.sort().values for n, own in order.items()}), texts[4:])
        for order in orders
    ]
    assert losses == sorted(losses)


def test_a_token_counts_by_the_root_of_what_its_neurons_matter() -> None:
    """One at which neuron 0 matters 64 times as much as neuron 1 does at nine others leaves neuron 1 the first."""
    gated = torch.zeros(12, 3)
    gated[:2, 2] = 1e3  # a prompt, which counts for nothing
    gated[2, 0], gated[3:, 1] = 64**0.25, 1
    scores = {layer: torch.zeros(3) for layer in (0, 1)}
    gates = {layer: gated.clone().requires_grad_() for layer in scores}
    for gate in gates.values():
        (gate.square() / 2).sum().backward()  # type: ignore[no-untyped-call]
    widths._add_scores(scores, gates, prompt_length=2)
    assert scores[0].tolist() == pytest.approx([64 / 128**0.5, 9 / 2**0.5, 0])
    assert torch.equal(scores[0], scores[1])


def test_tokens_are_drawn_as_the_model_gives_them() -> None:
    logits = torch.tensor([-torch.inf, 0, 1, -torch.inf, 2, -torch.inf]).repeat(20_000, 1)
    drawn = widths._drawn(logits, torch.Generator().manual_seed(0))
    counts = torch.bincount(drawn, minlength=6)
    expected = logits[0].softmax(0) * len(logits)
    assert bool(((counts - expected).abs() <= 4 * expected.sqrt()).all())


def test_widths_follow_one_order_of_all_neurons() -> None:
    """The layer whose neurons matter less becomes narrower, though never less than an eighth of what it was."""
    scores = {0: torch.arange(256.0), 1: torch.arange(256.0) + 200, 2: torch.full((256,), 1e-9)}
    kept = {layer: len(own) for layer, own in kept_neurons(scores, 0.5).items()}
    assert kept == {0: 128, 1: 256, 2: 32}
    assert kept_neurons(scores, 1.0)[2].tolist() == list(range(256))


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("answers") / "own.jsonl"
    words = ["depth", "answers", "demo", "--out", str(path), "--texts", "12", "--held-out-texts", "6"]
    succeed([*words, "--max-tokens", "24"])
    lines = path.read_text()
    more = report_of([*words[:-4], "--texts", "15", "--held-out-texts", "6", "--max-tokens", "24"])
    assert path.read_text().startswith(lines), "answers that are there are not asked again"
    assert more["texts"] == 21
    return path


def test_what_a_student_begins_with_is_not_computed_again(
    answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless it would be another: of more answers, say."""
    refits: list[int] = []

    def counted(run: AnswerPass, texts: Sequence[OwnAnswer], *others: Any, **named: Any) -> Any:
        refits.append(len(texts))
        return narrow(run, texts, *others, **named)

    monkeypatch.setattr(module, "narrow", counted)
    out, state = tmp_path / "student.safetensors", tmp_path / "student.safetensors.begin"
    words = ["depth", "train", "demo", "--answers", str(answers), "--width", "0.5", "--narrowed", "13:16"]
    words += ["--steps", "2", "--out", str(out), "--refit-texts"]
    for refit_texts, seen in (("3", [3]), ("3", [3]), ("4", [3, 4])):
        succeed([*words, refit_texts, "--minutes", "0.0001"])
        assert refits == seen
        assert state.exists()
    begun = read_student(out, ModelConfig.from_directory(model_directory("demo")))
    succeed([*words, "4"])
    assert refits == [3, 4]
    assert not state.exists(), "the run is over"
    ended = read_student(out, ModelConfig.from_directory(model_directory("demo")))
    for layer, named in begun.layers.items():
        assert torch.equal(ended.layers[layer][NEURONS], named[NEURONS])
        assert not torch.equal(ended.layers[layer]["down"], named["down"])


def test_refitting_that_was_cut_off_goes_on_by_layer(
    run: AnswerPass, texts: list[OwnAnswer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refitted layers and the order of neurons are not computed again; the student is the same to the bit."""
    monkeypatch.setattr(widths, "SAVE_SECONDS", 0.0)
    refitted, refit, ordered = list[int](), widths._narrow_layer, list[int]()

    def interrupted(run: AnswerPass, number: int, *others: Any) -> Any:
        if refitted == [1, 2]:
            refitted.append(-1)
            raise KeyboardInterrupt
        refitted.append(number)
        return refit(run, number, *others)

    def scores(run: AnswerPass, texts: Sequence[OwnAnswer], *others: Any, **named: Any) -> Any:
        ordered.append(len(texts))
        return neuron_scores(run, texts, *others, **named)

    parts: list[int] = []
    asked = (run, window_shape(run, 3, 5, [4]), range(1, LAYERS), 0.5, texts, parts.append)
    whole = narrowed_shape(*asked)
    monkeypatch.setattr(widths, "_narrow_layer", interrupted)
    monkeypatch.setattr(module, "neuron_scores", scores)
    state = (tmp_path / "state", "key")
    with pytest.raises(KeyboardInterrupt):
        narrowed_shape(*asked, state)
    parts.clear()
    resumed = narrowed_shape(*asked, state)
    assert refitted == [1, 2, -1, 5]
    assert ordered == [len(texts)]
    assert parts == [1]
    for layer, named in whole.start.items():
        assert all(torch.equal(resumed.start[layer][name], tensor) for name, tensor in named.items())
    narrowed_shape(*asked, (state[0], "another"))
    assert ordered == [len(texts)] * 2


def test_a_student_is_trained_written_judged_and_decoded_with(answers: Path, tmp_path: Path) -> None:
    out, report = tmp_path / "student.safetensors", tmp_path / "report.json"
    words = ["depth", "train", "demo", "--answers", str(answers), "--window", "9:12", "--width", "0.5"]
    words += ["--narrowed", "12:16", "--hidden-steps", "4", "--steps", "3", "--judge-every", "3"]
    result = succeed([*words, "--out", str(out), "--report", str(report), "--seed", "1"])
    told = ("order the neurons of 4 layers", "GiB of memory", "to train on", "million numbers trained")
    assert sorted(map(result.stderr.index, told)) == list(map(result.stderr.index, told))
    assert "step 3 of 7: loss" in result.stderr
    found = json.loads(report.read_text())
    assert found["finished"]
    assert [point["step"] for point in found["curve"]] == [0, 3, 6, 7]
    assert found["options"]["rate"] == 3e-4
    assert len(found["skip_layers"]) == 2
    assert found["own_layers"] == sorted({9, 10, 11, 12, 13, 14, 15} - set(found["skip_layers"]))
    assert not out.with_name(f"{out.name}.part").exists()
    skip = ",".join(map(str, found["skip_layers"]))
    policy = f"distilled skip-layers={skip} student={out}"
    measure = ["depth", "measure", "demo", "--answers", str(answers), "--depth", policy, "--windows", "15"]
    described = report_of(measure)["policies"]
    assert [one["policy"] for one in described] == [policy, "[0, 15)", "[1, 16)"]
    assert described[0]["layers_saved"] == pytest.approx(found["layers_saved"])
    assert described[0]["by_position"]["1-48"]["kl"] == pytest.approx(described[0]["all"]["kl"])
    generate = ["generate", "demo", "Question: Tom has 5 pens.", "--max-tokens", "8", "--ignore-eos"]
    wanted = 16 - found["layers_saved"] * 7 / 8  # the first token is the prompt's
    assert f"8 tokens, {wanted:.2f} of 16 layers' worth per token" in succeed([*generate, "--depth", policy]).stderr
    scored = report_of(["eval", "demo", "--depth", policy, "--limit", "2", "--max-tokens", "20"])
    (cost,) = scored["benchmarks"][0]["scores"]
    tokens = cost["tokens"]
    wanted = 16 - found["layers_saved"] * (tokens - 2) / tokens  # of each answer the first token is the prompt's
    assert cost["realised_mean_layers"] == pytest.approx(wanted, abs=1e-6)
    assert cost["realised_flops_ratio"] > 1.1
    further = ["depth", "train", "demo", "--answers", str(answers), "--begin", str(out), "--steps", "2"]
    more = report_of([*further, "--out", str(tmp_path / "more.safetensors")])
    assert (more["skip_layers"], more["own_layers"]) == (found["skip_layers"], found["own_layers"])
    assert more["curve"][0]["kl"] == pytest.approx(found["curve"][-1]["kl"], rel=0.05)  # what the file rounds
    shown = succeed(["depth", "inspect", str(out)])
    assert "skipped: " + ", ".join(skip.split(",")) in shown.stdout
    rows = [line.split()[0] for line in shown.stdout.splitlines()[2:-1]]
    assert [int(word) for word in rows if word.isdigit()] == found["own_layers"]
    student = read_student(out, ModelConfig.from_directory(model_directory("demo")))
    assert student.about["layers_saved"] == pytest.approx(found["layers_saved"])


def test_training_that_does_harm_is_said(answers: Path, tmp_path: Path) -> None:
    """Whole refitted matrices are trained more gently than a block; a rate too high for them is told by its result."""
    words = ["depth", "train", "demo", "--answers", str(answers), "--width", "0.8", "--refit-texts", "8"]
    words += ["--out", str(tmp_path / "student.safetensors"), "--json"]
    gentle, harsh = (succeed([*words, "--steps", "2", *rate]) for rate in ([], ["--rate", "1"]))
    assert json.loads(gentle.stdout)["options"]["rate"] == 3e-5
    first, last = (json.loads(harsh.stdout)["curve"][place]["kl"] for place in (0, -1))
    told = f"worse than it began (KL {first:.3f}, then {last:.3f})"
    assert told in harsh.stderr
    assert "worse than it began" not in gentle.stderr
    maps = json.loads(succeed([*words, "--steps", "1", "--rank", "1"]).stdout)
    assert maps["options"]["rate"] == 3e-4


def test_answers_at_a_depth_are_trained_on_too(answers: Path, tmp_path: Path) -> None:
    """The same prompts answered at another depth make a second file to train on; full depth judges both."""
    student = tmp_path / "student.safetensors"
    train = ["depth", "train", "demo", "--answers", str(answers), "--width", "0.3", "--out", str(student)]
    result = succeed([*train, "--json"])
    assert "no steps: the student is judged as it is; about" in result.stderr.replace("\n", " ")
    first = json.loads(result.stdout)
    held = read_student(student, ModelConfig.from_directory(model_directory("demo"))).layers
    assert {name for own in held.values() for name in own} == {NEURONS, "down"}, "nothing else was changed"
    policy, other = f"distilled student={student}", tmp_path / "other.jsonl"
    words = ["depth", "answers", "demo", "--prompts-of", str(answers), "--depth", policy, "--out", str(other)]
    assert report_of([*words, "--texts", "9", "--held-out-texts", "4", "--max-tokens", "20"])["texts"] == 13
    name = fingerprint(model_directory("demo"))
    full, own = (read_corpus(path, name) for path in (answers, other))
    assert [one.prompt_ids for one in own if one.held_out] == [one.prompt_ids for one in full if one.held_out][:4]
    assert [one.prompt_ids for one in own if not one.held_out] == [x.prompt_ids for x in full if not x.held_out][:9]
    with Engine("demo", depth=Distilled((), str(student))) as engine:
        params = SamplingParams(temperature=0, max_tokens=20)
        outputs = engine.generate([{"prompt_token_ids": one.prompt_ids} for one in own], params, use_tqdm=False)
    assert [list(output.outputs[0].token_ids) for output in outputs] == [one.token_ids for one in own]
    measure = ["depth", "measure", "demo", "--answers", str(answers), "--depth", policy, "--answered", str(other)]
    compared = report_of(measure)["own_answers"]
    pairs = zip(*([one.token_ids[:32] for one in part if one.held_out][:4] for part in (own, full)), strict=True)
    kept = [same_beginning(short, long) / len(long) for short, long in pairs]
    found = [(one["policy"], one["kept_of_32"]) for one in compared["policies"]]
    assert found == [("full", 1), ("other.jsonl", pytest.approx(sum(kept) / 4))]
    assert compared["prompts"] == len(kept) == 4
    both = ["depth", "train", "demo", "--answers", str(answers), "--answers", str(other), "--begin", str(student)]
    result = succeed([*both, "--steps", "1", "--out", str(tmp_path / "more"), "--json"])
    assert "24 answers of" in result.stderr
    assert json.loads(result.stdout)["curve"][0]["agreement"] == pytest.approx(first["curve"][0]["agreement"], abs=0.02)
    refused = invoke(["depth", "answers", "demo", "--depth", policy, "--out", str(tmp_path / "no.jsonl")])
    assert "--prompts-of must be given beside --depth" in refused.stderr.replace("\n", " ")


def test_sigterm_reports_the_texts_that_are_judged(
    answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM ends `depth measure` with the report of the texts that every policy is judged on."""
    report = tmp_path / "report.json"
    words = ["depth", "measure", "demo", "--answers", str(answers), "--windows", "15", "--held-out-texts"]
    wanted, judged, texts = report_of([*words, "2"]), AnswerPass.at_full_depth, list[Any]()

    def interrupted(self: AnswerPass, *given: Any) -> Any:
        if len(texts) == 2:
            signal.raise_signal(signal.SIGTERM)
        texts.append(given)
        return judged(self, *given)

    monkeypatch.setattr(AnswerPass, "at_full_depth", interrupted)
    result = invoke([*words, "6", "--report", str(report), "--json"])
    assert result.exit_code == 130
    assert wanted["texts"] == 2
    assert json.loads(result.stdout) == json.loads(report.read_text()) == wanted


def test_answers_of_another_length_are_not_mixed(answers: Path) -> None:
    """A file of answers takes no answers of another --max-tokens, and says which it has."""
    said = refused(["depth", "answers", "demo", "--out", str(answers), "--texts", "12", "--max-tokens", "30"])
    assert "--max-tokens must be 24, as of the answers in" in said.replace("\n", " ")


def test_a_student_trained_further_answers_anew(answers: Path, tmp_path: Path) -> None:
    """The same prompts are asked again where the student's file has changed, and only there."""
    student, other, lines = tmp_path / "student.safetensors", tmp_path / "other.jsonl", []
    words = ["depth", "answers", "demo", "--prompts-of", str(answers), "--depth", f"distilled student={student}"]
    words += ["--out", str(other), "--texts", "2", "--held-out-texts", "1", "--max-tokens", "8"]
    for width in ("0.3", "0.5", None):
        if width is not None:
            succeed(["depth", "train", "demo", "--answers", str(answers), "--width", width, "--out", str(student)])
        succeed(words)
        lines.append(len(other.read_text().splitlines()))
    assert lines == [1 + 3, 1 + 6, 1 + 6]


def test_bridges_are_fitted_to_own_answers_and_measured(answers: Path, tmp_path: Path) -> None:
    """Bridges are fitted to the answers that students learn from, and measured in the same report."""
    out = tmp_path / "bridges.safetensors"
    words = ["bridge", "fit", "demo", "--answers", str(answers), "--window", "12:14", "--rank", "4", "--even-if-worse"]
    assert report_of([*words, "--out", str(out)])["held_out"]["texts"] == 6
    policies = ["--depth", f"fixed skip-layers=12,13 bridges={out}", "--depth", "fixed skip-layers=12,13"]
    bridged, skipped = report_of(["depth", "measure", "demo", "--answers", str(answers), *policies])["policies"]
    assert bridged["all"]["kl"] != skipped["all"]["kl"]
    assert 1.9 < bridged["layers_saved"] < skipped["layers_saved"] == 2


def test_what_cannot_be_is_refused_before_any_work(answers: Path, tmp_path: Path) -> None:
    base = ["depth", "train", "demo", "--answers", str(answers), "--out", str(tmp_path / "s")]
    for words, said in (
        ([], "--window must be given, or --width"),
        (["--window", "3:4"], "at least two layers"),
        (["--window", "16"], "--window must be an integer from 2 to 15"),
        (["--window", "3:40"], "A:B with 0 <= A < B <= 16"),
        (["--width", "0"], "--width"),
        (["--window", "3:6", "--keep", "7"], "layers of 3 to 5"),
        (["--window", "3:6", "--dtype", "int8"], "--dtype"),
        (["--window", "3:6", "--begin", "s"], "absent beside --begin"),
        (["--window", "3:6", "--narrowed", "1:2"], "absent without --width"),
        (["--window", "3:6", "--rank", "0"], "--rank must be an integer of at least 1"),
        (["--window", "3:6", "--answer-tokens", "0"], "--answer-tokens must be an integer of at least 1"),
    ):
        result = invoke([*base, *words])
        assert result.exit_code != 0
        assert said in result.stderr.replace("\n", " "), result.stderr
    other = tmp_path / "other.jsonl"
    other.write_text(answers.read_text().replace("fingerprint", "finger", 1))
    result = invoke(["depth", "measure", "demo", "--answers", str(other), "--windows", "3"])
    assert "is no file of d3engine depth answers" in result.stderr
    first, *rest = answers.read_text().splitlines()
    other.write_text("\n".join([json.dumps({**json.loads(first), "fingerprint": "x"}), *rest]) + "\n")
    result = invoke(["depth", "measure", "demo", "--answers", str(other), "--windows", "3"])
    assert "written for these weights" in result.stderr


def test_answers_cut_off_in_their_first_line_begin_anew(tmp_path: Path) -> None:
    """A run that was ended before it wrote a whole line goes on as one that had not begun."""
    path = tmp_path / "own.jsonl"
    for content in ("", '{"fingerprint": "sha'):
        path.write_text(content)
        words = ["depth", "answers", "demo", "--out", str(path), "--texts", "1", "--held-out-texts", "1"]
        assert report_of([*words, "--kinds", "arithmetic", "--max-tokens", "4"])["texts"] == 2
        assert len(read_corpus(path, fingerprint(model_directory("demo")))) == 2


def test_a_last_line_that_was_cut_off_is_dropped(answers: Path, tmp_path: Path) -> None:
    path, name = tmp_path / "cut.jsonl", fingerprint(model_directory("demo"))
    path.write_text(answers.read_text() + '{"kind": "co')
    assert read_corpus(path, name) == read_corpus(answers, name)


def test_answers_are_written_as_they_come(tmp_path: Path) -> None:
    """In the order of the prompts; what Ctrl-C has left is asked later, and the engine goes on."""
    path, name, seen = tmp_path / "own.jsonl", fingerprint(model_directory("demo")), list[int]()

    def interrupted() -> None:
        seen.append(len(read_corpus(path, name)))
        if len(seen) == 3:
            raise KeyboardInterrupt

    with Engine("demo", max_num_seqs=2) as engine:
        asked = [asked_of(engine, "own", f"What is {number} and 2?") for number in range(8)]
        with pytest.raises(KeyboardInterrupt):
            add_answers(engine, path, name, asked, 12, progress=interrupted)
        assert seen == [1, 2, 3]
        begun = path.read_text()
        add_answers(engine, path, name, asked, 12)
    assert path.read_text().startswith(begun)
    assert [one.key for one in read_corpus(path, name)] == [one.key for one in asked]


def test_a_user_s_own_prompts_are_answered(tmp_path: Path) -> None:
    """One in eight is held out, each is asked once, and a file without one of a part is refused before any work."""
    asked = [f"What is {number} and {number}?" for number in range(24)]
    file, path = tmp_path / "prompts.txt", tmp_path / "own.jsonl"
    file.write_text("\n".join(asked + asked[:5]))
    words = ["depth", "answers", "demo", "--prompts", str(file), "--out", str(path), "--max-tokens", "4"]
    assert "there are prompts" not in succeed([*words, "--texts", "7", "--held-out-texts", "2"]).stderr
    training = sum(not is_held_out(prompt) for prompt in asked)
    assert f"there are prompts for {training} of 2000 answers (--texts)" in succeed(words).stderr
    name = fingerprint(model_directory("demo"))
    with Engine("demo") as engine:
        encode = engine.get_tokenizer().encode
    expected = {tuple(encode(f"Question: {prompt}\nAnswer:")): is_held_out(prompt) for prompt in asked}
    found = read_corpus(path, name)
    assert len(found) == len(asked)
    assert {tuple(one.prompt_ids): one.held_out for one in found} == expected
    assert {one.kind for one in found} == {"own"}
    assert "--kinds" in refused([*words, "--kinds", "code", "--prompts-of", str(path)])
    for few in ([one for one in asked if is_held_out(one)], [one for one in asked if not is_held_out(one)]):
        file.write_text("\n".join(few))
        assert "a file of more prompts" in refused(words).replace("\n", " ")
