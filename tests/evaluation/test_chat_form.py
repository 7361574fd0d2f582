"""Chat models are asked in their own form, and the last box or number of an answer counts."""

import json
from decimal import Decimal
from pathlib import Path

import pytest

from d3engine.errors import InvalidValueError
from d3engine.research.calibration.tasks import calibration_task
from d3engine.research.evaluation.bbh import BBHQuestion
from d3engine.research.evaluation.catalogue import from_files
from d3engine.research.evaluation.chat_form import ASK, MAX_TOKENS, ChatQuestion, last_box, last_number
from d3engine.research.evaluation.gsm8k import GSM8KQuestion
from d3engine.research.evaluation.report import told_answer


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3 + 4 = 7, so \\boxed{7}.", 7),
        ("\\boxed{5} or rather \\boxed{\\$1,234.50}", Decimal("1234.5")),
        ("He pays $18.00 in all.", 18),
        ("First 3 pens.\n#### 72", 72),
        ("It is -4.", -4),
        ("a \\boxed{12 that is never closed", 12),
        ("\\boxed{70{,}000}", 70000),
        ("\\boxed{1,\\!234{,}500.5}", Decimal("1234500.5")),
        ("He has 1\\,200 pens.", 1200),
        ("no number", None),
        ("\\boxed{none}", None),
    ],
)
def test_the_last_box_or_else_the_last_number_counts(text: str, number: Decimal | None) -> None:
    assert last_number(text) == number


def test_braces_inside_a_box_are_matched() -> None:
    assert last_box("so \\boxed{\\text{(A)}} it is") == "\\text{(A)}"


@pytest.mark.parametrize(
    "answer", ["\\boxed{(B)}", "\\boxed{\\text{B}}", "I think.\n(B)", "**(B)**", "\\boxed{B}.", "B)"]
)
def test_a_choice_is_right_however_it_is_wrapped(answer: str) -> None:
    question = ChatQuestion((("user", "x"),), BBHQuestion("x", "(B)"), "some")
    assert question.is_right(answer)
    assert not question.is_right(answer.replace("B", "C"))


@pytest.mark.parametrize("answer", ["\\boxed{]}", "\\boxed{( ] )}", "\\boxed{(]}"])
def test_bracket_of_the_answer_itself_counts(answer: str) -> None:
    """A bracket that is part of the answer is no wrapping: "]" is not "] )"."""
    question = ChatQuestion((("user", "x"),), BBHQuestion("x", "] )"), "dyck_languages")
    assert question.is_right("\\boxed{] )}")
    assert not question.is_right(answer)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "gsm8k").mkdir()
    lines = [
        {"question": f"What is {n} + {n}?", "answer": f"{n} + {n} = <<{n}+{n}={2 * n}>>{2 * n}\n#### {2 * n}"}
        for n in range(40)
    ]
    for split in ("train", "test"):
        (tmp_path / "gsm8k" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return tmp_path


def test_examples_are_earlier_turns_and_none_by_default(folder: Path) -> None:
    for shots, turns in ((None, 1), (2, 5)):
        (gsm8k,) = from_files(["gsm8k"], folder, split="test", seed=0, limit=3, shots=shots, chat=True)
        assert (gsm8k.max_tokens, gsm8k.stop) == (MAX_TOKENS, ())
        for nth, question in enumerate(gsm8k.questions):
            assert isinstance(question, ChatQuestion)
            assert len(question.messages) == turns
            assert question.messages[-1] == ("user", f"What is {nth} + {nth}?\n\n{ASK}")
            assert [role for role, _ in question.messages] == ["user", "assistant"] * (turns // 2) + ["user"]
            assert all("<<" not in text and "\\boxed{" in text for _, text in question.messages)
            assert question.is_right(f"It is \\boxed{{{2 * nth}}}")
            assert not question.is_right(f"It is \\boxed{{{2 * nth + 1}}}")
            assert told_answer(question) == f"{nth} + {nth} = <<{nth}+{nth}={2 * nth}>>{2 * nth}\n#### {2 * nth}"


def test_a_calibration_may_ask_so_too(folder: Path) -> None:
    task = calibration_task("gsm8k", folder, seed=0, shots=None, chat=True)
    assert task.max_tokens == MAX_TOKENS
    assert isinstance(task.load("test", 1)[0], ChatQuestion)
    assert isinstance(task.load("test", 1)[0].question, GSM8KQuestion)  # type: ignore[attr-defined]
    with pytest.raises(InvalidValueError, match="--chat must be given with functions"):
        calibration_task("word-problems", None, seed=0, shots=None, chat=True)
