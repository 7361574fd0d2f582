"""`d3engine analyze` says the same in tables, JSON and pictures, and words every refusal in one line."""

import json
import math
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from invoking import invoke, refused, report_of, succeed

from d3engine import Engine, SamplingParams
from d3engine.cli.observing import questions_of
from d3engine.engine.model_directory import model_directory
from d3engine.research.analysis import layers
from d3engine.research.analysis.answers import Answered
from d3engine.research.analysis.kinds import SIDES
from d3engine.research.evaluation.procedural import different_problems

SMALL = ("--limit", "2", "--max-tokens", "8", "--device", "cpu", "--kv-cache-memory-bytes", str(2**24))


def run_json(*arguments: str) -> dict[str, Any]:
    return report_of(["analyze", *arguments])


def drawn(png: Path, *arguments: str) -> str:
    """What a command prints that draws a picture too."""
    result = succeed(["analyze", *arguments, "--png", str(png)])
    assert png.read_bytes().startswith(b"\x89PNG")
    return str(result.stdout)


def cells(output: str) -> list[list[str]]:
    return [line.split() for line in output.splitlines()]


@pytest.fixture
def png(tmp_path: Path) -> Path:
    pytest.importorskip("matplotlib")
    return tmp_path / "picture.png"


def test_saturation_in_three_forms(png: Path) -> None:
    stdout = drawn(png, "saturation", "demo", *SMALL)
    assert stdout.isascii()
    report = run_json("saturation", "demo", *SMALL)
    layers = [answer["layers"] for answer in report["answers"]]
    assert [len(answer) for answer in layers] == [8, 8]
    mean = sum(map(sum, layers)) / 16
    assert report["mean_layers"] == pytest.approx(mean)
    (whole,) = (row for row in cells(stdout) if row[0] == "all")
    assert [*whole[:4], whole[5]] == ["all", "16", f"{mean:.2f}", "+-", f"{mean / 16:.0%}"], "with its interval"


def test_perplexity_in_three_forms(png: Path) -> None:
    stdout = drawn(png, "perplexity", "demo", *SMALL)
    report = run_json("perplexity", "demo", *SMALL)
    assert [(place["step"], place["answers"]) for place in report["steps"]] == [(step, 2) for step in range(8)]
    assert ["all", "16", f"{report['perplexity']:.4f}"] in [row[:3] for row in cells(stdout)]


def test_flow_in_three_forms(png: Path) -> None:
    stdout = drawn(png, "flow", "demo", *SMALL)
    report = run_json("flow", "demo", *SMALL)
    assert report["answer"]["tokens"] == 16
    for layer in (0, 15):
        row = next(row for row in cells(stdout) if row[:1] == [str(layer)])
        assert row[2] == f"{report['answer']['cosine']['block'][layer]:.3f}"
        assert row[7] == f"{report['answer']['distance']['mlp'][layer]:.2f}"


def test_copy_of_word_problems_and_of_prompts_of_ones_own(png: Path, tmp_path: Path) -> None:
    grid = ("--layers", "8", "--layers", "2", "--from-step", "1")
    stdout = drawn(png, "copy", "demo", *SMALL, *grid)
    assert stdout.startswith("exact match, 2 answers")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Question: Tom has 5 pens.\n\nQuestion: Ana has\n")
    report = run_json("copy", "demo", *SMALL, *grid, "--prompts", str(prompts))
    assert report["measure"] == "answers equal to full depth's"
    assert (report["answers"], report["max_tokens"], report["full_depth"]["right"]) == (2, 8, 2)
    assert [(cell["layers_copied"], cell["from_step"]) for cell in report["grid"]] == [(2, 1), (8, 1)]


def test_one_perturbed_step_in_three_forms(png: Path) -> None:
    grid = ("--layers", "8", "--at-step", "2", "--limit", "1")
    stdout = drawn(png, "perturb", "demo", *SMALL, *grid)
    assert stdout.startswith("One step perturbed: exact match, 1 answer")
    report = run_json("perturb", "demo", *SMALL, *grid)
    assert list(report["entries"]) == ["copied", "recomputed"]
    assert [(cell["layers_copied"], cell["from_step"]) for cell in report["entries"]["copied"]["grid"]] == [(8, 2)]


def test_leaving_where_predictions_are_settled_in_two_forms() -> None:
    small = ("--limit", "1", "--max-tokens", "4", "--device", "cpu")
    stdout = succeed(["analyze", "oracle", "demo", *small]).stdout
    assert [row[0] for row in cells(stdout)[2:]] == ["kept", "copied", "recomputed"]
    report = run_json("oracle", "demo", *small)
    assert [len(found["answers"][0]["depths"]) for found in report["entries"].values()] == [4, 4, 4]


def test_kinds_of_tokens_in_three_forms(png: Path) -> None:
    depth = ("--depth", "d3 alpha=0.9 start=0.3")
    stdout = drawn(png, "kinds", "demo", *SMALL, *depth)
    report = run_json("kinds", "demo", *SMALL, *depth)
    assert report["policy"] == "D3, alpha 0.9, start 0.3"
    for side in ("yielded", "fed"):
        *kinds, everything = report[side]
        assert everything["tokens"] == 14 == sum(kind["tokens"] for kind in kinds)
        assert f"By the kind of the token {SIDES[side]}" in stdout
    assert 0 < sum(report["answers_that_part"].values()) <= 2, "a window from layer 4 on changes answers"
    assert run_json("kinds", "demo", *SMALL)["policy"] == "D3, alpha 0.8, start 0.6", "its own setting"


def test_loss_by_skipped_layers_in_three_forms(png: Path) -> None:
    short = ("--limit", "1", "--max-tokens", "6", "--device", "cpu")
    small = (*short, "--width", "2", "--from-step", "1", "--from-step", "4")
    stdout = drawn(png, "layers", "demo", *small)
    report = run_json("layers", "demo", *small)
    assert (report["texts"], report["tokens"], len(report["windows"])) == (1, [6], 2 * 15)
    assert {one["kl_nats_arm_95"] for one in report["windows"]} == {None}, (
        "one text has no interval, and NaN is no JSON"
    )
    least = min((one for one in report["windows"] if one["from_step"] == 4), key=lambda one: one["kl_nats"])
    row = next(row for row in cells(stdout) if row[:2] == ["4", "2"])
    assert row[2:4] == [f"{least['first_layer']}-{least['first_layer'] + 1}", f"{least['kl_nats']:.3f}"]


@pytest.mark.parametrize(("done", "is_killed"), [(0, False), (2, False), (2, True)])
def test_ctrl_c_shows_the_layers_of_measured_texts(
    done: int, is_killed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C, or SIGTERM, ends `analyze layers` with the report of the texts that are measured, if there are any."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Tom has 5 pens.\nAnn buys 3 cups.\nBen has 2 hats.\n")
    words = ("layers", "demo", *SMALL[2:], "--width", "2", "--from-step", "1", "--prompts", str(prompts), "--limit")
    wanted = run_json(*words, "2")
    measured, heard = layers._of_text, list[Answered]()

    def interrupted(observer: Any, one: Answered, *others: Any) -> Any:
        if len(heard) == done:
            if not is_killed:
                raise KeyboardInterrupt
            signal.raise_signal(signal.SIGTERM)
        heard.append(one)
        return measured(observer, one, *others)

    monkeypatch.setattr(layers, "_of_text", interrupted)
    result = invoke(["analyze", *words, "3", "--json"])
    assert result.exit_code == 130
    assert json.loads(result.stdout or "{}") == (wanted if done else {})


def test_analyze_reference_answers_are_scored_as_the_models_own() -> None:
    """The task's reference answers are scored as if the model had generated them."""
    small = ("--limit", "2", "--max-tokens", "5", "--device", "cpu", "--task", "word-problems", "--reference-answers")
    report = run_json("perplexity", "demo", *small)
    problems = different_problems("word-problems", "test", 0, 2)
    losses = []
    with Engine("demo", device="cpu", kv_cache_memory_bytes=2**24) as engine:
        for problem in problems:
            prompt = engine.tokenizer.encode(problem.prompt)
            answer = engine.tokenizer.encode(f" {problem.solution}", add_special_tokens=False)[:5]
            params = SamplingParams(max_tokens=1, prompt_logprobs=0)
            (output,) = engine.generate([{"prompt_token_ids": prompt + answer}], params, use_tqdm=False)
            known = output.prompt_logprobs[-5:]
            losses += [-one[token].logprob for one, token in zip(known, answer, strict=True)]
    assert [place["answers"] for place in report["steps"]] == [2] * 5
    assert report["perplexity"] == pytest.approx(math.exp(sum(losses) / 10), rel=1e-3)


def test_a_prompt_may_be_a_users_turn_in_the_chat_template(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Tom has 5 pens and finds 2. How many pens does Tom have now?\n")
    small = ("--limit", "1", "--max-tokens", "6", "--device", "cpu", "--prompts", str(prompts))
    report = run_json("sample", "demo", *small, "--chat")
    with Engine("demo", device="cpu", kv_cache_memory_bytes=2**24) as engine:
        turn = [{"role": "user", "content": prompts.read_text().strip()}]
        (output,) = engine.chat(turn, SamplingParams(temperature=0, max_tokens=6), use_tqdm=False)
        shown = engine.tokenizer.decode(output.prompt_token_ids)
    full = report["answers"][0]
    assert "".join(token["text"] for token in full["tokens"]) == output.outputs[0].text
    assert full["prompt"] == shown


def test_analyze_paper_tasks_use_files_examples_and_own_rule(tmp_path: Path) -> None:
    """Tasks of the paper are read from files, asked behind examples and judged by their own rule."""
    (tmp_path / "bbh" / "cot-prompts").mkdir(parents=True)
    examples = [{"input": f"Sort: b{i} a", "target": f"a b{i}"} for i in range(3)]
    (tmp_path / "bbh" / "word_sorting.json").write_text(json.dumps({"examples": examples}))
    solved = "Q: Sort: d c\nA: Let's think step by step.\nSo the answer is c d."
    (tmp_path / "bbh" / "cot-prompts" / "word_sorting.txt").write_text(f"canary\n-----\nSort the words.\n\n{solved}")
    asking = ("--task", "bbh/word_sorting", "--data", str(tmp_path), "--num-fewshot", "1", "--limit", "2")
    report = run_json("copy", "demo", *SMALL, *asking, "--layers", "8", "--from-step", "1")
    assert (report["measure"], report["answers"]) == ("exact match", 2)
    found = questions_of({"task": "bbh/word_sorting", "data": tmp_path, "shots": 1}, seed=0, limit=2)
    assert (found.max_tokens, found.stop) == (200, ("Q:", "</s>", "\n\n"))
    assert found.prompts[0] == "Sort the words.\n\nQ: Sort: d c\nA: c d\n\nQ: Sort: b0 a\nA:"


def test_copy_marks_cells_without_copies_or_finished_answers() -> None:
    """`analyze copy` marks cells where no step was copied, and counts answers that were cut off."""
    result = succeed(["analyze", "copy", "demo", *SMALL, "--layers", "1", "--from-step", "1000"])
    title, _, *rows = result.stdout.splitlines()
    assert title == "exact match, 2 answers of at most 8 tokens"
    assert [row.split()[-2:] for row in rows] == [["-", "2"], ["0", "2"]]  # answers that reach the step, cut off


def test_schedules_need_the_config_alone(png: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((model_directory("demo") / "config.json").read_bytes())
    arguments = ("schedule", str(tmp_path), "--alpha", "0.9", "--alpha", "0.9999", "--steps", "40")
    stdout = drawn(png, *arguments)
    report = run_json(*arguments)
    found = report["schedules"]["alpha 0.9"]
    assert (found["last_depth"], found["deepest_skip_from"]) == (9, 5)
    assert [piece["depth"] for piece in found["runs"]] == [16, 14, 12, 11, 10, 9]
    assert found["mean_layers"] == pytest.approx((16 + 14 + 12 + 11 + 10 + 35 * 9) / 40)
    assert ["alpha", "0.9", f"{found['mean_layers']:.3f}"] in [row[:3] for row in cells(stdout)]


def test_a_sample_as_text_picture_page_and_json(png: Path, tmp_path: Path) -> None:
    page = tmp_path / "sample.html"
    small = (*SMALL[:2], "--max-tokens", "12", *SMALL[4:], "--limit", "1")
    depth = ("--depth", "d3 alpha=0.9 start=0.6")
    stdout = drawn(png, "sample", "demo", *small, *depth, "--html", str(page))
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert "\x1b" not in stdout  # no colours outside a terminal
    assert "Layers run by each token: 16 x 12." in stdout
    assert "Layers run by each token: 16, 14, 12, 11, 10, 9 x 7." in stdout
    report = run_json("sample", "demo", *small, *depth, "--guess-layers", "2")
    assert [answer["depth"]["policy"] for answer in report["answers"]] == ["full", "d3"]
    assert [guess["layer"] for guess in report["answers"][1]["tokens"][0]["guesses"]] == [7, 15]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["saturation", "no-such-model"], "model"),
        (["saturation", "--limit", "0"], "--limit"),
        (["flow", "--prompts", "no-such-file"], "--prompts"),
        (["perplexity", "--png", "no-such-directory/a.png"], "--png"),
        (["copy", "--layers", "17", "--limit", "1", "--max-tokens", "1"], "--layers"),
        (["copy", "--from-step", "0", "--limit", "1", "--max-tokens", "1"], "--from-step"),
        (["perturb", "--layers", "16"], "--layers must be an integer from 1 to 15; got 16"),
        (["perturb", "--at-step", "0"], "--at-step"),
        (["saturation", "--task", "bbh"], "--task"),
        (["saturation", "--task", "bbh", "--data", "nowhere"], "--data"),
        (["saturation", "--data", "."], "--task"),
        (["saturation", "--prompts", "a.txt", "--task", "gsm8k"], "--task"),
        (["copy", "--reference-answers"], "--reference-answers"),
        (["oracle", "--chat"], "--chat"),
        (["flow", "--prompts", "a.txt", "--reference-answers"], "--reference-answers"),
        (["layers", "--width", "16"], "--width must be an integer from 1 to 15; got 16"),
        (["layers", "--from-step", "0"], "--from-step"),
        (["kinds", "--depth", "early-exit threshold=0.9"], "--depth"),
        (["kinds", "--depth", "lossless alpha=0.9 start=0.6"], "--depth"),
        (["kinds", "--depth", "distilled student=s.safetensors", "--reference-answers"], "--depth"),
        (["schedule", "--start", "1.5"], "start"),
        (["schedule", "--steps", "0"], "--steps"),
        (["flow", "--png", "picture.foo"], "got 'picture.foo'"),
        (["schedule", "--png", "picture"], "got 'picture'"),
        (["sample", "--guess-layers", "0"], "--guess-layers must be an integer of at least 1; got 0"),
    ],
)
def test_what_is_wrong_is_refused_in_one_line(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("d3engine.research.analysis.answers.open_model", None)  # it is refused before a model is loaded
    assert message in refused(["analyze", *arguments]).splitlines()[-1]


def test_prompts_may_be_a_json_list_and_nothing_else(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps(["Question: Tom has\n5 pens.", "Question: Ana", "Question: Eva"]))
    report = run_json("sample", "demo", *SMALL, "--prompts", str(prompts), "--depth", "full")
    assert [answer["prompt"] for answer in report["answers"]] == ["Question: Tom has\n5 pens.", "Question: Ana"]
    for wrong in ("{}", "[]", "[1]", '[""]', "[", "\udcff"):
        prompts.write_bytes(wrong.encode("utf-8", "surrogateescape"))
        assert "--prompts" in refused(["analyze", "flow", "demo", "--prompts", str(prompts)]).splitlines()[-1]


@pytest.mark.parametrize("command", ["kinds", "sample"])
def test_a_model_without_a_policy_of_its_own_needs_depth(command: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(model_directory("demo"), model)
    (model / "d3.json").unlink()
    said = refused(["analyze", command, str(model), *SMALL])
    assert said.startswith(f"error: --depth must be given, since {model} has no d3.json with a policy")
