"""What knowing the task and nothing of a question is worth: the commonest answer, given to every question.

The one idea: a score says something of a model only beside that of whoever does not read the questions. An answer that
is commonest among the questions it is judged on would be too good, so each half of a task's questions is answered by
what is commonest in the other half.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from d3engine.evaluation.benchmark import Asked, Question


def told_answer(question: Question) -> object:
    """What `Question` does not ask for, but those of d3engine's tasks have, under one of two names; else None."""
    inner = question.question if isinstance(question, Asked) else question
    return getattr(inner, "target", getattr(inner, "answer", None))


def commonest(answers: Sequence[object]) -> object:
    """The commonest of these answers, the first of equally common ones; None where none is told."""
    told = Counter(answer for answer in answers if answer is not None)
    return told.most_common(1)[0][0] if told else None


def right_by_constant(questions: Sequence[Question]) -> tuple[bool, ...]:
    """Of the questions of one task, whether each is right by the commonest answer of the half that it is not in."""
    answers = [told_answer(question) for question in questions]
    constants = commonest(answers[1::2]), commonest(answers[::2])
    return tuple(answer is not None and answer == constants[place % 2] for place, answer in enumerate(answers))
