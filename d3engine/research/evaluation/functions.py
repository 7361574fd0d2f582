"""The task `functions`: 60 small Python functions to write, judged by tests that the model
does not see, in a sandbox."""

from __future__ import annotations

import ast
import re
import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from textwrap import dedent, fill, indent
from typing import Any

from d3engine.errors import require
from d3engine.research.evaluation.benchmark import Benchmark, Verdict
from d3engine.research.evaluation.function_problems import PROBLEMS
from d3engine.research.evaluation.sandbox import CodeError, CodeTimeError, SandboxError, call_function
from d3engine.research.evaluation.word_problems import Split

FUNCTIONS = "functions"
MAX_TOKENS = 320
STOP = ("\ndef ", "\nclass ", "\nif __name__", "\nprint(", "\nassert ", "\n```")
"""Where a base model goes on with something else."""

_FENCED = re.compile(r"^[ \t]*```[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"^(?:def \w|class \w|import \w|from \S+ import |@\w)", re.MULTILINE)


class CodeQuestion(ABC):
    """A function to write, which `prompt` begins for a base model and `request` asks a chat model for."""

    @property
    @abstractmethod
    def name(self) -> str: ...

    @property
    @abstractmethod
    def prompt(self) -> str: ...

    @property
    @abstractmethod
    def request(self) -> str: ...

    @abstractmethod
    def judged(self, code: str) -> Verdict:
        """Of the code of an answer, as the sandbox finds."""

    def continued(self, answer: str) -> str | None:
        """The code of what continues the prompt; None without any."""
        return up_to_end(self.prompt + answer, self.name) if answer.strip() else None

    def verdict(self, answer: str) -> Verdict:
        """Of what continues the prompt."""
        code = self.continued(answer)
        return Verdict.NO_CODE if code is None else self.judged(code)

    def chat_verdict(self, answer: str) -> Verdict:
        """Of an answer to the request."""
        code = code_in(answer, self.name)
        return Verdict.NO_CODE if code is None else self.judged(code)

    def is_right(self, answer: str) -> bool:
        return self.verdict(answer) is Verdict.RIGHT


@dataclass(frozen=True)
class FunctionQuestion(CodeQuestion):
    """A function to write: "def name(...) -> ...", what it does, and tests, "name(...) == ...", the first one shown."""

    signature: str
    description: str
    tests: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.signature.removeprefix("def ").partition("(")[0]

    @property
    def prompt(self) -> str:
        """The beginning of the function, for a model to continue: signature, docstring, example."""
        call, _, result = self.tests[0].partition(" == ")
        words = fill(self.description, 84, break_on_hyphens=False)
        docstring = indent(f'"""{words}\n\n>>> {call}\n{result}\n"""\n', "    ")
        return f"{self.signature}:\n{docstring}"

    @property
    def request(self) -> str:
        """The same for a chat model."""
        call, _, result = self.tests[0].partition(" == ")
        return (
            f"{self.description}\n\nImplement this in Python as\n\n```python\n{self.signature}:\n```\n\n"
            f"For example, `{call}` gives `{result}`. Answer with the complete function in one code block."
        )

    def judged(self, code: str) -> Verdict:
        return _judged(self, code)


def load_functions(*, split: Split, shots: int | None, limit: int | None = None) -> Benchmark:
    """The first `limit` problems. Raises `SandboxError` where this system cannot confine the code of answers."""
    require(split == "test", "--split", split, f"'test', the only split that {FUNCTIONS} has")
    require(not shots, "--num-fewshot", shots, f"0 with {FUNCTIONS}, which has no examples to spare")
    check_sandbox()
    return Benchmark(FUNCTIONS, f"{split} split", {FUNCTIONS: all_functions()[:limit]}, MAX_TOKENS, STOP)


def check_sandbox() -> None:
    """Raise `SandboxError` where this system cannot confine the code of answers, or gives it no standard library."""
    try:
        call_function("import collections, itertools, math, re, string\ndef ready(): return True", "ready", [[]])
    except CodeError as error:
        raise SandboxError(f"the sandbox cannot import the standard library: {error}") from error


def all_functions() -> list[FunctionQuestion]:
    found = []
    for block in PROBLEMS.strip().split("\n\n"):
        signature, *lines = block.split("\n")
        call = signature.removeprefix("def ").partition("(")[0] + "("
        words = [line for line in lines if not line.startswith(call)]
        found.append(FunctionQuestion(signature, " ".join(words), tuple(lines[len(words) :])))
    return found


def code_in(answer: str, name: str) -> str | None:
    """The first fenced block, or else the text, that defines the function, up to the function's end; and the
    helpers that are defined behind it."""
    start = re.compile(rf"^def {name}\s*\(", re.MULTILINE)
    for block in _FENCED.findall(answer):
        code = dedent(block)
        if start.search(code):
            return _with_helpers(code, name)
    begin = _CODE.search(answer)
    return _with_helpers(answer[begin.start() :], name) if begin and start.search(answer) else None


def _with_helpers(code: str, name: str) -> str:
    function = up_to_end(code, name)
    behind = _statements(code[len(function) :]) or []
    helpers = [one for one in behind if isinstance(one, ast.FunctionDef | ast.ClassDef) and one.name != name]
    return "\n".join([function, *map(ast.unparse, helpers)])


def up_to_end(code: str, name: str) -> str:
    """The code as far as the end of a function; all of it where that is not found."""
    lines = code.split("\n")
    first = next(number for number, line in enumerate(lines) if re.match(rf"def {name}\s*\(", line))
    for number, line in enumerate(lines[first + 1 :], first + 1):
        # A string may have lines that begin like the next statement: only what is Python before one is the function.
        if line.strip() and not line[0].isspace() and line[0] != "#" and _statements("\n".join(lines[:number])):
            return "\n".join(lines[:number])
    return code


def _statements(code: str) -> list[ast.stmt] | None:
    """None of what is no Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of invalid escapes, to the reader of a report
            return ast.parse(code).body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None


@lru_cache(maxsize=4096)  # policies often give the same answer
def _judged(question: FunctionQuestion, code: str) -> Verdict:
    calls, expected = zip(*(_parsed(test) for test in question.tests), strict=True)
    try:
        results = call_function(code, question.name, calls)
    except CodeTimeError:
        return Verdict.TIME
    except CodeError:
        return Verdict.ERROR
    return Verdict.RIGHT if results == list(expected) else Verdict.WRONG


def _parsed(test: str) -> tuple[list[Any], Any]:
    call, _, result = test.partition(" == ")
    parsed = ast.parse(call, mode="eval").body
    assert isinstance(parsed, ast.Call)
    return [ast.literal_eval(argument) for argument in parsed.args], ast.literal_eval(result)
