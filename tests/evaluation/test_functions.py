"""Functions to write: the problems, what counts as an answer's code, and its verdict."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterable

import pytest
from function_solutions import solutions

from d3engine.errors import InvalidValueError
from d3engine.research.calibration.scoring import Part
from d3engine.research.calibration.tasks import calibration_task
from d3engine.research.distillation.prompts import CODE, TASKS
from d3engine.research.evaluation import sandbox
from d3engine.research.evaluation.benchmark import Asked, Verdict, verdict_of
from d3engine.research.evaluation.catalogue import (
    are_generated,
    depth_questions,
    from_files,
    generated,
    reference_answer,
)
from d3engine.research.evaluation.chat_form import ChatQuestion
from d3engine.research.evaluation.functions import (
    MAX_TOKENS,
    FunctionQuestion,
    all_functions,
    code_in,
    load_functions,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, whose kernel confines the child")

GIVEN = {"split": "test", "seed": 0, "limit": None, "shots": None}


def named(name: str) -> FunctionQuestion:
    """The problem of this name."""
    return next(question for question in all_functions() if question.name == name)


def runs_of_words(texts: Iterable[str], length: int) -> set[tuple[str, ...]]:
    """All sequences of `length` words in the texts."""
    split = [re.findall(r"[a-z0-9-]+", text.lower()) for text in texts]
    return {tuple(words[n : n + length]) for words in split for n in range(len(words) - length + 1)}


def test_functions_are_sixty_with_an_example_and_hidden_tests() -> None:
    """There are 60 different problems, each with an example and four to eight tests, whose arguments JSON carries."""
    questions = all_functions()
    assert len({question.name for question in questions}) == len(questions) == 60
    for question in questions:
        assert ast.parse(f"{question.signature}: pass")
        assert question.description.endswith("."), question.name
        assert 5 <= len(question.tests) <= 9
        assert len(set(question.tests)) == len(question.tests)
        for test in question.tests:
            call = ast.parse(test.partition(" == ")[0], mode="eval").body
            assert isinstance(call, ast.Call)
            arguments = [ast.literal_eval(argument) for argument in call.args]
            assert json.loads(json.dumps(arguments)) == arguments
        shown, *hidden = question.tests
        for prompt in (question.prompt, question.request):
            assert shown.partition(" == ")[0] in prompt
            assert shown.partition(" == ")[2] in prompt
            assert not any(test.partition(" == ")[0] in prompt for test in hidden)


def test_functions_share_no_words_with_prompts_of_training() -> None:
    """No four words in a row are those of a prompt that students learn from, and no name is a task's."""
    trained = runs_of_words([re.sub(r"\{\w+\}", "", template) for template in CODE], 4) | runs_of_words(TASKS, 4)
    questions = all_functions()
    assert not trained & runs_of_words([text for one in questions for text in (one.prompt, one.request)], 4)
    told = {word for task in TASKS for word in re.findall(r"\w+", task)}
    known = {"palindrome", "vowels", "prime", "anagrams", "median", "fibonacci", "roman", "duplicates", "transposes"}
    assert known <= {word.lower() for word in told}, "else the next line proves nothing"
    assert not known & {word for one in questions for word in re.findall(r"[a-z]+", one.request.lower())}


def test_functions_solutions_are_right_and_changed_ones_wrong() -> None:
    """Each reference solution is right, in both forms, and each with one mistake is found to be wrong."""
    known = solutions()
    assert set(known) == {question.name for question in all_functions()}
    for number, question in enumerate(all_functions()):
        right, wrong = known[question.name]
        assert question.chat_verdict(f"Here it is:\n\n```python\n{right}\n```\n") is Verdict.RIGHT, question.name
        assert question.chat_verdict(wrong) is Verdict.WRONG, question.name
        if number % 10 == 0:  # it is the same code
            assert question.verdict(right.partition("\n")[2]) is Verdict.RIGHT, question.name


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (
            "```python\nimport re\n\ndef f(x):\n    return 1\n\nprint(f(2))\n```",
            "import re\n\ndef f(x):\n    return 1\n",
        ),
        ("Like so:\ndef f(x):\n    return 1\nThis function is short.", "def f(x):\n    return 1"),
        ("```\nf(1) == 2\n```\nso\n```py\nN = 1\ndef f(x):\n    return N", "N = 1\ndef f(x):\n    return N"),
        ("1. Code\n   ```python\n   def f(x):\n       return 1\n   ```", "def f(x):\n    return 1\n"),
        ('def f(x):\n    """One\ntwo\n"""\n    return 1\nf(1)', 'def f(x):\n    """One\ntwo\n"""\n    return 1'),
        ("def f(\n    x,\n):\n    return 1\n\n# Example\nf(1)", "def f(\n    x,\n):\n    return 1\n\n# Example"),
        ("def f(x):\n    return (1", "def f(x):\n    return (1"),
        ("def f(x):\n    return '\\d'\nf(1)", "def f(x):\n    return '\\d'"),  # the parser's warning is no error
        ("def fun(x):\n    return 1", None),
        ("class A:\n    def f(self, x):\n        return 1", None),
        ("I cannot do that.", None),
        ("", None),
    ],
)
def test_functions_code_ends_with_the_function(answer: str, code: str | None) -> None:
    """The first block, or the text, that defines the function counts, without what stands after it."""
    assert code_in(answer, "f") == code


def test_functions_verdicts_say_what_is_not_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer without code, one that is wrong, one that raises or ends, and one that never ends differ."""
    monkeypatch.setattr(sandbox, "SECONDS", 1)
    question = ChatQuestion((("user", "x"),), named("swap_ends"))
    verdicts = {
        "return text[:0]": Verdict.WRONG,
        "print('right')": Verdict.WRONG,
        "return text[-1] + text[1:-1] + text[0]": Verdict.ERROR,
        "raise SystemExit": Verdict.ERROR,
        "while True: pass": Verdict.TIME,
    }
    for body, verdict in verdicts.items():
        answer = f"```python\ndef swap_ends(text):\n    {body}\n```"
        assert verdict_of(question, answer) is verdict
        assert not question.is_right(answer)
    assert verdict_of(question, "Swap them.") is Verdict.NO_CODE
    assert named("swap_ends").verdict(" \n") is Verdict.NO_CODE
    assert named("swap_ends").verdict("    return text\n\nswap_ends('a')\n1 +") is Verdict.WRONG, "cut behind its end"


def test_functions_is_a_task_of_eval_in_both_forms(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The task needs no files, may stand beside tasks of files, and a limit takes the first problems."""
    assert are_generated(["functions", "word-sorting"])
    (plain,) = generated(["functions"], **GIVEN)  # type: ignore[arg-type]
    assert (len(plain.questions), plain.max_tokens, plain.about) == (60, MAX_TOKENS, "test split")
    assert plain.questions[0].prompt.startswith('def minutes_between(start: str, end: str) -> int:\n    """Both')
    assert plain.questions[0].prompt.endswith('>>> minutes_between("09:30", "10:15")\n    45\n    """\n')
    folder = tmp_path_factory.mktemp("data")
    (chat,) = from_files(["functions"], folder, chat=True, **GIVEN | {"limit": 5})  # type: ignore[arg-type]
    assert (len(chat.questions), chat.max_tokens, chat.stop) == (5, 512, ())
    assert [one.question for one in chat.questions] == plain.questions[:5]  # type: ignore[attr-defined]
    assert len(depth_questions(plain, None, seed=0, shots=None, most=12)) == 12
    for change, field in (({"split": "train"}, "--split"), ({"shots": 1}, "--num-fewshot")):
        with pytest.raises(InvalidValueError, match=field):
            generated(["functions"], **GIVEN | change)  # type: ignore[arg-type]
    with pytest.raises(InvalidValueError, match="--chat must be given with functions"):
        generated(["word-sorting"], chat=True, **GIVEN | {"limit": 1})  # type: ignore[arg-type]
    with pytest.raises(InvalidValueError, match="--reference-answers must be absent with functions"):
        reference_answer(Asked("x", plain.questions[0]))


def test_functions_calibration_has_two_halves_of_problems() -> None:
    """A calibration searches by one half of the problems and certifies by the other."""
    task = calibration_task("functions", None, seed=0, shots=None, chat=True)
    parts = task.parts(30, 30)
    asked = [question.prompt for part in Part for question in parts[part]]
    assert len(set(asked)) == 60
    with pytest.raises(InvalidValueError, match="30 to search, 30 to certify"):
        task.parts(31, 30)


def test_functions_are_refused_where_nothing_confines_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system without the sandbox refuses the task before a model answers."""
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(sandbox.SandboxError, match="needs Linux"):
        load_functions(split="test", shots=0)
