"""HumanEval and MBPP from their own files: functions to write, judged by the published tests in a sandbox.

`humaneval/HumanEval.jsonl` (164 problems, arXiv 2107.03374) and `mbpp/mbpp.jsonl` (974, arXiv 2108.07732), whose splits
are those of its paper, by task_id. Their tests are programs and run beside the answer's code, which could therefore
cheat; the task `functions` cannot be cheated.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from d3engine.errors import D3EngineError, require
from d3engine.research.evaluation.benchmark import Benchmark, Question, Verdict
from d3engine.research.evaluation.functions import STOP, CodeQuestion, check_sandbox, code_in
from d3engine.research.evaluation.sandbox import CodeError, CodeTimeError, call_function
from d3engine.research.evaluation.word_problems import Split
from d3engine.utils.files import as_json, read_text

HUMANEVAL, MBPP = "humaneval", "mbpp"

MBPP_SPLITS: Mapping[Split, range] = {"test": range(11, 511), "validation": range(511, 601), "train": range(601, 975)}

MAX_TOKENS = 512
"""Of an answer."""


@dataclass(frozen=True)
class HumanEvalQuestion(CodeQuestion):
    """The beginning of a file that ends in a function's docstring, and a program with `check(candidate)`."""

    entry_point: str
    beginning: str
    test: str

    @property
    def name(self) -> str:
        return self.entry_point

    @property
    def prompt(self) -> str:
        return self.beginning

    @property
    def request(self) -> str:
        return (
            f"Complete this Python function.\n\n```python\n{self.prompt.strip()}\n```\n\n"
            "Answer with the complete function in one code block."
        )

    def judged(self, code: str) -> Verdict:
        before = self.prompt.partition(f"def {self.name}(")[0]  # imports and functions that an answer may leave out
        return _checked(f"{before}\n{code}", f"{self.test}\n\ncheck({self.name})")


@dataclass(frozen=True)
class MBPPQuestion(CodeQuestion):
    """What a function does, in words, and its tests, "assert name(...) == ...", which the model sees."""

    called: str
    description: str
    setup: str
    tests: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.called

    @property
    def prompt(self) -> str:
        return f'"""\n{self.description}\n{self.tests[0]}\n"""\n'

    @property
    def request(self) -> str:
        tests = "\n".join(self.tests)
        return (
            f"{self.description}\n\nThe function should pass these tests:\n\n```python\n{tests}\n```\n\n"
            "Answer with the complete function in one code block."
        )

    def continued(self, answer: str) -> str | None:
        return code_in(answer, self.name)

    def judged(self, code: str) -> Verdict:
        return _checked(f"{code}\n\n{self.setup}", "\n".join(self.tests))


def load_humaneval(folder: Path, *, split: Split, shots: int | None, limit: int | None = None) -> Benchmark:
    """The first `limit` problems. Raises `SandboxError` where this system cannot confine the code of answers."""
    require(split == "test", "--split", split, f"'test', the only split that {HUMANEVAL} has")
    path = folder / HUMANEVAL / "HumanEval.jsonl"
    try:
        found = [HumanEvalQuestion(line["entry_point"], line["prompt"], line["test"]) for line in _lines(path)]
    except (KeyError, TypeError) as error:
        raise _odd(path, "entry_point, prompt and test", error) from error
    return _benchmark(HUMANEVAL, split, found[:limit], shots, STOP)


def load_mbpp(folder: Path, *, split: Split, shots: int | None, limit: int | None = None) -> Benchmark:
    """The first `limit` problems of a split. Raises `SandboxError` as `load_humaneval` does."""
    path = folder / MBPP / "mbpp.jsonl"
    try:
        found = [_mbpp_question(line) for line in _lines(path) if line["task_id"] in MBPP_SPLITS[split]]
    except (LookupError, TypeError, SyntaxError, StopIteration) as error:
        raise _odd(path, "task_id, text, code, test_setup_code and test_list", error) from error
    return _benchmark(MBPP, split, found[:limit], shots, ('\n"""', *STOP[1:]))


def _mbpp_question(line: Mapping[str, Any]) -> MBPPQuestion:
    """Its function is the one of the reference solution that the first test calls."""
    description = line["text"] if "text" in line else line["prompt"]  # as in its sanitized file
    tests = tuple(test.strip() for test in line["test_list"])
    called = {node.id for node in ast.walk(ast.parse(tests[0])) if isinstance(node, ast.Name)}
    solution = ast.parse(line["code"])
    name = next(node.name for node in solution.body if isinstance(node, ast.FunctionDef) and node.name in called)
    return MBPPQuestion(name, description.strip(), line["test_setup_code"], tests)


def _lines(path: Path) -> list[Any]:
    return [as_json(line, path) for line in read_text(path).split("\n") if line.strip()]


def _odd(path: Path, fields: str, error: Exception) -> D3EngineError:
    expected = f"a JSON object with {fields} on each line"
    return D3EngineError(f"{path} is not what it is named after ({expected}): {type(error).__name__}: {error}")


def _benchmark(
    name: str, split: Split, found: Sequence[Question], shots: int | None, stop: tuple[str, ...]
) -> Benchmark:
    require(not shots, "--num-fewshot", shots, f"0 with {name}, which is asked without examples")
    check_sandbox()
    return Benchmark(name, f"{split} split", {name: found}, MAX_TOKENS, stop)


@lru_cache(maxsize=4096)  # policies often give the same answer
def _checked(code: str, tests: str) -> Verdict:
    """Whether a program of tests ends without an exception behind the code."""
    whole = f"{code}\n\ndef all_tests_pass():\n    exec({tests!r}, globals())\n    return True\n"
    try:
        passed = call_function(whole, "all_tests_pass", [[]])
    except CodeTimeError:
        return Verdict.TIME
    except CodeError as error:
        return Verdict.WRONG if "AssertionError" in str(error) else Verdict.ERROR
    return Verdict.RIGHT if passed == [True] else Verdict.WRONG
