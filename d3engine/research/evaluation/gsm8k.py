"""GSM8K from its own files: `gsm8k/train.jsonl` and `gsm8k/test.jsonl`, one question and its worked answer per line.

Prompt, stops and the rule for the answer are lm-evaluation-harness's (task `gsm8k`, strict match), so
that scores can be compared. The validation split is every tenth line of train.jsonl, 748 of them, and examples are
drawn from the rest, anew for each question.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from pathlib import Path

from d3engine.errors import D3EngineError, require, require_integer
from d3engine.research.evaluation.benchmark import Asked, Benchmark
from d3engine.research.evaluation.word_problems import Split
from d3engine.utils.files import as_json, read_text

MAX_TOKENS = 1024
STOP = ("Question:", "</s>", "<|im_end|>")
VALIDATION_EVERY = 10

_ANSWER = re.compile(r"#### (-?[0-9.,]+)")


@dataclass(frozen=True)
class GSM8KQuestion:
    """A question and its worked answer, which ends in "#### <number>"."""

    question: str
    answer: str

    @property
    def prompt(self) -> str:
        return f"Question: {self.question}\nAnswer:"

    @property
    def solved(self) -> str:
        return f"{self.prompt} {self.answer}"

    def is_right(self, answer: str) -> bool:
        """Whether the number after the first "####" is the one of the reference."""
        found = final_number(answer)
        return found is not None and found == final_number(self.answer)


def final_number(text: str) -> str | None:
    """The number after the first "#### ", without thousands separators; None where there is none."""
    match = _ANSWER.search(text)
    return match.group(1).replace(",", "").removesuffix(".") if match else None


def load_gsm8k(folder: Path, *, split: Split, shots: int, seed: int, limit: int | None = None) -> Benchmark:
    """The first `limit` questions of a split, each behind `shots` training examples drawn from `seed`."""
    require_integer("--num-fewshot", shots, 0, 64)
    train = _read(folder / "gsm8k" / "train.jsonl")
    examples = [line for number, line in enumerate(train) if number % VALIDATION_EVERY]
    by_split = {"train": examples, "validation": train[::VALIDATION_EVERY]}
    questions = by_split[split] if split in by_split else _read(folder / "gsm8k" / "test.jsonl")
    require(len(examples) > shots, "--num-fewshot", shots, f"fewer than the {len(examples)} training lines")
    rng = random.Random(f"gsm8k-{seed}")
    asked = [_with_examples(question, examples, shots, rng) for question in questions[:limit]]
    about = f"{split} split, {shots} shots, seed {seed}"
    return Benchmark("gsm8k", about, {"gsm8k": asked}, MAX_TOKENS, STOP)


def _with_examples(question: GSM8KQuestion, examples: list[GSM8KQuestion], shots: int, rng: random.Random) -> Asked:
    drawn = [example for example in rng.sample(examples, shots + 1) if example != question][:shots]
    prompt = "\n\n".join([*(example.solved for example in drawn), question.prompt])
    return Asked(prompt, question, examples=tuple(drawn))


def _read(path: Path) -> list[GSM8KQuestion]:
    try:
        lines = [as_json(line, path) for line in read_text(path).split("\n") if line.strip()]
        return [GSM8KQuestion(str(line["question"]), str(line["answer"])) for line in lines]
    except (KeyError, TypeError) as error:
        expected = "a JSON object with question and answer on each line"
        raise D3EngineError(f"{path} is no file of GSM8K ({expected}): {type(error).__name__}: {error}") from error
