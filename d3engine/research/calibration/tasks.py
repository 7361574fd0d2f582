"""The questions that a calibration asks: two parts of a task, without a question in common."""

# A task with a validation split gives screening from it and the certificate from its test split. BBH, HumanEval and
# the functions have one split: the order of the questions' hashes, the same for every seed, says which half they
# belong to. A file's questions are a fixed number, so a second calibration certifies on the same ones; generated tasks
# have new ones.

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from d3engine.errors import NOTHING, require
from d3engine.research.calibration.scoring import Part
from d3engine.research.calibration.search import Has
from d3engine.research.evaluation import catalogue, procedural
from d3engine.research.evaluation.benchmark import Benchmark, Question
from d3engine.research.evaluation.functions import FUNCTIONS
from d3engine.research.evaluation.published_code import MBPP
from d3engine.research.evaluation.word_problems import Split


@dataclass(frozen=True)
class CalibrationTask:
    """A task to calibrate on. `max_tokens` and `stop` are its own; `load(split, count)` gives `count` questions.

    `has` is what there is of them, None where a program writes as many as are asked for.
    """

    name: str
    max_tokens: int
    stop: tuple[str, ...]
    load: Callable[[Split, int], Sequence[Question]]
    has: Has | None = None

    def parts(self, screening: int, certification: int) -> dict[Part, list[Question]]:
        """Questions for each part. Raises `InvalidValueError` where the task has fewer different ones."""
        validation = _different(self.load("validation", screening)) if screening else []
        test = _different(self.load("test", certification))
        wanted = f"{screening} to search, {certification} to certify"
        has = f"within what {self.name} has questions for ({len(validation)} to search, {len(test)} to certify)"
        enough = len(validation) >= screening and len(test) >= certification
        require(enough, "--budget, --limit", wanted, has)
        return {Part.SCREENING: validation[:screening], Part.CERTIFICATION: test[:certification]}


def calibration_task(
    name: str, folder: Path | None, *, seed: int, shots: int | None, chat: bool = False
) -> CalibrationTask:
    """A generated task, `functions`, or a task of a folder's files, `shots` examples before each.

    With `chat` a task that is not generated is asked as chat models are.
    """
    if folder is None and name != FUNCTIONS:
        allowed = f"{procedural.KNOWN}, or {FUNCTIONS}; others need --data"
        require(procedural.is_generated(name), "--task", name, allowed)
        require(not chat, "--chat", NOTHING, catalogue.ASKED_AS_CHATS)

        def generate(split: Split, count: int) -> Sequence[Question]:
            return _one(catalogue.generated([name], split=split, seed=seed, limit=count, shots=shots)).questions

        example = _one(catalogue.generated([name], split="validation", seed=seed, limit=1, shots=shots))
        return CalibrationTask(name, example.max_tokens, example.stop, generate)

    known = name == FUNCTIONS or catalogue.is_of_files(name)
    require(known, "--task", name, f"one of {catalogue.OF_FILES} with --data, or {FUNCTIONS}")

    def read(split: Split) -> Benchmark:
        given: dict[str, Any] = {"split": split, "seed": seed, "limit": None, "shots": shots, "chat": chat}
        if folder is None:
            return _one(catalogue.generated([name], **given))
        return _one(catalogue.from_files([name], folder, **given))

    test = read("test")
    questions: dict[Split, list[Question]]
    if name in ("gsm8k", MBPP):
        questions = {"validation": _different(read("validation").questions), "test": _different(test.questions)}
    else:
        questions = _halves(test.questions, seed)
    has = Has(len(questions["validation"]), len(questions["test"]))
    return CalibrationTask(name, test.max_tokens, test.stop, lambda split, count: questions[split], has)


def _one(benchmarks: Sequence[Benchmark]) -> Benchmark:
    (benchmark,) = benchmarks
    return benchmark


def _halves(questions: Sequence[Question], seed: int) -> dict[Split, list[Question]]:
    """Which half is the question's own affair; the seed shuffles each half, so that tasks of BBH mix."""
    ordered = sorted(_different(questions), key=lambda question: sha256(question.prompt.encode()).digest())
    middle = len(ordered) // 2
    halves: dict[Split, list[Question]] = {"validation": ordered[:middle], "test": ordered[middle:]}
    for half in halves.values():
        random.Random(f"calibration-{seed}").shuffle(half)
    return halves


def _different(questions: Sequence[Question]) -> list[Question]:
    return list({question.prompt: question for question in questions}.values())
