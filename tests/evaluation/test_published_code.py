"""HumanEval and MBPP from files of their form: what is asked, and what their tests find."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from d3engine.errors import D3EngineError, InvalidValueError
from d3engine.research.calibration.tasks import calibration_task
from d3engine.research.evaluation.benchmark import Benchmark, Question, Verdict, verdict_of
from d3engine.research.evaluation.catalogue import depth_questions, from_files, reference_answer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, whose kernel confines the child")

SPLITS = ("test", "validation", "train")

HALVED = {
    "task_id": "HumanEval/0",
    "prompt": "import math\n\n\ndef floor_of(x):\n    return math.floor(x)\n\n\ndef halved(x: float) -> int:\n"
    '    """Half of x, rounded down.\n\n    >>> halved(5)\n    2\n    """\n',
    "entry_point": "halved",
    "canonical_solution": "    return floor_of(x / 2)\n",
    "test": "def check(candidate):\n    assert candidate(5) == 2\n    assert candidate(-1.0) == -1\n",
}


def mbpp_line(task_id: int, words: str = "text") -> dict[str, Any]:
    """A problem of this number, whose reference has a helper before the function that the tests call."""
    name = f"shifted{task_id}"
    return {
        words: f"Write a function to add {task_id} to a number.\r\n",
        "code": f"def helper(x):\r\n    return x + {task_id}\r\ndef {name}(x):\r\n    return helper(x)",
        "task_id": task_id,
        "test_setup_code": "ten = 10",
        "test_list": [f"assert {name}(1) == {task_id + 1}", f"assert {name}(ten) == {task_id + 10}"],
        "challenge_test_list": [],
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One problem of HumanEval, and of MBPP two of the test split, one of validation and two of neither."""
    for name, lines in (
        ("humaneval/HumanEval.jsonl", [HALVED]),
        ("mbpp/mbpp.jsonl", [mbpp_line(n) for n in (10, 11, 510, 511)] + [mbpp_line(601, "prompt")]),
    ):
        path = tmp_path / name
        path.parent.mkdir()
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return tmp_path


def loaded(folder: Path, name: str, **changed: Any) -> Benchmark:
    """One task of the folder."""
    given: dict[str, Any] = {"split": "test", "seed": 0, "limit": None, "shots": None}
    (benchmark,) = from_files([name], folder, **given | changed)
    return benchmark


def the(question: Question) -> Any:
    """A question with what its kind has besides."""
    return question


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        ("    return floor_of(x / 2)\n", Verdict.RIGHT),
        ("    return math.floor(x / 2)\n\nprint(halved(3))\n", Verdict.RIGHT),
        ("    return x // 1\n", Verdict.WRONG),
        ("    return floored(x)\n", Verdict.ERROR),
        ("    raise SystemExit\n", Verdict.ERROR),
        (" \n", Verdict.NO_CODE),
    ],
)
def test_humaneval_goes_on_with_a_file(folder: Path, answer: str, verdict: Verdict) -> None:
    """The model continues the published beginning; what it defines before the function stays in reach."""
    benchmark = loaded(folder, "humaneval")
    (question,) = benchmark.questions
    assert (question.prompt, benchmark.max_tokens, benchmark.about) == (HALVED["prompt"], 512, "test split")
    assert verdict_of(question, answer) is verdict


def test_humaneval_in_a_chat_takes_the_block_of_code(folder: Path) -> None:
    """The answer may leave out the imports that it was shown, or bring them, or define a helper behind."""
    (question,) = loaded(folder, "humaneval", chat=True).questions
    assert HALVED["prompt"].strip() in question.prompt
    for body, verdict in (
        ("return floor_of(x / 2)", Verdict.RIGHT),
        ("return half(x)\n\ndef half(x):\n    return math.floor(x / 2)", Verdict.RIGHT),
        ("return x", Verdict.WRONG),
    ):
        function = f"def halved(x):\n    {body}\n"
        assert verdict_of(question, f"Here:\n```python\n{function}\n```") is verdict
        assert verdict_of(question, f"```python\nimport math\n{function}\n```") is verdict
    assert verdict_of(question, "I cannot.") is Verdict.NO_CODE


def test_mbpp_splits_are_those_of_its_paper(folder: Path) -> None:
    """The number of a problem decides its split, and the reference names the function that the tests call."""
    names = {split: [the(one).name for one in loaded(folder, "mbpp", split=split).questions] for split in SPLITS}
    assert names == {"test": ["shifted11", "shifted510"], "validation": ["shifted511"], "train": ["shifted601"]}


def test_mbpp_shows_its_tests_and_runs_them(folder: Path) -> None:
    """A chat sees every test, a base model the first one; the code that a test needs runs before it."""
    (plain, _), (chat, _) = (loaded(folder, "mbpp", chat=form).questions for form in (False, True))
    assert plain.prompt == '"""\nWrite a function to add 11 to a number.\nassert shifted11(1) == 12\n"""\n'
    assert "assert shifted11(1) == 12\nassert shifted11(ten) == 21\n" in chat.prompt
    for question in (plain, chat):
        assert verdict_of(question, "def shifted11(x):\n    return x + 11\n") is Verdict.RIGHT
        assert verdict_of(question, "def shifted11(x):\n    return 12\n") is Verdict.WRONG, "the second test"
        assert verdict_of(question, "def shifted(x):\n    return x + 11\n") is Verdict.NO_CODE


def test_published_code_is_calibrated_on_other_problems(folder: Path) -> None:
    """MBPP searches by its validation split, HumanEval by half of its problems."""
    task = calibration_task("mbpp", folder, seed=0, shots=None, chat=True)
    assert [the(one).question.name for one in task.load("validation", 9)] == ["shifted511"]
    assert {the(one).question.name for one in task.load("test", 9)} == {"shifted11", "shifted510"}
    task = calibration_task("humaneval", folder, seed=0, shots=None)
    assert [len(task.load(split, 9)) for split in ("validation", "test")] == [0, 1]
    for name in ("mbpp", "humaneval"):
        asked = depth_questions(loaded(folder, name), folder, seed=0, shots=None, most=2)
        assert [the(one).name for one in asked] == ["shifted511" if name == "mbpp" else "halved"]


def test_published_code_refuses_what_it_has_not(folder: Path) -> None:
    for change, field in (({"split": "train"}, "--split"), ({"shots": 1}, "--num-fewshot")):
        with pytest.raises(InvalidValueError, match=field):
            loaded(folder, "humaneval", **change)
    with pytest.raises(InvalidValueError, match="--reference-answers must be absent with functions, huma"):
        reference_answer(loaded(folder, "mbpp").questions[0])
    with pytest.raises(InvalidValueError, match="one of gsm8k, humaneval, mbpp, bbh and bbh/<task> with --data"):
        loaded(folder, "apps")


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("mbpp", mbpp_line(11) | {"test_list": ["assert other(1)"]}),
        ("mbpp", mbpp_line(11) | {"code": "def"}),
        ("mbpp", {"task_id": 11}),
        ("mbpp", mbpp_line(11) | {"test_list": []}),
        ("humaneval", {"prompt": "def f(): ..."}),
        ("humaneval", [1]),
    ],
)
def test_published_code_names_a_file_of_another_form(folder: Path, name: str, line: Any) -> None:
    path = next((folder / name).iterdir())
    path.write_text(json.dumps(line))
    with pytest.raises(D3EngineError, match=rf"{path.name} is not what it is named after \(a JSON object with"):
        loaded(folder, name)
