"""Calibration chooses by its stated rule: on scorers whose truth is known, and on the bundled model."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from math import comb, log, sqrt
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest
from typer.testing import CliRunner

from d3engine import Engine
from d3engine.calibration.noninferiority import noninferiority_p
from d3engine.calibration.report import as_dict, policy_file, write_policy_file
from d3engine.calibration.scoring import Answers, Part
from d3engine.calibration.search import (
    FINALISTS,
    PASS_LEVEL,
    Calibration,
    Candidate,
    Fate,
    calibrate,
    fewest_to_certify,
    make_candidates,
    plan_budget,
)
from d3engine.calibration.tasks import calibration_task
from d3engine.cli import app
from d3engine.depth import D3, DepthPolicy, FullDepth
from d3engine.depth.policy import POLICY_FILE, calibrated_for, policy_from_directory
from d3engine.errors import InvalidValueError
from d3engine.loading import model_directory
from d3engine.model.fingerprint import fingerprint

# -- the paired test ---------------------------------------------------------------------------------------------------


def slow_p(only_full: int, only_setting: int, problems: int, tolerance: float) -> float:
    """The score test straight from its definition: the restricted likelihood maximised by narrowing down."""

    def likelihood(gain: float) -> float:
        rest = problems - only_full - only_setting
        terms = ((only_full, gain + tolerance), (only_setting, gain), (rest, 1 - 2 * gain - tolerance))
        return sum(count * log(chance) for count, chance in terms if count)

    low, high = 1e-12, (1 - tolerance) / 2 - 1e-12
    for _ in range(200):  # it has one peak
        left, right = low + (high - low) / 3, high - (high - low) / 3
        low, high = (left, high) if likelihood(left) < likelihood(right) else (low, right)
    gain = (low + high) / 2
    variance = problems * (2 * gain + tolerance - tolerance**2)
    return NormalDist().cdf((only_full - only_setting - problems * tolerance) / sqrt(variance))


@pytest.mark.parametrize(
    ("only_full", "only_setting", "problems"), [(9, 4, 120), (0, 3, 60), (2, 0, 200), (30, 31, 90)]
)
def test_the_p_value_is_that_of_the_score_test(only_full: int, only_setting: int, problems: int) -> None:
    expected = slow_p(only_full, only_setting, problems, 0.05)
    assert noninferiority_p(only_full, only_setting, problems, 0.05) == pytest.approx(expected, rel=1e-3)


def test_more_losses_are_less_safe_and_more_problems_or_tolerance_safer() -> None:
    p = noninferiority_p(3, 1, 300, 0.02)
    assert noninferiority_p(4, 1, 300, 0.02) > p > noninferiority_p(2, 1, 300, 0.02)
    assert noninferiority_p(3, 2, 300, 0.02) < p
    assert noninferiority_p(3, 1, 600, 0.02) < p
    assert noninferiority_p(3, 1, 300, 0.03) < p


@pytest.mark.parametrize(("problems", "gain"), [(200, 0.0), (200, 0.03), (500, 0.0), (90, 0.1)])
def test_a_setting_that_loses_the_tolerance_seldom_passes(problems: int, gain: float) -> None:
    """Exact, over every outcome: the chance to pass at the boundary is about the level."""
    tolerance, passed = 0.04, 0.0
    loss = tolerance + gain
    for lost in range(problems + 1):
        for won in range(problems - lost + 1 if gain else 1):
            weight = comb(problems, lost) * comb(problems - lost, won)
            chance = weight * (loss**lost * gain**won * (1 - loss - gain) ** (problems - lost - won))
            if chance < 1e-15:
                if won > problems * gain:
                    break
                continue
            passed += chance * (noninferiority_p(lost, won, problems, tolerance) <= PASS_LEVEL)
        if lost > 4 * problems * loss + 10:
            break
    assert 0.002 < passed < 0.035


@pytest.mark.parametrize("tolerance", [0.01, 0.02, 0.3])
def test_the_fewest_problems_are_those_that_certify_a_setting_without_loss(tolerance: float) -> None:
    fewest = fewest_to_certify(tolerance)
    assert noninferiority_p(0, 0, fewest, tolerance) <= PASS_LEVEL < noninferiority_p(0, 0, fewest - 1, tolerance)


@pytest.mark.parametrize("arguments", [(0, 0, 0, 0.1), (5, 0, 4, 0.1), (1, 1, 4, 0.0), (1, 1, 4, 1.0), (-1, 0, 4, 0.1)])
def test_counts_that_cannot_be_are_refused(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidValueError):
        noninferiority_p(*arguments)


# -- the search, on scorers whose truth is known -----------------------------------------------------------------------


class KnownScorer:
    """A model that is right with `base`, and under a policy loses an answer with `loss(policy)`, at random."""

    num_layers = 16
    max_tokens = 64

    def __init__(self, loss: Callable[[D3, Part], float], base: float = 0.9, seed: int = 0) -> None:
        self._loss, self._base, self._seed = loss, base, seed
        self.calls: list[tuple[DepthPolicy, Part, int, int]] = []

    def score(self, policy: DepthPolicy, part: Part, first: int, count: int) -> Answers:
        self.calls.append((policy, part, first, count))
        schedule = policy.schedule(self.num_layers)
        layers = int(schedule.depths(self.max_tokens).sum())
        full = [random.Random(f"{self._seed}{part}{i}").random() < self._base for i in range(first, first + count)]
        if isinstance(policy, D3):
            numbers = random.Random(f"{self._seed}{policy}{part}{first}")
            loss = self._loss(policy, part)
            full = [right and numbers.random() >= loss for right in full]
        return Answers(tuple(full), count * self.max_tokens, count * layers, seconds=0.0)


def search(
    scorer: KnownScorer, *, answers: int = 7000, certification: int = 500, tolerance: float = 0.03
) -> Calibration:
    candidates = make_candidates(scorer.num_layers, scorer.max_tokens)
    return calibrate(scorer, candidates, plan_budget(len(candidates), answers, certification, tolerance), tolerance)


def late_is_safe(policy: D3, part: Part) -> float:
    """Nothing is lost from start 0.7 on, everything below."""
    return 0.0 if policy.start >= 0.7 else 0.8


def test_the_fastest_safe_setting_is_chosen() -> None:
    scorer = KnownScorer(late_is_safe)
    result = search(scorer)
    assert result.chosen == D3(alpha=0.8, start=0.7)
    assert result.test is not None
    assert result.test.p_value <= PASS_LEVEL
    assert [trial.fate for trial in result.trials].count(Fate.CHOSEN) == 1
    fates = {(trial.policy.alpha, trial.policy.start): trial.fate for trial in result.trials}
    assert all(fate is Fate.REFUTED for (_, start), fate in fates.items() if start < 0.7)


@pytest.mark.parametrize(
    ("starts", "alphas"), [((0.7,), (0.8, 0.9999)), ((0.7, 0.8), (0.8, 0.9999)), ((0.5, 0.6, 0.7), (0.8, 0.9))]
)
def test_of_few_settings_that_all_lose_nothing_the_fastest_is_chosen(
    starts: tuple[float, ...], alphas: tuple[float, ...]
) -> None:
    scorer = KnownScorer(lambda policy, part: 0.0, base=1.0)
    candidates = make_candidates(scorer.num_layers, scorer.max_tokens, starts, alphas)
    result = calibrate(scorer, candidates, plan_budget(len(candidates), 7000, 500, 0.03), 0.03)
    fastest = min(result.trials, key=lambda trial: trial.screened.mean_layers)
    assert result.chosen == fastest.policy


def test_where_the_boldest_fail_the_next_one_is_taken_and_not_the_slowest() -> None:
    """Six settings look harmless in screening; the three fastest of them lose much elsewhere."""

    def shown_late(policy: D3, part: Part) -> float:
        return 0.3 if part is not Part.SCREENING and policy.start < 0.5 else 0.0

    scorer = KnownScorer(shown_late, base=1.0)
    starts = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
    candidates = make_candidates(scorer.num_layers, scorer.max_tokens, starts, (0.9,))
    result = calibrate(scorer, candidates, plan_budget(len(candidates), 7000, 500, 0.03), 0.03)
    assert [float(check.policy.start) for check in result.certificates] == [0.7, 0.5, 0.3]
    assert result.chosen == D3(0.9, 0.5)


def test_a_setting_that_saves_too_little_is_not_worth_a_loss() -> None:
    scorer = KnownScorer(late_is_safe)
    candidates = make_candidates(scorer.num_layers, scorer.max_tokens, (0.6, 0.7), (0.8, 0.9999))
    budget = plan_budget(len(candidates), 7000, 500, 0.03)
    result = calibrate(scorer, candidates, budget, 0.03, least_saving=0.25)
    assert result.chosen == D3(0.8, 0.7)
    assert [trial.fate for trial in result.trials].count(Fate.SLOW) >= 1
    result = calibrate(scorer, candidates, budget, 0.03, least_saving=0.4)
    assert result.chosen is None
    assert "40 % of the layers saved" in result.reason


def test_no_setting_is_safe_where_every_one_loses_much() -> None:
    scorer = KnownScorer(lambda policy, part: 0.3)
    result = search(scorer)
    assert result.chosen is None
    assert "No setting is safe" in result.reason
    assert Part.TEST not in {part for _, part, _, _ in scorer.calls}


def test_a_setting_that_fails_on_the_test_split_is_not_replaced_by_another() -> None:
    scorer = KnownScorer(lambda policy, part: 0.3 if part is Part.TEST else late_is_safe(policy, part))
    result = search(scorer)
    assert result.chosen is None
    assert result.test is not None
    assert "test split" in result.reason
    tested = [policy for policy, part, _, _ in scorer.calls if part is Part.TEST]
    assert tested == [FullDepth(), D3(alpha=0.8, start=0.7)]


def test_certification_ends_at_the_first_failure() -> None:
    def hidden(policy: D3, part: Part) -> float:
        return 0.5 if part is Part.CERTIFICATION and policy.start == 0.7 else late_is_safe(policy, part)

    scorer = KnownScorer(hidden)
    result = search(scorer)
    outcome = [check.passed for check in result.certificates]
    assert False in outcome
    assert outcome.index(False) == len(outcome) - 1
    passed = [check.policy for check in result.certificates if check.passed]
    assert result.chosen == (passed[-1] if passed else None)
    layers = [check.answers.mean_layers for check in result.certificates]
    assert layers == sorted(layers, reverse=True)


def test_each_part_answers_its_own_problems_and_the_budget_holds() -> None:
    scorer = KnownScorer(lambda policy, part: 0.01)
    result = search(scorer, answers=6000)
    assert sum(count for _, _, _, count in scorer.calls) <= 6000
    seen: dict[tuple[DepthPolicy, Part], int] = {}
    for policy, part, first, count in scorer.calls:  # no problem twice, none left out
        assert first == seen.get((policy, part), 0)
        seen[policy, part] = first + count
    certified = [policy for (policy, part) in seen if part is Part.CERTIFICATION]
    assert 2 <= len(certified) <= FINALISTS + 1
    assert all(count == 500 for (_, part), count in seen.items() if part is not Part.SCREENING)
    assert max(count for (_, part), count in seen.items() if part is Part.SCREENING) == result.budget.screening
    half = -(-len(result.trials) // 2)
    assert sum(trial.rounds >= 2 for trial in result.trials) <= half
    assert sum(trial.rounds >= 3 for trial in result.trials) <= -(-half // 2)


def test_settings_that_lose_the_tolerance_are_seldom_chosen_however_many_are_tried() -> None:
    chosen = 0
    for seed in range(30):
        scorer = KnownScorer(lambda policy, part: 0.1, base=1.0, seed=seed)
        chosen += search(scorer, answers=1400, certification=60, tolerance=0.1).chosen is not None
    assert chosen <= 2  # of 30, at 2.5 % at most each


def test_settings_that_run_the_same_layers_are_one() -> None:
    candidates = make_candidates(3, 8, starts=(0.2, 0.3, 0.7), alphas=(0.6,), tails=(0, 1, 3))
    assert [candidate.alike for candidate in candidates] == [
        (D3(0.6, 0.2), D3(0.6, 0.3)),
        (D3(0.6, 0.7),),
        (D3(0.6, 0.2, tail=1), D3(0.6, 0.3, tail=1)),
    ]  # start 0.7 with tail 1, and any with tail 3, would skip nothing
    assert len(make_candidates(16, 64)) < len(make_candidates(16, 1024)) == 35


def test_a_budget_or_limit_that_can_prove_nothing_is_refused() -> None:
    with pytest.raises(InvalidValueError, match=r"--limit must be .*; got 188"):
        plan_budget(35, 7000, 188, 0.02)
    with pytest.raises(InvalidValueError, match=r"--budget must be .*; got 1000"):
        plan_budget(35, 1000, 189, 0.02)
    assert plan_budget(35, 7000, 500, 0.02).first_round == 46


# -- what is written, and what is read back ----------------------------------------------------------------------------


def test_the_file_holds_setting_evidence_and_fingerprint(tmp_path: Path) -> None:
    result = search(KnownScorer(late_is_safe))
    content = policy_file(result, {"task": "a task", "seed": 3}, "sha256:00")
    write_policy_file(content, tmp_path / POLICY_FILE)
    assert json.loads((tmp_path / POLICY_FILE).read_text()) == content
    assert policy_from_directory(tmp_path) == result.chosen
    assert calibrated_for(tmp_path) == "sha256:00"
    evidence = content["evidence"]
    assert (evidence["task"], evidence["seed"], evidence["tolerance"], evidence["settings_tried"]) == (
        "a task",
        3,
        0.03,
        len(result.trials),
    )
    for part in ("validation", "test"):
        found = evidence[part]
        assert found["problems"] == 500
        assert found["difference"] == pytest.approx(found["exact_match"] - found["exact_match_full_depth"], abs=2e-6)
        assert found["difference_interval_95"]["low"] <= found["difference"] <= found["difference_interval_95"]["high"]
    assert list(tmp_path.iterdir()) == [tmp_path / POLICY_FILE]


def test_json_holds_everything_that_was_tried() -> None:
    result = search(KnownScorer(lambda policy, part: 0.3))
    report = json.loads(json.dumps(as_dict(result, {"model": "m"})))
    assert (report["safe"], report["depth"], report["test"]) == (False, None, None)
    assert len(report["settings"]) == len(result.trials)
    assert {"fate", "problems", "exact_match", "realised_mean_layers", "depth"} <= set(report["settings"][0])


def tiny_with_depth(tiny_llama: Callable[..., Any], directory: Path, name: str | None) -> Path:
    for file in tiny_llama().directory.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    content = {"depth": D3(alpha=0.9, start=0.5).describe()} | ({} if name is None else {"fingerprint": name})
    (directory / POLICY_FILE).write_text(json.dumps(content))
    return directory


def test_a_setting_for_other_weights_is_refused_by_its_file(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    own = fingerprint(tiny_llama().directory)
    small: dict[str, Any] = {"skip_tokenizer_init": True, "device": "cpu", "kv_cache_memory_bytes": 2**22}
    directory = tiny_with_depth(tiny_llama, tmp_path, own)
    with Engine(directory, **small) as engine:
        assert engine.depth == D3(alpha=0.9, start=0.5)
    tiny_with_depth(tiny_llama, tmp_path, "sha256:" + "0" * 64)
    with pytest.raises(ValueError, match=r"d3\.json was calibrated on other weights"):
        Engine(directory, **small)
    Engine(directory, depth=FullDepth(), **small).close()  # who names a depth needs no file
    tiny_with_depth(tiny_llama, tmp_path, None)
    Engine(directory, **small).close()  # written by hand, and claims nothing
    (directory / POLICY_FILE).write_text('{"depth": {"policy": "full"}, "fingerprint": 7}')
    with pytest.raises(ValueError, match=r'd3\.json has no text under "fingerprint"'):
        Engine(directory, **small)


def test_a_fingerprint_is_of_the_weights_and_what_they_compute(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    own = fingerprint(tiny_llama().directory)
    assert fingerprint(tiny_llama(max_shard_size="40KB").directory) == own  # shards do not matter
    assert fingerprint(tiny_llama(seed=1).directory) != own
    config = json.loads((tiny_with_depth(tiny_llama, tmp_path, None) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "eos_token_id": 5}))
    assert fingerprint(tmp_path) == own  # the same layers compute the same
    (tmp_path / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    assert fingerprint(tmp_path) != own


def test_one_changed_matrix_of_one_layer_changes_the_fingerprint(
    tiny_llama: Callable[..., Any], tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    directory = tiny_with_depth(tiny_llama, tmp_path, None)
    own = fingerprint(directory)
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"] *= 1.001
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    assert fingerprint(directory) != own


def test_the_bundled_setting_is_for_the_bundled_weights() -> None:
    directory = model_directory("demo")
    assert calibrated_for(directory) == fingerprint(directory)
    evidence = json.loads((directory / POLICY_FILE).read_text())["evidence"]
    assert evidence["test"]["p_value_of_losing_the_tolerance"] <= PASS_LEVEL


@pytest.mark.parametrize("name", ["word-problems", "word-sorting", "multistep-arithmetic"])
def test_the_parts_share_no_question(name: str) -> None:
    parts = calibration_task(name, None, seed=2, shots=None).parts(screening=30, certification=20)
    questions = [question.prompt for part in Part for question in parts[part]]
    assert [len(parts[part]) for part in Part] == [30, 20, 20]
    assert len(set(questions)) == 70


def data_folder(folder: Path, questions: int) -> Path:
    """A small one of the published layout: GSM8K lines, and a task of BBH, in which one input stands twice."""
    (folder / "gsm8k").mkdir()
    for split, count in (("train", 10 * questions), ("test", questions)):
        lines = [{"question": f"{split} {i}?", "answer": f"So #### {i}"} for i in range(count)]
        (folder / "gsm8k" / f"{split}.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    (folder / "bbh" / "cot-prompts").mkdir(parents=True)
    examples = [{"input": f"{i}?", "target": str(i)} for i in [0, *range(questions)]]
    (folder / "bbh" / "counting.json").write_text(json.dumps({"examples": examples}))
    example = "Q: 1?\nA: Let's think step by step.\nOne. So the answer is 1."
    (folder / "bbh" / "cot-prompts" / "counting.txt").write_text("-----\nCount.\n\n" + "\n\n".join([example] * 3))
    return folder


@pytest.mark.parametrize(("name", "shots"), [("gsm8k", 2), ("bbh", None), ("bbh/counting", 1)])
def test_parts_from_files_share_no_question(name: str, shots: int | None, tmp_path: Path) -> None:
    task = calibration_task(name, data_folder(tmp_path, 40), seed=1, shots=shots)
    parts = task.parts(screening=12, certification=8)
    asked = [question.prompt.rpartition("Q")[2] for part in Part for question in parts[part]]
    assert [len(parts[part]) for part in Part] == [12, 8, 8]
    assert len(set(asked)) == 28
    assert task.max_tokens > 100
    assert task.stop
    if name == "gsm8k":
        assert all(("test" in question.prompt.rpartition("Q")[2]) for question in parts[Part.TEST])
        assert all(("train" in question.prompt.rpartition("Q")[2]) for question in parts[Part.CERTIFICATION])
    other = calibration_task(name, tmp_path, seed=2, shots=shots).parts(screening=12, certification=8)
    both = [{question.prompt.rpartition("Q")[2] for question in found[Part.TEST]} for found in (parts, other)]
    search = {question.prompt.rpartition("Q")[2] for question in parts[Part.SCREENING] + other[Part.SCREENING]}
    assert not search & (both[0] | both[1]), "another seed tests what this one has searched on"
    with pytest.raises(InvalidValueError, match=r"--budget, --limit must be .*; got '40 to search, 8 to certify'"):
        task.parts(screening=40, certification=8)


# -- the command -------------------------------------------------------------------------------------------------------

# Few problems prove little, so the tolerance is wide: 30 points.
SMALL = ("--tolerance", "30", "--limit", "9", "--budget", "160", "--max-tokens", "64", "--device", "cpu")


def run(*arguments: str) -> Any:
    try:
        runner = CliRunner(mix_stderr=False)  # type: ignore[call-arg]  # before click 8.2
    except TypeError:
        runner = CliRunner()
    return runner.invoke(app, ["calibrate", *arguments])


def test_the_command_writes_what_it_chose_on_the_bundled_model(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out, plot = tmp_path / "d3.json", tmp_path / "grid.png"
    settings = ("--alpha", "0.9", "--start", "0.2", "--start", "0.7")
    result = run("demo", *SMALL, *settings, "--out", str(out), "--plot", str(plot))
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    assert written["depth"] == D3(alpha=0.9, start=0.7).describe()
    assert written["fingerprint"] == fingerprint(model_directory("demo"))
    assert 11 < written["evidence"]["test"]["realised_mean_layers"] < 12
    assert plot.read_bytes().startswith(b"\x89PNG")
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["alpha", "\\", "start", "0.2", "0.7"] in rows
    assert any(
        line.startswith("alpha 0.9, start 0.7, test") and line.endswith("passed") for line in result.stdout.splitlines()
    )
    assert f"written to {out}" in result.stdout
    assert result.stdout.isascii()


def test_the_command_refuses_with_its_own_exit_code_and_writes_nothing(tmp_path: Path) -> None:
    out = tmp_path / "d3.json"
    result = run("demo", *SMALL, "--alpha", "0.9", "--start", "0.2", "--out", str(out), "--json")
    assert result.exit_code == 3, result.output
    report = json.loads(result.stdout)
    assert (report["safe"], report["depth"], report["written"]) == (False, None, None)
    assert "No setting is safe" in report["reason"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo"], "--out"),
        (["demo", "--out", "no-such-directory/d3.json"], "--out"),
        (["demo", "--out", "d3.json", "--tolerance", "0"], "--tolerance"),
        (["demo", "--out", "d3.json", "--limit", "100"], "--limit"),
        (["demo", "--out", "d3.json", "--least-saving", "100"], "--least-saving"),
        (["demo", "--out", "d3.json", "--budget", "3000"], "--budget"),
        (["demo", "--out", "d3.json", "--alpha", "1.5"], "alpha"),
        (["demo", "--out", "d3.json", "--alpha", "1"], "skips something"),
        (["demo", "--out", "d3.json", "--plot", "no-such-directory/a.png"], "--plot"),
        (["demo", "--out", "d3.json", "--plot", "a.foo"], "--plot"),
        (["no-such-model"], "model"),
        (["demo", "--out", "d3.json", "--task", "gsm8k"], "got 'gsm8k'"),
        (["demo", "--out", "d3.json", "--task", "gsm8k", "--data", "nowhere"], "--data"),
        (["demo", "--out", "d3.json", "--num-fewshot", "-1"], "--num-fewshot"),
    ],
)
def test_what_cannot_work_is_refused_before_it_begins(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert message in result.stderr.splitlines()[-1]
    assert not list(tmp_path.iterdir())


def test_a_candidate_is_named_by_the_first_of_its_kind() -> None:
    assert Candidate(D3(0.9, 0.2), (D3(0.9, 0.2), D3(0.9, 0.3))) in make_candidates(3, 8, (0.2, 0.3), (0.9,))
