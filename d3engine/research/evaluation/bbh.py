"""BIG-Bench Hard from its own files: `bbh/<task>.json` and `bbh/cot-prompts/<task>.txt`.

Examples are the three of the published chain-of-thought prompts, without the thought. That is what
lm-evaluation-harness's `bbh_fewshot` asks, and the paper. Two things differ from the harness: space around an answer
does not count, and it stops at "Q:" rather than at any "Q", which cuts the answer "(Q)" of seven items.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from d3engine.errors import D3EngineError, require, require_integer
from d3engine.research.evaluation.benchmark import Asked, Benchmark
from d3engine.research.evaluation.word_problems import Split
from d3engine.utils.files import DATA_BYTES, UnreadableFileError, read_json, read_text

MAX_TOKENS = 200
STOP = ("Q:", "</s>", "\n\n")
MAX_SHOTS = 3

_RULE = "-----\n"
_THOUGHT = "\nA: Let's think step by step."
_CONCLUSION = "So the answer is "


@dataclass(frozen=True)
class BBHQuestion:
    """An input and the one answer that counts."""

    input: str
    target: str

    @property
    def prompt(self) -> str:
        return f"Q: {self.input}\nA:"

    @property
    def solved(self) -> str:
        return f"{self.prompt} {self.target}"

    def is_right(self, answer: str) -> bool:
        return answer.strip() == self.target


def load_bbh(
    folder: Path, *, split: Split, shots: int, tasks: Sequence[str] = (), limit: int | None = None
) -> Benchmark:
    """The first `limit` questions of each task, behind `shots` examples; without `tasks`, all there are."""
    require_integer("--num-fewshot", shots, 0, MAX_SHOTS)
    require(split == "test", "--split", split, "'test', the only split that BBH has")
    known = sorted(path.stem for path in (folder / "bbh").glob("*.json"))
    require(len(known) > 0, "--data", str(folder), "a folder with bbh/<task>.json")
    for task in tasks:
        require(task in known, "--tasks", f"bbh/{task}", f"one of {', '.join(known)}")
    found = {task: _load_task(folder / "bbh", task, shots, limit) for task in tasks or known}
    return Benchmark("bbh", f"{split} split, {shots} shots", found, MAX_TOKENS, STOP)


def _load_task(folder: Path, task: str, shots: int, limit: int | None) -> list[Asked]:
    description, examples = _preamble(folder / "cot-prompts" / f"{task}.txt", shots)
    before = [description, *(example.solved for example in examples)]
    return [
        Asked("\n\n".join([*before, question.prompt]), question, task, examples)
        for question in _read(folder / f"{task}.json")[:limit]
    ]


def _preamble(path: Path, shots: int) -> tuple[str, tuple[BBHQuestion, ...]]:
    """What stands before a question: the task in a sentence, and solved examples."""
    try:
        _, separator, text = read_text(path).partition(_RULE)
        description, *examples = text.strip().split("\n\nQ: ")
        if not separator or len(examples) < shots:
            raise ValueError(f"{len(examples)} examples")
        return description.strip(), tuple(_without_thought(example) for example in examples[:shots])
    except UnreadableFileError:
        raise
    except ValueError as error:
        raise D3EngineError(f"{path} is no prompt of BBH with {shots} examples: {error}") from error


def _without_thought(example: str) -> BBHQuestion:
    question, thought, answer = example.partition(_THOUGHT)
    _, conclusion, target = answer.rpartition(_CONCLUSION)
    if not thought or not conclusion:
        raise ValueError(f"an example without {_THOUGHT.strip()!r} or {_CONCLUSION.strip()!r}")
    return BBHQuestion(question, target.strip().removesuffix("."))


def _read(path: Path) -> list[BBHQuestion]:
    try:
        examples = read_json(path, DATA_BYTES)["examples"]
        return [BBHQuestion(str(example["input"]), str(example["target"])) for example in examples]
    except UnreadableFileError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise D3EngineError(f"{path} is no task of BBH: {type(error).__name__}: {error}") from error
