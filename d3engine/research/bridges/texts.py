"""Texts to fit bridges to and measure on, conversations by the model's chat template;
lines are read first and become tokens when they are picked."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from d3engine.errors import InvalidValueError, require
from d3engine.text.chat_template import ChatPrompts, load_chat_template
from d3engine.text.tokenizer import Tokenizer
from d3engine.utils.files import UnreadableFileError, as_json, read_text

HELD_OUT_EVERY = 8
"""Of texts from one source, one in this number is held out."""

_ALLOWED = (
    'a file of text, or a .jsonl file whose lines are objects with "text", with "messages" or with "question" and '
    '"answer"'
)


_Text = TypeVar("_Text")


@dataclass(frozen=True)
class Line:
    """A text as its file has it: an object of a `.jsonl` file, or the tokens of a piece of plain text; `option` and
    `path` say for errors where it is from."""

    content: dict[str, Any] | list[int]
    option: str
    path: Path


class TextReader:
    """Makes token ids of files, at most `max_tokens` of a text, for the model in `directory`."""

    def __init__(self, directory: Path, tokenizer: Tokenizer, max_tokens: int) -> None:
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        self._prompts = ChatPrompts(directory, tokenizer)
        self._has_template = load_chat_template(directory) is not None

    def lines(self, path: Path, option: str) -> list[Line]:
        """All texts of a file; a file that is no `.jsonl` is one text, cut into pieces.

        Raises `InvalidValueError` that names `option` for a file that holds none.
        """
        found: list[Any]
        try:
            content = read_text(path)
            if path.suffix == ".jsonl":
                found = [_checked(as_json(line, path)) for line in content.split("\n") if line.strip()]
            else:
                ids, most = self.tokenizer.encode(content), self.max_tokens
                found = [ids[start : start + most] for start in range(0, len(ids), most)]
        except (UnreadableFileError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise _no_text(option, path, error) from error
        require(len(found) > 0, option, str(path), f"{_ALLOWED}, and not empty")
        return [Line(one, option, path) for one in found]

    def encode(self, line: Line) -> list[int]:
        """The tokens of one; raises as `lines` for what the tokenizer or the chat template cannot read."""
        if isinstance(line.content, list):
            return line.content
        try:
            return self._tokens(line.content)[: self.max_tokens]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise _no_text(line.option, line.path, error) from error

    def _tokens(self, content: dict[str, Any]) -> list[int]:
        if "messages" in content:
            return self._conversation(content["messages"])
        if "question" not in content:
            return self.tokenizer.encode(str(content["text"]))
        question, answer = str(content["question"]), str(content["answer"])
        if not self._has_template:
            return self.tokenizer.encode(f"Question: {question}\nAnswer: {answer}")
        asked, answered = {"role": "user", "content": question}, {"role": "assistant", "content": answer}
        return self._conversation([asked, answered])

    def _conversation(self, messages: Any) -> list[int]:
        return self._prompts.token_ids(messages, add_generation_prompt=False)


def _checked(line: Any) -> dict[str, Any]:
    if not isinstance(line, dict):
        raise TypeError("a line is no JSON object")
    if not ("messages" in line or "text" in line or {"question", "answer"} <= line.keys()):
        raise KeyError(f"a line has {', '.join(line) or 'nothing'}")
    return line


def _no_text(option: str, path: Path, error: Exception) -> InvalidValueError:
    return InvalidValueError(option, str(path), f"{_ALLOWED} ({error})")


def shuffled(texts: Sequence[_Text], count: int, seed: int) -> list[_Text]:
    """`count` of the texts at most, in an order that `seed` decides."""
    order = list(texts)
    random.Random(f"bridges-{seed}").shuffle(order)
    return order[:count]


def parted(texts: Sequence[_Text]) -> tuple[list[_Text], list[_Text]]:
    """The texts to fit on, and those to hold out."""
    kept = [text for number, text in enumerate(texts) if number % HELD_OUT_EVERY]
    return kept, [text for number, text in enumerate(texts) if number % HELD_OUT_EVERY == 0]
