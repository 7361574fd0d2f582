"""A GGUF file that answers as a model directory: each file of one is made of the header when it is asked for.

The one idea: nothing is unpacked anywhere. Converting a GGUF file writes down what is read here, so a model is the same
from either.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from d3engine.errors import ModelFormatError, must_be
from d3engine.files import UnreadableFileError
from d3engine.model.gguf_config import gguf_config
from d3engine.model.gguf_file import GGUFFile
from d3engine.model.gguf_tokenizer import (
    gguf_sentencepiece,
    gguf_tokenizer_config,
    gguf_tokenizer_json,
    gguf_tokenizer_kind,
)
from d3engine.model.model_files import ModelFiles

if TYPE_CHECKING:  # torch waits until weights are asked for
    from d3engine.model.checkpoint import Checkpoint

_TEMPLATE = "tokenizer.chat_template"
_SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.top_k": "top_k",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
"""What the authors of a file sample with, in the words of generation_config.json."""


class GGUFFiles(ModelFiles):
    """The model of one GGUF file of an architecture that runs."""

    def __init__(self, file: GGUFFile) -> None:
        self.path = file.path
        self._file = file

    def has(self, name: str) -> bool:
        if name in ("tokenizer.json", "tokenizer.model"):
            return gguf_tokenizer_kind(self._file) == name
        if name == "tokenizer_config.json":
            return gguf_tokenizer_kind(self._file) is not None
        if name == "chat_template.jinja":
            return _TEMPLATE in self._file.metadata
        return name in _MADE

    def place(self, name: str) -> Path:
        return self.path / name

    def content(self, name: str, most: int) -> bytes:
        if not self.has(name):
            raise UnreadableFileError(f"{self.path} holds nothing that would be {name} of a model directory")
        made = _MADE[name](self._file)
        if len(made) > most:
            raise UnreadableFileError(f"{self.path}: its {name} would have more than {most:,} bytes, which is the most")
        return made

    def open_checkpoint(self) -> AbstractContextManager[Checkpoint]:
        from d3engine.model.gguf_tensors import gguf_checkpoint

        return nullcontext(gguf_checkpoint(self._file, gguf_config(self._file)))


def _json(contents: dict[str, Any]) -> bytes:
    return json.dumps(contents, indent=2).encode() + b"\n"


def _config(file: GGUFFile) -> bytes:
    return _json(gguf_config(file))


def _generation_config(file: GGUFFile) -> bytes:
    config = gguf_config(file)
    ends = {name: config[name] for name in ("bos_token_id", "eos_token_id")}
    given = {name: file.metadata[key] for key, name in _SAMPLING.items() if key in file.metadata}
    # Of the float32 that stands for 0.2 the shortest decimal: 0.2 again.
    return _json(
        ends | {name: float(f"{value:.7g}") if isinstance(value, float) else value for name, value in given.items()}
    )


def _tokenizer_config(file: GGUFFile) -> bytes:
    return _json(gguf_tokenizer_config(file))


def _chat_template(file: GGUFFile) -> bytes:
    template = file.metadata[_TEMPLATE]
    if not isinstance(template, str):
        raise ModelFormatError(must_be(f"{file.path}: {_TEMPLATE}", template, "a string"))
    return template.encode("utf-8")


_MADE: dict[str, Callable[[GGUFFile], bytes]] = {
    "config.json": _config,
    "generation_config.json": _generation_config,
    "tokenizer.json": gguf_tokenizer_json,
    "tokenizer.model": gguf_sentencepiece,
    "tokenizer_config.json": _tokenizer_config,
    "chat_template.jinja": _chat_template,
}
