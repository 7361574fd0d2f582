"""Questions as a chat model is asked them: by its chat template, with room to reason, and an answer in a box.

A base model goes on with a text; a chat model that is asked so scores far below what it knows. So the examples become
earlier turns, the answer ends where the model ends its turn, and of an answer the last box counts, or the last number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING

from d3engine.errors import NOTHING, InvalidValueError
from d3engine.research.evaluation.bbh import BBHQuestion
from d3engine.research.evaluation.benchmark import Asked, Benchmark, Question, Verdict
from d3engine.research.evaluation.functions import CodeQuestion
from d3engine.research.evaluation.gsm8k import GSM8KQuestion, final_number
from d3engine.research.evaluation.kept import Prompt

if TYPE_CHECKING:
    from d3engine.engine.engine import Engine

MAX_TOKENS = 512
"""Of an answer: a model that reasons aloud is cut off by the few tokens that base models take."""

ASK = "Please reason step by step, and put your final answer within \\boxed{}."

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_SEPARATOR = re.compile(r"(?<=\d)(?:\{,\}|,?\\[,!:; ])(?=\d{3})")
"""Between thousands in LaTeX: 1{,}000, 1\\,000 and 1,\\!000."""

_CHOICE = re.compile(r"\((.*)\)|\(?([A-Z])\)?")
"""An answer in brackets, or the letter of one of several with half of them."""

_BOX = re.compile(r"\\boxed\s*\{")
_SUMS = re.compile(r"<<[^>]*>>")


@dataclass(frozen=True)
class ChatQuestion:
    """A question as messages, (role, content) each; `task` as of `Asked`."""

    messages: tuple[tuple[str, str], ...]
    question: Question
    task: str = ""

    @property
    def prompt(self) -> str:
        """The messages for people, which also distinguish two questions."""
        return "\n\n".join(f"{role}: {content}" for role, content in self.messages)

    def verdict(self, answer: str) -> Verdict:
        """Of code what the sandbox finds, of other answers right or wrong."""
        if isinstance(self.question, CodeQuestion):
            return self.question.chat_verdict(answer)
        return Verdict.RIGHT if self._is_reference(answer) else Verdict.WRONG

    def is_right(self, answer: str) -> bool:
        return self.verdict(answer) is Verdict.RIGHT

    def _is_reference(self, answer: str) -> bool:
        """Whether what is in the last box, or of numbers the last one, is the reference."""
        if isinstance(self.question, GSM8KQuestion):
            found = last_number(answer)
            return found is not None and found == as_number(final_number(self.question.answer) or "")
        assert isinstance(self.question, BBHQuestion)
        return _plain(last_box(answer) or answer.strip().rpartition("\n")[2]) == _plain(self.question.target)


def as_chat(benchmark: Benchmark) -> Benchmark:
    """The same questions for chat models, of GSM8K, BBH or code; raises `InvalidValueError` for others."""
    tasks = {task: [_question(one) for one in questions] for task, questions in benchmark.tasks.items()}
    return replace(benchmark, about=f"{benchmark.about}, as a chat", tasks=tasks, max_tokens=MAX_TOKENS, stop=())


def _question(asked: Question) -> ChatQuestion:
    if isinstance(asked, CodeQuestion):
        return ChatQuestion((("user", asked.request),), asked)
    if not isinstance(asked, Asked) or not isinstance(asked.question, GSM8KQuestion | BBHQuestion):
        raise InvalidValueError("--chat", NOTHING, "given with functions, or with a task of --data")
    messages: list[tuple[str, str]] = []
    for example in asked.examples:
        messages += [("user", _words(example)), ("assistant", _solved(example))]
    return ChatQuestion((*messages, ("user", _words(asked.question))), asked.question, asked.task)


def _words(question: Question) -> str:
    own = question.question if isinstance(question, GSM8KQuestion) else getattr(question, "input", "")
    return f"{own}\n\n{ASK}"


def _solved(question: Question) -> str:
    if isinstance(question, GSM8KQuestion):
        worked = _SUMS.sub("", question.answer).partition("####")[0].strip()
        return f"{worked}\n\nThe answer is \\boxed{{{final_number(question.answer)}}}."
    return f"The answer is \\boxed{{{getattr(question, 'target', '')}}}."


def last_box(text: str) -> str | None:
    """What stands in the last `\\boxed{...}`, braces inside it matched; None without one that is closed."""
    for match in reversed(list(_BOX.finditer(text))):
        depth, start = 1, match.end()
        for place in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if not depth:
                return text[start:place].strip()
    return None


def last_number(text: str) -> Decimal | None:
    """The number in the last box, or else the last of the text; None without one."""
    box = last_box(text)
    found = _NUMBER.findall(_SEPARATOR.sub(",", text if box is None else box))
    return as_number(found[-1]) if found else None


def as_number(text: str) -> Decimal | None:
    """A number without its thousands separators; 18.00 is 18."""
    try:
        return Decimal(text.replace(",", "").rstrip(".")).normalize()
    except InvalidOperation:
        return None


def _plain(answer: str) -> str:
    """An answer without what models put around it."""
    bare = re.sub(r"\\(?:text|mathrm|textbf)\s*\{([^}]*)\}", r"\1", answer)
    bare = bare.strip().strip("*.").strip()
    choice = _CHOICE.fullmatch(bare)  # one bracket alone may be the answer's own, as of dyck_languages
    return bare if choice is None else (choice[1] or choice[2] or "").strip()


def prompt_of(engine: Engine, question: Question) -> Prompt:
    """What the engine is given: the question's text, or its messages by the model's chat template."""
    if not isinstance(question, ChatQuestion):
        return question.prompt
    return engine.chat_prompt([{"role": role, "content": content} for role, content in question.messages])


def length_of(engine: Engine) -> Callable[[Question], int]:
    """Tokens of a question's prompt."""
    assert engine.tokenizer is not None
    encode = engine.tokenizer.encode

    def count(question: Question) -> int:
        prompt = prompt_of(engine, question)
        ids: Sequence[int] = encode(prompt) if isinstance(prompt, str) else prompt["prompt_token_ids"]
        return len(ids)

    return count
