"""Files of a model directory, or of a GGUF file that answers to the same names."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from d3engine.errors import ModelFormatError
from d3engine.model.families import BESIDE_IMAGES, family_of, text_config
from d3engine.model.fields import Fields, json_object, of_a_model, read_json_object
from d3engine.model.gguf_file import GGUFFile, open_gguf
from d3engine.model.gguf_metadata import (
    TEMPLATE,
    TEMPLATE_OF_TOOLS,
    gguf_config,
    gguf_pooling,
    gguf_sentencepiece,
    gguf_tokenizer_config,
    gguf_tokenizer_json,
    gguf_tokenizer_kind,
)
from d3engine.model.quantization_config import IntegerLayout, block_of, integer_layouts, is_fp8
from d3engine.utils.files import CONFIG_BYTES, DATA_BYTES, UnreadableFileError, as_text, beside, is_there, read_bytes

if TYPE_CHECKING:  # torch waits until weights are asked for
    from d3engine.model.checkpoint import Checkpoint

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
ADAPTER_FILE = "adapter_config.json"
"""Of PEFT: what an adapter changes in its base model."""
POOLING_FILE = "1_Pooling/config.json"
"""Of sentence-transformers: how a model's states become an embedding."""
POOLING_MODES = {"mean": "pooling_mode_mean_tokens", "last": "pooling_mode_lasttoken", "cls": "pooling_mode_cls_token"}

TOOLS_TEMPLATE_FILE = "additional_chat_templates/tool_use.jinja"
"""The template for chats with tools, as transformers 5 saves it."""

COMPANIONS = (
    CONFIG_FILE,
    GENERATION_CONFIG_FILE,
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    TOOLS_TEMPLATE_FILE,
    "prompt_form.json",
    "d3.json",
    POOLING_FILE,
)
"""The files of a model directory besides its weights: read, converted and fetched with them."""


class ModelFiles(ABC):
    """The files of one model; `path` is the directory or the file that a user named."""

    path: Path

    @abstractmethod
    def has(self, name: str) -> bool:
        """Whether there is a file of that name, be it one that cannot be read."""

    @abstractmethod
    def content(self, name: str, most: int) -> bytes:
        """The file of that name, at most `most` bytes.

        Raises `UnreadableFileError` where that cannot be had, `ModelFormatError` where it cannot be made.
        """

    @abstractmethod
    def open_checkpoint(self) -> AbstractContextManager[Checkpoint]:
        """The weights, by the names that transformers gives them; raises `ModelFormatError`."""

    def place(self, name: str) -> Path:
        """What errors call the file of that name."""
        return self.path / name

    def scheme_of_others(self) -> str | None:
        """Our scheme that holds the layer matrices of a published quantized checkpoint; None for all others.

        Raises `ModelFormatError` as `open_checkpoint`.
        """
        return None

    def byte_level_bpe(self) -> dict[str, Any] | None:
        """The parsed tokenizer.json where it is made of a header; None where there is a file of that name."""
        return None

    def packed_bytes(self) -> int | None:
        """Bytes of the weight files, where they hold matrices in blocks; None for all others."""
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


ModelSource: TypeAlias = str | Path | ModelFiles
"""A model directory, a GGUF file, or what `files_of` has made of either."""


def files_of(model: ModelSource) -> ModelFiles:
    """The files of a model.

    Raises `ModelFormatError` where there is neither a directory nor a GGUF file with a valid header, and
    `MissingExtraError` for a GGUF file without the package `gguf`.
    """
    if isinstance(model, ModelFiles):
        return model
    path = Path(model)
    if path.is_dir():
        return DirectoryFiles(path)
    if path.is_file():
        return GGUFFiles(open_gguf(path))
    raise ModelFormatError(f"{path} is neither a directory with config.json and weights nor a GGUF file")


def instead_of_a_model(directory: Path) -> str:
    """What an error adds of a directory with an adapter in place of a model; "" for all others.

    Raises `ModelFormatError` as `read_json_object`.
    """
    if not is_there(directory / ADAPTER_FILE):
        return ""
    base = read_json_object(directory / ADAPTER_FILE).get("base_model_name_or_path")
    named = f"{base!r:.200}" if isinstance(base, str) and base else "another model"
    how = adapter_options(str(directory))
    return f", but an adapter of {named} ({ADAPTER_FILE}): name that as the model, and the adapter by {how}"


def adapter_options(directory: str) -> str:
    """What names an adapter beside its base model, in words."""
    given = f"`d3engine serve --lora-modules NAME={directory}`, `--lora {directory}` of other commands"
    return f"{given}, or lora_request in Python"


def open_checkpoint(model: ModelSource) -> AbstractContextManager[Checkpoint]:
    """A block in which the tensors of a model can be read.

    Raises `ModelFormatError` as `open_safetensors` and `files_of` do. `check_tensors` compares names, shapes and dtypes
    with the config.
    """
    return files_of(model).open_checkpoint()


class DirectoryFiles(ModelFiles):
    """The files of a model directory, as they are."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def has(self, name: str) -> bool:
        return is_there(self.path / name)

    def content(self, name: str, most: int) -> bytes:
        return read_bytes(self.path / name, most)

    @contextmanager
    def open_checkpoint(self) -> Iterator[Checkpoint]:
        from d3engine.model.checkpoint_formats import fp8_checkpoint

        with self._open_safetensors() as checkpoint:
            integers, published = self._published_integers(), self._published_fp8()
            if integers:
                from d3engine.model.integer_checkpoint import integer_checkpoint

                yield integer_checkpoint(checkpoint, integers)
            else:
                yield checkpoint if published is None else fp8_checkpoint(checkpoint, block_of(published))

    def scheme_of_others(self) -> str | None:
        published = self._published_fp8()
        if published is None:
            return None
        from d3engine.model.checkpoint import INDEX_FILE, SINGLE_FILE
        from d3engine.model.checkpoint_formats import scheme_of_fp8

        if not self.has(SINGLE_FILE) and not self.has(INDEX_FILE):  # a config alone, for questions about sizes
            return None
        with self._open_safetensors() as checkpoint:
            return scheme_of_fp8(checkpoint, block_of(published))

    def packed_bytes(self) -> int | None:
        from d3engine.model.checkpoint import INDEX_FILE, SINGLE_FILE

        if not self._published_integers() or not (self.has(SINGLE_FILE) or self.has(INDEX_FILE)):
            return None
        return sum(file.stat().st_size for file in self.path.glob("*.safetensors"))

    @contextmanager
    def _open_safetensors(self) -> Iterator[Checkpoint]:
        """The files' tensors by a Llama's names."""
        from d3engine.model.checkpoint import open_safetensors
        from d3engine.model.checkpoint_formats import headed_checkpoint, renamed_checkpoint

        with open_safetensors(self.path) as checkpoint:
            if not self.has(CONFIG_FILE):
                yield checkpoint
                return
            given = self.read_json_object(CONFIG_FILE)
            text = text_config(given)
            family = family_of(Fields(text, str(self.place(CONFIG_FILE))))
            fields = Fields({**family.defaults, **text}, str(self.place(CONFIG_FILE)))
            own_names = family.own_names if text is given else BESIDE_IMAGES
            renamed = renamed_checkpoint(checkpoint, own_names, fields)
            yield headed_checkpoint(renamed, family.names, fields.boolean("tie_word_embeddings"))

    def _published_fp8(self) -> Fields | None:
        """The quantization_config, if it is that of weights in 8-bit floats."""
        fields = self._quantization()
        return None if fields is None or integer_layouts(fields) or not is_fp8(fields) else fields

    def _published_integers(self) -> tuple[IntegerLayout, ...]:
        """The layouts of published matrices of whole numbers."""
        fields = self._quantization()
        return () if fields is None else integer_layouts(fields)

    def _quantization(self) -> Fields | None:
        if not self.has(CONFIG_FILE):
            return None
        given = self.read_json_object(CONFIG_FILE).get("quantization_config")
        return Fields(given, f"{self.place(CONFIG_FILE)}: quantization_config") if isinstance(given, dict) else None


_SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.top_k": "top_k",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
"""Sampling defaults of a GGUF file's authors: its keys, and those of generation_config.json."""


class GGUFFiles(ModelFiles):
    """A GGUF file as a model directory: each file is made of the header when it is read."""

    def __init__(self, file: GGUFFile) -> None:
        self.path = file.path
        self._file = file

    def has(self, name: str) -> bool:
        if name in ("tokenizer.json", "tokenizer.model"):
            return gguf_tokenizer_kind(self._file) == name
        if name == "tokenizer_config.json":
            return gguf_tokenizer_kind(self._file) is not None
        if name == "chat_template.jinja":
            is_own = TEMPLATE in self._file.metadata
            return TEMPLATE_OF_TOOLS not in self._file.metadata if is_own else is_there(beside(self.path, name))
        if name == POOLING_FILE:
            return gguf_pooling(self._file) is not None
        return name in _MADE

    def content(self, name: str, most: int) -> bytes:
        if not self.has(name):
            raise UnreadableFileError(f"{self.path} holds nothing that would be {name} of a model directory")
        made = _MADE[name](self._file)
        if len(made) > most:
            raise UnreadableFileError(f"{self.path}: its {name} would have more than {most:,} bytes, which is the most")
        return made

    def byte_level_bpe(self) -> dict[str, Any]:
        return gguf_tokenizer_json(self._file)

    def packed_bytes(self) -> int | None:
        return self._file.nbytes

    def open_checkpoint(self) -> AbstractContextManager[Checkpoint]:
        from d3engine.model.checkpoint_formats import gguf_checkpoint

        return nullcontext(gguf_checkpoint(self._file, gguf_config(self._file)))


def _json(contents: dict[str, Any]) -> bytes:
    return json.dumps(contents, indent=2).encode() + b"\n"


def _generation_config(file: GGUFFile) -> bytes:
    config = gguf_config(file)
    ends = {name: config[name] for name in ("bos_token_id", "eos_token_id")}
    given = {name: file.metadata[key] for key, name in _SAMPLING.items() if key in file.metadata}
    # The shortest decimal of a float32: 0.2 again for what stands for 0.2.
    given = {name: float(f"{value:.7g}") if isinstance(value, float) else value for name, value in given.items()}
    own = beside(file.path, GENERATION_CONFIG_FILE)
    return _json(ends | given | (read_json_object(own) if is_there(own) else {}))


def _chat_template(file: GGUFFile) -> bytes:
    if TEMPLATE not in file.metadata:
        return read_bytes(beside(file.path, "chat_template.jinja"), CONFIG_BYTES)
    template = file.metadata[TEMPLATE]
    if not isinstance(template, str):
        file.refuse(TEMPLATE, "a string")
    return template.encode("utf-8")


_MADE: dict[str, Callable[[GGUFFile], bytes]] = {
    CONFIG_FILE: lambda file: _json(gguf_config(file)),
    GENERATION_CONFIG_FILE: _generation_config,
    "tokenizer.json": lambda file: json.dumps(gguf_tokenizer_json(file), ensure_ascii=False).encode("utf-8"),
    "tokenizer.model": gguf_sentencepiece,
    "tokenizer_config.json": lambda file: _json(gguf_tokenizer_config(file)),
    "chat_template.jinja": _chat_template,
    POOLING_FILE: lambda file: _json({POOLING_MODES[gguf_pooling(file) or "mean"]: True}),
}
