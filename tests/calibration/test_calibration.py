"""Calibration chooses by its stated rule: on scorers whose truth is known, and on the bundled model."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.calibrations import simulate
from d3engine.depth import D3, DepthPolicy, FullDepth
from d3engine.depth.policy import POLICY_FILE, calibrated_for, calibrated_task, policy_from_directory
from d3engine.errors import InvalidValueError
from d3engine.research.calibration.outcome import Outcome, outcome, reason
from d3engine.research.calibration.report import as_dict, policy_file, write_policy_file
from d3engine.research.calibration.scoring import Answers, Part, best_constant
from d3engine.research.calibration.search import (
    ALPHAS,
    FINALISTS,
    STARTS,
    Calibration,
    Candidate,
    Fate,
    Has,
    calibrate,
    make_candidates,
    plan_budget,
)
from d3engine.research.calibration.statistics import PASS_LEVEL, Tolerance
from d3engine.research.calibration.tasks import calibration_task
from d3engine.research.evaluation.bbh import BBHQuestion
from d3engine.research.evaluation.benchmark import Asked

# -- the search, on scorers whose truth is known -----------------------------------------------------------------------


class KnownScorer:
    """A model that is right with `base`, and under a policy loses an answer with `loss(policy)`, at random."""

    num_layers = 16
    max_tokens = 64

    def __init__(self, loss: Callable[[D3, Part], float], base: float = 0.9, seed: int = 0, guess: float = 0.0) -> None:
        self._loss, self._base, self._seed, self.guess = loss, base, seed, guess
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
    scorer: KnownScorer,
    starts: tuple[float, ...] = STARTS,
    alphas: tuple[float, ...] = ALPHAS,
    *,
    answers: int = 7000,
    certification: int = 500,
    loss: float = 0.03,
    relative: bool = False,
    least_saving: float = 0.0,
) -> Calibration:
    """What comes of a calibration of all settings, or of those of a grid of starts and alphas."""
    candidates = make_candidates(scorer.num_layers, scorer.max_tokens, starts, alphas)
    tolerance = Tolerance(loss, relative)
    budget = plan_budget(len(candidates), answers, certification, tolerance)
    return calibrate(scorer, candidates, budget, tolerance, least_saving=least_saving)


def late_is_safe(policy: D3, part: Part) -> float:
    """Nothing is lost from start 0.7 on, everything below."""
    return 0.0 if policy.start >= 0.7 else 0.8


def test_the_fastest_safe_setting_is_chosen() -> None:
    scorer = KnownScorer(late_is_safe)
    result = search(scorer)
    assert result.chosen == D3(alpha=0.8, start=0.7)
    assert outcome(result) is Outcome.CHOSEN
    assert result.certificate is not None
    assert result.certificate.p_value <= PASS_LEVEL
    assert [trial.fate for trial in result.trials].count(Fate.CHOSEN) == 1
    fates = {(trial.policy.alpha, trial.policy.start): trial.fate for trial in result.trials}
    assert all(fate is Fate.REFUTED for (_, start), fate in fates.items() if start < 0.7)


@pytest.mark.parametrize(
    ("starts", "alphas"), [((0.7,), (0.8, 0.9999)), ((0.7, 0.8), (0.8, 0.9999)), ((0.5, 0.6, 0.7), (0.8, 0.9))]
)
def test_fastest_of_few_lossless_settings_is_chosen(starts: tuple[float, ...], alphas: tuple[float, ...]) -> None:
    """Of few settings that all lose nothing, the fastest is chosen."""
    result = search(KnownScorer(lambda policy, part: 0.0, base=1.0), starts, alphas)
    fastest = min(result.trials, key=lambda trial: trial.screened.mean_layers)
    assert result.chosen == fastest.policy


def test_next_setting_is_taken_where_the_boldest_fail() -> None:
    """Where the boldest fail, the next one is taken and not the slowest."""
    # Six settings look harmless in screening; the three fastest of them lose much elsewhere.

    def shown_late(policy: D3, part: Part) -> float:
        return 0.3 if part is not Part.SCREENING and policy.start < 0.5 else 0.0

    result = search(KnownScorer(shown_late, base=1.0), (0.2, 0.3, 0.4, 0.5, 0.6, 0.7), (0.9,))
    assert [float(check.policy.start) for check in result.certificates] == [0.7, 0.5, 0.3]
    assert result.chosen == D3(0.9, 0.5)


def test_a_setting_that_saves_too_little_is_not_worth_a_loss() -> None:
    grid = (0.6, 0.7), (0.8, 0.9999)
    result = search(KnownScorer(late_is_safe), *grid, least_saving=0.25)
    assert result.chosen == D3(0.8, 0.7)
    assert [trial.fate for trial in result.trials].count(Fate.SLOW) >= 1
    result = search(KnownScorer(late_is_safe), *grid, least_saving=0.4)
    assert result.chosen is None
    assert "40 % of the layers saved" in reason(result)


def test_none_is_shown_to_be_safe_where_every_one_loses_much() -> None:
    scorer = KnownScorer(lambda policy, part: 0.3)
    result = search(scorer)
    assert result.chosen is None
    assert outcome(result) is Outcome.NOT_SHOWN
    assert reason(result).startswith("None could be shown to be safe: on 75 problems, no setting got through screening")
    asked = {policy for policy, part, _, _ in scorer.calls if part is Part.CERTIFICATION}
    assert asked == {FullDepth()}


def test_uncertifiable_setting_names_the_problems_it_would_need() -> None:
    """A setting that cannot be certified is named with the problems that might be enough."""
    # Nothing is lost, but a tenth of the answers differ: too many for a tolerance of two points and 300 problems.
    lucky = KnownScorer(lambda policy, part: 0.0 if part is Part.SCREENING else 0.02, base=1.0)
    result = search(lucky, certification=300, loss=0.02)
    assert outcome(result) is Outcome.NOT_SHOWN
    (check,) = result.certificates
    words = reason(result)
    assert "None could be shown to be safe with 300 problems" in words
    assert f"p {check.p_value:.2g}" in words
    assert "with a chance of" in words
    assert result.chosen is None
    assert [trial.fate for trial in result.trials].count(Fate.FAILED) == 1


# -- a task of which full depth knows nothing --------------------------------------------------------------------------


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("base", [0.0, 0.04])
def test_no_setting_is_tried_where_full_depth_knows_little(base: float, relative: bool) -> None:
    """Where full depth knows next to nothing, no setting is tried."""
    scorer = KnownScorer(lambda policy, part: 0.5, base=base)
    result = search(scorer, relative=relative)
    assert outcome(result) is Outcome.TOO_LITTLE_KNOWN
    assert (result.chosen, result.full, result.trials) == (None, None, [])
    assert {policy for policy, _, _, _ in scorer.calls} == {FullDepth()}
    assert "Full depth itself knows too little of this task" in reason(result)


def test_tenth_of_the_problems_shows_that_full_depth_knows_none() -> None:
    """Where full depth knows nothing, a tenth of the problems shows it."""
    scorer = KnownScorer(late_is_safe, base=0.0)
    result = search(scorer)
    assert [call[2:] for call in scorer.calls] == [(0, 50)]
    assert "right on 0 of 50 problems" in reason(result)


def test_what_one_constant_answer_gets_right_is_not_known() -> None:
    """Yes or no: a model that says yes to all is right half of the time, and so is any setting of it."""
    known = search(KnownScorer(late_is_safe, base=0.9, guess=0.5))
    assert known.chosen == D3(alpha=0.8, start=0.7)
    guessed = search(KnownScorer(late_is_safe, base=0.55, guess=0.5))
    assert outcome(guessed) is Outcome.TOO_LITTLE_KNOWN
    assert "beyond the 50.0 % that one constant answer to each task gets right" in reason(guessed)
    assert search(KnownScorer(late_is_safe, base=0.55)).chosen is not None


def test_a_relative_tolerance_is_of_what_full_depth_knows() -> None:
    """Half of what is known is lost: 3 of 6 points. Three points may be lost of 60, but not of 6."""

    def half(policy: D3, part: Part) -> float:
        return 0.5

    sizes: dict[str, Any] = {"answers": 30000, "certification": 3000}
    assert search(KnownScorer(half, base=0.06), loss=0.1, relative=True, **sizes).chosen is None
    kept = search(KnownScorer(late_is_safe, base=0.06), loss=0.1, relative=True, **sizes)
    assert kept.chosen == D3(alpha=0.8, start=0.7)
    assert outcome(search(KnownScorer(late_is_safe, base=0.06), loss=0.03, **sizes)) is Outcome.TOO_LITTLE_KNOWN


def test_too_few_right_answers_for_the_tolerance_are_counted() -> None:
    """The message counts right answers that are too few for a relative tolerance."""
    result = search(KnownScorer(late_is_safe, base=0.1), loss=0.05, relative=True)
    assert outcome(result) is Outcome.TOO_LITTLE_KNOWN
    assert "takes 75 right answers at least" in reason(result)


def test_the_best_constant_answer_is_the_commonest_one() -> None:
    booleans = calibration_task("boolean-expressions", None, seed=1, shots=2).load("test", 60)
    assert 0.38 <= best_constant(booleans) < 0.8
    assert best_constant(calibration_task("word-problems", None, seed=1, shots=None).load("test", 60)) < 0.1

    class Silent:
        prompt = "?"

        def is_right(self, answer: str) -> bool:
            return True

    assert best_constant([Silent(), Silent()]) == 0


def test_of_several_tasks_each_has_a_constant_answer_of_its_own() -> None:
    told = [
        Asked("?", BBHQuestion(str(i), f"({'ABCD'[task]})"), f"task {task}") for task in range(4) for i in range(50)
    ]
    assert best_constant(told) > 0.95, "who knows no more than the task is right on all, and has nothing to lose"
    different = [Asked("?", BBHQuestion(str(i), str(i)), f"task {i % 20}") for i in range(60)]
    assert best_constant(different) < 0.01, "one answer of three is no third by being the only one of its kind"


# -- the sequence of certificates, and what it costs -------------------------------------------------------------------


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
    assert sum(count for _, _, _, count in scorer.calls) <= result.budget.answers <= 6000
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


def test_settings_that_lose_the_tolerance_are_seldom_chosen() -> None:
    """Settings that lose the tolerance are seldom chosen, however many are tried."""
    # The whole search, selection included; many more runs: `python -m benchmarks.calibrations`.
    found = simulate(
        lambda policy: 0.1, Tolerance(0.1), differing=0.2, runs=200, limit=60, budget=1000, candidates=small_grid()
    )
    assert found.wrong == found.chosen
    assert 1 <= found.wrong <= 10  # of 200, at 2.5 % at most each


def test_settings_without_any_loss_are_seldom_refused() -> None:
    """Two looks at the level, on 500 problems each, cost as many answers and refused a third."""
    found = simulate(lambda policy: 0.0, Tolerance(0.02), differing=0.02, runs=40, candidates=small_grid())
    assert found.wrong == 0
    assert found.chosen >= 35


def small_grid() -> list[Candidate]:
    return make_candidates(16, 64, starts=(0.4, 0.6, 0.8), alphas=(0.8, 0.99, 0.9999))


def test_settings_that_run_the_same_layers_are_one() -> None:
    candidates = make_candidates(3, 8, starts=(0.2, 0.3, 0.7), alphas=(0.6,), tails=(0, 1, 3))
    assert [candidate.alike for candidate in candidates] == [
        (D3(0.6, 0.2), D3(0.6, 0.3)),
        (D3(0.6, 0.7),),
        (D3(0.6, 0.2, tail=1), D3(0.6, 0.3, tail=1)),
    ]  # start 0.7 with tail 1, and any with tail 3, would skip nothing
    assert all(candidate.policy == candidate.alike[0] for candidate in candidates)
    assert len(make_candidates(16, 64)) < len(make_candidates(16, 1024)) == 35


def test_budget_that_proves_nothing_is_refused_with_least_sizes() -> None:
    """A budget or limit that can prove nothing is refused with both least sizes and why."""
    two = Tolerance(0.02)
    for limit, answers in ((188, 7000), (190, 1000), (20, 30)):
        with pytest.raises(InvalidValueError) as caught:
            plan_budget(35, answers, limit, two)
        words = str(caught.value)
        assert words.startswith("--limit and --budget must be at least 190 and 1550 for a tolerance of 2 points")
        assert "not even a setting without any loss could be certified" in words
        assert words.endswith(f"got '{limit} and {answers}'")
    plan = plan_budget(35, 1550, 190, two)
    assert (plan.first_round, plan.certification, plan.answers) == (8, 190, 1550)
    few = plan_budget(35, 7000, None, Tolerance(0.1), Has(32, 60))
    assert few.answers == 1550 - 5 * (190 - 60), "a task with few questions cannot take all of the budget"
    assert plan_budget(35, 7000, None, two).certification == 700
    assert plan_budget(35, 7000, None, two).first_round == 46


def test_task_of_few_questions_sets_sizes_or_says_its_reach() -> None:
    """A task with few questions sets the sizes, or says what it is enough for."""
    has = Has(screening=125, certification=125)
    plan = plan_budget(35, 7000, None, Tolerance(0.05), has)
    assert (plan.certification, plan.screening) == (125, 124)
    with pytest.raises(InvalidValueError, match=r"125 questions .* a tolerance of 3\.1 points or more"):
        plan_budget(35, 7000, None, Tolerance(0.02), has)
    with pytest.raises(InvalidValueError, match="125 questions"):
        plan_budget(35, 7000, 126, Tolerance(0.05), has)
    with pytest.raises(InvalidValueError, match="20 for screening, which takes 32"):
        plan_budget(35, 7000, None, Tolerance(0.05), Has(20, 125))
    with pytest.raises(InvalidValueError, match=r"tolerance must be .*0\.2"):
        plan_budget(35, 7000, 500, Tolerance(0.2))


# -- what is written, and the questions that are asked ----------------------------------------------------------------


def test_the_file_holds_setting_evidence_and_fingerprint(tmp_path: Path) -> None:
    result = search(KnownScorer(late_is_safe))
    content = policy_file(result, {"task": "a task", "seed": 3}, "sha256:00")
    write_policy_file(content, tmp_path / POLICY_FILE)
    assert json.loads((tmp_path / POLICY_FILE).read_text()) == content
    assert policy_from_directory(tmp_path) == result.chosen
    assert calibrated_for(tmp_path) == "sha256:00"
    assert calibrated_task(tmp_path) == "a task"
    evidence = content["evidence"]
    assert (evidence["task"], evidence["seed"], evidence["tolerance"], evidence["settings_tried"]) == (
        "a task",
        3,
        0.03,
        len(result.trials),
    )
    found = evidence["test"]
    assert found["problems"] == 500
    assert found["difference"] == pytest.approx(found["exact_match"] - found["exact_match_full_depth"], abs=2e-6)
    assert found["difference_interval_95"]["low"] <= found["difference"] <= found["difference_interval_95"]["high"]
    assert list(tmp_path.iterdir()) == [tmp_path / POLICY_FILE]


def test_json_holds_everything_that_was_tried() -> None:
    result = search(KnownScorer(lambda policy, part: 0.3))
    report = json.loads(json.dumps(as_dict(result, {"model": "m"})))
    assert (report["safe"], report["depth"], report["outcome"]) == (False, None, "none shown to be safe")
    assert (report["tolerance"], report["tolerance_is_relative"]) == (0.03, False)
    assert report["power"][0] == {"differing": 0.0, "certified": 1.0}
    assert len(report["settings"]) == len(result.trials)
    assert {"fate", "problems", "exact_match", "realised_mean_layers", "depth"} <= set(report["settings"][0])


@pytest.mark.parametrize("name", ["word-problems", "word-sorting", "multistep-arithmetic"])
def test_the_parts_share_no_question(name: str) -> None:
    parts = calibration_task(name, None, seed=2, shots=None).parts(screening=30, certification=20)
    questions = [question.prompt for part in Part for question in parts[part]]
    assert [len(parts[part]) for part in Part] == [30, 20]
    assert len(set(questions)) == 50


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
    assert [len(parts[part]) for part in Part] == [12, 8]
    assert len(set(asked)) == 20
    assert task.max_tokens > 100
    assert task.stop
    if name == "gsm8k":
        assert all(("test" in question.prompt.rpartition("Q")[2]) for question in parts[Part.CERTIFICATION])
        assert all(("train" in question.prompt.rpartition("Q")[2]) for question in parts[Part.SCREENING])
    other = calibration_task(name, tmp_path, seed=2, shots=shots).parts(screening=12, certification=8)
    both = [{question.prompt.rpartition("Q")[2] for question in found[Part.CERTIFICATION]} for found in (parts, other)]
    search = {question.prompt.rpartition("Q")[2] for question in parts[Part.SCREENING] + other[Part.SCREENING]}
    assert not search & (both[0] | both[1]), "another seed certifies on what this one has searched on"
    with pytest.raises(InvalidValueError, match=r"--budget, --limit must be .*; got '41 to search, 8 to certify'"):
        task.parts(screening=41, certification=8)
