"""The generated tasks: a seed fixes them, the splits share nothing, and every worked answer is right."""

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest

from d3engine.errors import InvalidValueError
from d3engine.research.evaluation import generated
from d3engine.research.evaluation.generated import GeneratedProblem, final_answer
from d3engine.research.evaluation.procedural import (
    GENERATORS,
    NAMES,
    SIZES,
    all_problems,
    different_problems,
    procedural,
)
from d3engine.research.evaluation.word_problems import Split, split_of

SPLITS: tuple[Split, ...] = ("train", "validation", "test")


def some(name: str, split: Split = "test", seed: int = 0, count: int = 30) -> list[GeneratedProblem]:
    found: Any = itertools.islice(all_problems(name, split, seed), count)
    return list(found)


# Oracles: each solves a question from its text alone, in another way than the generator.


def solve_expression(question: str) -> str:
    """Python's own rules; the text holds nothing but constants, operators and brackets."""
    expression = question.removeprefix("What is ").removesuffix("?")
    assert re.fullmatch(r"(?:True|False|and|or|not|[-+*()\s\d])+", expression)
    return str(eval(expression, {"__builtins__": {}}))


def solve_sorting(question: str) -> str:
    words = question.removeprefix("Sort these words: ").removesuffix(".").split()
    assert len(set(words)) == len(words)
    return " ".join(sorted(words))


def solve_brackets(question: str) -> str:
    """Close pairs until none is left; what stays is open."""
    sequence = question.removeprefix("Close the brackets: ").replace(" ", "")
    while (shorter := re.sub(r"\(\)|\[\]|\{\}|<>", "", sequence)) != sequence:
        sequence = shorter
    assert sequence
    assert not set(sequence) & set(")]}>"), "closes what was not open"
    return " ".join(sequence[::-1].translate(str.maketrans("([{<", ")]}>")))


def solve_counting(question: str) -> str:
    listed, asked = question.removeprefix("I have ").split(". How many ")
    kind = generated.THINGS[asked.split()[0]]
    numbers = dict(zip(("a", "an", "two", "three", "four", "five", "six"), (1, 1, 2, 3, 4, 5, 6), strict=True))
    total = 0
    for item in re.split(r", | and ", listed):
        number, thing = item.split()
        singular = {"mice": "mouse", "peaches": "peach"}.get(thing, thing.removesuffix("s"))
        if singular in kind:
            total += numbers[number]
    return str(total)


def solve_tracking(question: str) -> str:
    """Follow the things and not the people."""
    holder = {thing: person for person, thing in re.findall(r"(\w+) has the (\w+)\.", question)}
    for first, second in re.findall(r"(\w+) and (\w+) swap\.", question):
        other = {first: second, second: first}
        holder = {thing: other.get(person, person) for thing, person in holder.items()}
    (asked,) = re.findall(r"What does (\w+) have\?", question)
    return next(thing for thing, person in holder.items() if person == asked)


ORACLES: dict[str, Callable[[str], str]] = (
    {"boolean-expressions": solve_expression, "word-sorting": solve_sorting, "dyck-languages": solve_brackets}
    | {"object-counting": solve_counting, "tracking-shuffled-objects": solve_tracking}
    | {"multistep-arithmetic": solve_expression}
)


@pytest.mark.parametrize("name", GENERATORS)
def test_every_answer_is_what_an_independent_solver_finds(name: str) -> None:
    for problem in some(name):
        assert problem.answer == ORACLES[name](problem.question)
        assert problem.solution.endswith(f"#### {problem.answer}")
        assert problem.is_right(f" {problem.solution}")
    assert len({problem.answer for problem in some(name)}) > 1


@pytest.mark.parametrize("name", ["boolean-expressions", "multistep-arithmetic"])
def test_every_step_of_an_expression_is_right(name: str) -> None:
    for problem in some(name):
        steps = re.findall(r"(\S[^.=]*?) (?:is|=) (\S+)\.", problem.solution)
        assert steps
        assert all(str(eval(left, {"__builtins__": {}})) == right for left, right in steps), problem
        assert steps[-1][1] == problem.answer


def test_the_working_of_counting_and_tracking_ends_in_the_answer() -> None:
    for problem in some("object-counting"):
        totals = re.findall(r"(\d+) \+ (\d+) = (\d+)\.", problem.solution)
        assert all(int(a) + int(b) == int(c) for a, b, c in totals)
        assert [a for a, _, _ in totals] == ["0", *(c for _, _, c in totals)][: len(totals)]
        assert problem.answer == (totals[-1][2] if totals else "0")
    for problem in some("tracking-shuffled-objects"):
        swaps = re.findall(r"(\w+) and (\w+) swap", problem.question)
        assert re.findall(r"(\w+) has the \w+, (\w+) the \w+\.", problem.solution) == swaps


@pytest.mark.parametrize("name", NAMES)
def test_same_seed_gives_same_problems_and_disjoint_splits(name: str) -> None:
    """The same seed gives the same problems, and splits share none."""
    first = different_problems(name, "test", 0, 12)
    assert first == different_problems(name, "test", 0, 12)
    assert first[:5] == different_problems(name, "test", 0, 5)
    assert len({problem.question for problem in first}) == 12
    assert first != different_problems(name, "test", 1, 12)
    questions = {
        split: {p.question for seed in (0, 1) for p in different_problems(name, split, seed, 12)} for split in SPLITS
    }
    for left, right in itertools.combinations(SPLITS, 2):
        assert not questions[left] & questions[right]
    for split in SPLITS:
        assert len(questions[split]) > 12
        assert all(split_of(question) == split for question in questions[split])


COUNTED: dict[str, Callable[[str], int]] = {
    "word-problems": lambda question: question.count(".") - 1,
    "boolean-expressions": lambda question: len(re.findall(r"and|or|not", question)),
    "word-sorting": lambda question: len(question.removeprefix("Sort these words: ").split()),
    "dyck-languages": lambda question: len(question.removeprefix("Close the brackets: ").split()),
    "object-counting": lambda question: len(re.findall(r"\b(?:an?|two|three|four|five|six) ", question)),
    "tracking-shuffled-objects": lambda question: question.count(" swap."),
    "multistep-arithmetic": lambda question: question.count("("),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_size_behind_the_name_is_the_size_of_every_question(name: str) -> None:
    least = SIZES[name].least
    for words, sizes in (
        (f"{name}:{least}", {least}),
        (f"{name}:{least + 3}-{least + 5}", range(least + 3, least + 6)),
    ):
        found = {COUNTED[name](problem.question) for problem in different_problems(words, "validation", 0, 24)}
        more = {max(sizes) + 1} if name == "dyck-languages" else set()  # one more, where nothing was left open
        assert set(sizes) <= found <= {*sizes, *more}


@pytest.mark.parametrize("name", NAMES)
def test_the_usual_size_said_aloud_asks_the_usual_questions(name: str) -> None:
    usual = SIZES[name]
    assert different_problems(f"{name}:{usual.fewest}-{usual.most}", "test", 2, 5) == different_problems(
        name, "test", 2, 5
    )


@pytest.mark.parametrize("name", GENERATORS)
def test_each_split_has_smallest_and_largest_questions(name: str) -> None:
    """Every split has questions of the smallest and of the largest size."""
    for size in (SIZES[name].least, SIZES[name].largest):
        for split in SPLITS:
            found = different_problems(f"{name}:{size}", split, 0, 15)
            assert found
            assert all(problem.is_right(problem.solution) for problem in found)
            assert all(ORACLES[name](problem.question) == problem.answer for problem in found)


def test_first_problems_of_the_test_splits_are_pinned() -> None:
    """Published scores name a split by its seed: a change of a generator must not pass unnoticed."""
    assert {name: some(name, count=1)[0].question for name in GENERATORS} == PINNED


PINNED: dict[str, str] = {
    "boolean-expressions": "What is ( ( ( False or False ) or ( True or False ) ) and ( False or False ) )?",
    "word-sorting": "Sort these words: forest ladder apple.",
    "dyck-languages": "Close the brackets: ( ) { } { < [ {",
    "object-counting": "I have two cellos, five guitars and three lemons. How many fruits do I have?",
    "tracking-shuffled-objects": "Omar has the coin. Mia has the cup. Tom has the kite. Omar and Tom swap. Mia and Omar swap. Omar and Mia swap. Tom and Mia swap. What does Tom have?",  # noqa: E501
    "multistep-arithmetic": "What is ((((9 * -2) + -6) - (-8 - 5)) + 0)?",
}


@pytest.mark.parametrize(
    ("text", "answer"),
    [("Open: [ . #### ]", "]"), (" #### a b \n#### c", "a b"), ("####", ""), ("the answer is 3", None)],
)
def test_the_answer_stands_behind_the_first_mark(text: str, answer: str | None) -> None:
    assert final_answer(text) == answer


def test_examples_are_training_problems_before_each_question() -> None:
    """Examples come from the training split, before every question."""
    plain = procedural("word-sorting", split="test", seed=3, limit=4)
    shown = procedural("word-sorting", split="test", seed=3, limit=4, shots=2)
    examples = different_problems("word-sorting", "train", 3, 2)
    for question, behind in zip(plain.questions, shown.questions, strict=True):
        *before, last = behind.prompt.split("\n\n")
        assert before == [example.solved for example in examples]
        assert last == question.prompt
        assert last.startswith("Question: ")
        assert last.endswith("\nAnswer:")
    assert shown.stop == ("\nQuestion:",)
    assert plain.stop == ()


def test_what_there_is_not_is_refused_by_name() -> None:
    with pytest.raises(InvalidValueError, match="poetry"):
        procedural("poetry", split="test", seed=0, limit=3)
    for size in ("", "1", "101", "5-3", "3-", "three", "3:4", "-3"):
        with pytest.raises(InvalidValueError, match=re.escape(f"of 2 to 100 words; got 'word-sorting:{size}'")):
            procedural(f"word-sorting:{size}", split="test", seed=0, limit=3)
    with pytest.raises(InvalidValueError, match="limit"):
        procedural("word-sorting", split="test", seed=0, limit=0)
    with pytest.raises(InvalidValueError, match="num-fewshot"):
        procedural("word-sorting", split="test", seed=0, limit=1, shots=-1)
