"""The word problems: a seed fixes them, the splits share nothing, and every worked answer is right."""

import itertools
import operator
import re

import pytest

from d3engine.research.evaluation.word_problems import (
    MAX_NUMBER,
    MAX_STEPS,
    MIN_STEPS,
    Problem,
    Split,
    extract_answer,
    format_completion,
    format_prompt,
    problems,
)

SPLITS: tuple[Split, ...] = ("train", "validation", "test")
EQUATION = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


def some(split: Split, seed: int = 0, count: int = 300) -> list[Problem]:
    return list(itertools.islice(problems(split, seed), count))


def test_first_problem_of_the_test_split_is_pinned() -> None:
    """Published scores name the test split by its seed: a change of the generator must not pass unnoticed."""
    first = some("test", count=1)[0]
    assert first.question == (
        "Sam has 57 apples. Sam gets 2 from Tom. Sam finds 8. Ana takes 8. How many apples does Sam have now?"
    )
    assert first.solution == (
        "Adding 2 makes 57 + 2 = 59. Adding 8 makes 59 + 8 = 67. Taking 8 leaves 67 - 8 = 59. #### 59"
    )


@pytest.mark.parametrize("split", SPLITS)
def test_each_step_is_right_and_starts_from_the_running_total(split: Split) -> None:
    """Every step of every solution is right and starts from the running total."""
    for problem in some(split):
        total = int(re.findall(r"\d+", problem.question)[0])
        steps = EQUATION.findall(problem.solution)
        assert MIN_STEPS <= len(steps) <= MAX_STEPS
        for left, operation, right, result in steps:
            assert int(left) == total
            assert OPERATIONS[operation](int(left), int(right)) == int(result)
            total = int(result)
        assert problem.answer == total
        assert problem.solution.endswith(f"#### {total}")


def test_questions_and_solutions_have_operands_in_one_order() -> None:
    """Questions and solutions name the same operands in the same order."""
    for problem in some("train"):
        named = [int(n) for n in re.findall(r"\d+", problem.question)][1:]
        used = [int(right) for _, op, right, _ in EQUATION.findall(problem.solution) if op in "+-"]
        assert named == used


def test_all_numbers_are_within_0_and_99() -> None:
    for problem in some("train", count=2000):
        numbers = re.findall(r"\d+", problem.question + problem.solution)
        assert all(0 <= int(number) <= MAX_NUMBER for number in numbers)


def test_steps_of_every_count_and_every_operation_occur() -> None:
    steps = [EQUATION.findall(problem.solution) for problem in some("train", count=1000)]
    assert {len(step) for step in steps} == set(range(MIN_STEPS, MAX_STEPS + 1))
    assert {operation for step in steps for _, operation, _, _ in step} == set("+-*/")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Adding 2 makes 3 + 2 = 5. #### 5", 5),
        ("#### 12\n\nQuestion: ... #### 13", 12),
        ("####7", 7),
        ("#### -3", -3),
        ("the answer is 12", None),
        ("### 12", None),
        ("", None),
    ],
)
def test_the_answer_is_the_number_after_the_first_mark(text: str, answer: int | None) -> None:
    assert extract_answer(text) == answer


def test_prompt_and_completion_join_into_one_readable_text() -> None:
    problem = Problem("How many?", "#### 4", 4)
    text = format_prompt(problem.question) + format_completion(problem)
    assert text == "Question: How many?\nAnswer: #### 4"
    assert extract_answer(format_completion(problem)) == problem.answer
