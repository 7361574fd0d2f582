"""What a model consists of beside its numbers, by the names that files have in a model directory.

The one idea: a model directory is the form in which everything else knows a model. What keeps a model otherwise (a GGUF
file) answers to the same names, so that whoever reads a config, a tokenizer or weights knows of one form alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from d3engine.files import CONFIG_BYTES, DATA_BYTES, as_text
from d3engine.model.fields import json_object, of_a_model

if TYPE_CHECKING:  # torch waits until weights are asked for
    from d3engine.model.checkpoint import Checkpoint

CONFIG_FILE = "config.json"


class ModelFiles(ABC):
    """The files of one model; `path` is the directory or the file that a user named."""

    path: Path

    @abstractmethod
    def has(self, name: str) -> bool:
        """Whether there is a file of that name, be it one that cannot be read."""

    @abstractmethod
    def place(self, name: str) -> Path:
        """What errors call the file of that name."""

    @abstractmethod
    def content(self, name: str, most: int) -> bytes:
        """The file of that name, at most `most` bytes.

        Raises `UnreadableFileError` where that cannot be had, `ModelFormatError` where it cannot be made.
        """

    @abstractmethod
    def open_checkpoint(self) -> AbstractContextManager[Checkpoint]:
        """The weights, by the names that transformers gives them; raises `ModelFormatError`."""

    def scheme_of_others(self) -> str | None:
        """The scheme of ours in which the matrices of layers are read from files that say so otherwise; None for none.

        Raises `ModelFormatError` as `open_checkpoint`.
        """
        return None

    def read_bytes(self, name: str, most: int = DATA_BYTES) -> bytes:
        """The file of that name; raises `ModelFormatError` where it is missing, no regular file or too long."""
        with of_a_model():
            return self.content(name, most)

    def read_text(self, name: str, most: int = DATA_BYTES) -> str:
        """As `read_bytes`, for UTF-8 text."""
        content = self.read_bytes(name, most)
        with of_a_model():
            return as_text(content, self.place(name))

    def read_json_object(self, name: str) -> dict[str, Any]:
        """As `read_bytes`, for an object in JSON."""
        return json_object(self.read_bytes(name, CONFIG_BYTES), self.place(name))
