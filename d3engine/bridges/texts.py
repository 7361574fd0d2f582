"""The texts that bridges are fitted to and measured on, as token ids.

The one idea: bridges are best fitted to what will pass them. So a conversation is written by the model's own chat
template, and a file may hold conversations, questions with answers, or plain text.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from d3engine.errors import InvalidValueError, require
from d3engine.files import UnreadableFileError, read_text
from d3engine.text.chat_prompts import ChatPrompts
from d3engine.text.chat_template import load_chat_template
from d3engine.text.tokenizer import Tokenizer

HELD_OUT_EVERY = 8
"""Of texts from one source, every so manieth is held out."""

_ALLOWED = (
    'a file of text, or a .jsonl file whose lines are objects with "text", with "messages" or with "question" and '
    '"answer"'
)


class TextReader:
    """Makes token ids of files, at most `max_tokens` of a text, for the model in `directory`."""

    def __init__(self, directory: Path, tokenizer: Tokenizer, max_tokens: int) -> None:
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        self._prompts = ChatPrompts(directory, tokenizer)
        self._has_template = load_chat_template(directory) is not None

    def read(self, path: Path, option: str) -> list[list[int]]:
        """All texts of a file; a file that is no `.jsonl` is one text, cut into pieces.

        Raises `InvalidValueError` that names `option` for a file that holds none.
        """
        try:
            content = read_text(path)
            if path.suffix == ".jsonl":
                lines = [json.loads(line) for line in content.split("\n") if line.strip()]
                texts = [self._of_line(line) for line in lines]
            else:
                texts = self._pieces(self.tokenizer.encode(content))
        except (UnreadableFileError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise InvalidValueError(option, str(path), f"{_ALLOWED} ({error})") from error
        require(len(texts) > 0, option, str(path), f"{_ALLOWED}, and not empty")
        return texts

    def _of_line(self, line: Any) -> list[int]:
        if not isinstance(line, dict):
            raise TypeError("a line is no JSON object")
        if "messages" in line:
            return self._conversation(line["messages"])
        if "question" in line:
            question, answer = str(line["question"]), str(line["answer"])
            if self._has_template:
                return self._conversation(
                    [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
                )
            return self.tokenizer.encode(f"Question: {question}\nAnswer: {answer}")[: self.max_tokens]
        return self.tokenizer.encode(str(line["text"]))[: self.max_tokens]

    def _conversation(self, messages: Any) -> list[int]:
        return self._prompts.token_ids(messages, add_generation_prompt=False)[: self.max_tokens]

    def _pieces(self, token_ids: list[int]) -> list[list[int]]:
        return [token_ids[start : start + self.max_tokens] for start in range(0, len(token_ids), self.max_tokens)]


def shuffled(texts: Sequence[list[int]], count: int, seed: int) -> list[list[int]]:
    """`count` of the texts at most, in an order that `seed` decides."""
    order = list(texts)
    random.Random(f"bridges-{seed}").shuffle(order)
    return order[:count]


def parted(texts: Sequence[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """The texts to fit on, and those to hold out."""
    kept = [text for number, text in enumerate(texts) if number % HELD_OUT_EVERY]
    return kept, [text for number, text in enumerate(texts) if number % HELD_OUT_EVERY == 0]
