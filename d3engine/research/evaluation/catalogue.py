"""Benchmarks by name: data sets of a folder, generated tasks and functions without one; all
others are left to lm-evaluation-harness."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from d3engine.errors import NOTHING, require
from d3engine.research.evaluation import procedural
from d3engine.research.evaluation.bbh import load_bbh
from d3engine.research.evaluation.benchmark import Asked, Benchmark, Question
from d3engine.research.evaluation.chat_form import as_chat
from d3engine.research.evaluation.functions import FUNCTIONS, CodeQuestion, load_functions
from d3engine.research.evaluation.gsm8k import load_gsm8k
from d3engine.research.evaluation.published_code import HUMANEVAL, MBPP, load_humaneval, load_mbpp
from d3engine.research.evaluation.word_problems import Split

OF_FILES = f"gsm8k, {HUMANEVAL}, {MBPP}, bbh and bbh/<task>"
"""The tasks that a folder may have, for people."""

FOLDER = "gsm8k/, humaneval/, mbpp/ or bbh/"

ASKED_AS_CHATS = f"given with {FUNCTIONS}, or with a task of --data"

NAMES_WITHOUT_HARNESS = f"{procedural.KNOWN}, or {FUNCTIONS}, or with --data one of {OF_FILES}"
"""What `--tasks` takes besides the tasks of lm-evaluation-harness, for errors."""

DEFAULT_PROBLEMS = 500
"""Of a generated task; of files, all there are."""

DEPTH_QUESTIONS = 64
"""By which a policy's depth is set, at most, unless a number is given; no more than are asked afterwards."""

PUBLISHED_SHOTS = 3
"""Examples before each question, as in the D3 paper; generated tasks are asked without."""


HARNESS_LENGTHS = {"gsm8k": 1024, "bbh": 200}
"""Tokens of an answer, as in the D3 paper, to tasks of lm-evaluation-harness of these names and those that begin with
them and an underscore, where the task itself does not say."""


def harness_length(name: str, otherwise: int) -> int:
    """Tokens of an answer to a task of lm-evaluation-harness that does not say."""
    return next((n for known, n in HARNESS_LENGTHS.items() if name == known or name.startswith(f"{known}_")), otherwise)


def needs_no_files(name: str) -> bool:
    """Whether a task is generated, or comes with the package."""
    return name == FUNCTIONS or procedural.is_generated(name)


def are_generated(names: Sequence[str]) -> bool:
    """Whether all names are of tasks without files; a mixture with others is refused."""
    generated = [name for name in names if needs_no_files(name)]
    allowed = f"either generated tasks and {FUNCTIONS} or tasks of lm-evaluation-harness in one run"
    require(not generated or len(generated) == len(names), "--tasks", ",".join(names), allowed)
    return bool(generated)


def generated(
    names: Sequence[str], *, split: Split, seed: int, limit: int | None, shots: int | None, chat: bool = False
) -> list[Benchmark]:
    """The tasks of these names that need no files; with `chat`, which only `functions` knows, as of `from_files`."""
    count = DEFAULT_PROBLEMS if limit is None else limit
    found = [
        load_functions(split=split, shots=shots, limit=limit)
        if name == FUNCTIONS
        else procedural.procedural(name, split=split, seed=seed, limit=count, shots=shots or 0)
        for name in names
    ]
    return [as_chat(benchmark) for benchmark in found] if chat else found


def depth_questions(
    benchmark: Benchmark, folder: Path | None, *, seed: int, shots: int | None, most: int | None, chat: bool = False
) -> list[Question]:
    """Questions by which a policy's depth is set, which takes no answers: of the validation split, where there is one.

    BBH, HumanEval and the functions have none; their questions are taken at equal distances, from all tasks.
    """
    if most is None:
        most = min(DEPTH_QUESTIONS, len(benchmark.questions))
    if benchmark.name in ("bbh", FUNCTIONS, HUMANEVAL):
        return benchmark.questions[:: -(-len(benchmark.questions) // most)]
    if folder is None:
        return generated([benchmark.name], split="validation", seed=seed, limit=most, shots=shots)[0].questions
    given = {"split": "validation", "seed": seed, "limit": most, "shots": shots, "chat": chat}
    return from_files([benchmark.name], folder, **given)[0].questions  # type: ignore[arg-type]


def reference_answer(question: Question) -> str:
    """What a question of this catalogue should be answered with, as its examples write it: " 3 + 4 = 7 #### 7"."""
    own: Any = question.question if isinstance(question, Asked) else question
    has_none = f"absent with {FUNCTIONS}, {HUMANEVAL} and {MBPP}: it takes none of code"
    require(not isinstance(own, CodeQuestion), "--reference-answers", NOTHING, has_none)
    return str(own.solved).removeprefix(own.prompt)


def reference_answers(name: str, folder: Path) -> list[str]:
    """What the test questions of `gsm8k` or `bbh` in a folder should be answered with, as published."""
    (benchmark,) = from_files([name], folder, split="test", seed=0, limit=None, shots=0)
    own = [asked.question for asked in benchmark.questions if isinstance(asked, Asked)]
    return [str(getattr(question, "target", None) or getattr(question, "answer", "")) for question in own]


def is_of_files(name: str) -> bool:
    """Whether a task is read from a folder."""
    return name in ("gsm8k", "bbh", HUMANEVAL, MBPP) or name.startswith("bbh/")


def from_files(
    names: Sequence[str],
    folder: Path,
    *,
    split: Split,
    seed: int,
    limit: int | None,
    shots: int | None,
    chat: bool = False,
) -> list[Benchmark]:
    """`gsm8k`, `humaneval`, `mbpp`, `bbh` (all tasks there are) and `bbh/<task>` from the files of a folder; and
    `functions`.

    With `chat` as chat models are asked, without examples unless `shots` says how many.
    """
    require(folder.is_dir(), "--data", str(folder), f"a folder with {FOLDER}")
    for name in names:
        allowed = f"one of {OF_FILES} with --data, or {FUNCTIONS}"
        require(name == FUNCTIONS or is_of_files(name), "--tasks", name, allowed)
    tasks = [name.removeprefix("bbh/") for name in names if name.startswith("bbh/")]
    require(not (tasks and "bbh" in names), "--tasks", ",".join(names), "either bbh or some of its tasks")
    usual = 0 if chat else PUBLISHED_SHOTS
    examples = usual if shots is None else shots
    found = []
    for kind in dict.fromkeys(name.partition("/")[0] for name in names):
        if kind == "gsm8k":
            found.append(load_gsm8k(folder, split=split, shots=examples, seed=seed, limit=limit))
        elif kind == FUNCTIONS:
            found.append(load_functions(split=split, shots=shots, limit=limit))
        elif kind in (HUMANEVAL, MBPP):
            load = load_humaneval if kind == HUMANEVAL else load_mbpp
            found.append(load(folder, split=split, shots=shots, limit=limit))
        else:
            found.append(load_bbh(folder, split=split, shots=examples, tasks=tasks, limit=limit))
    return [as_chat(benchmark) for benchmark in found] if chat else found
