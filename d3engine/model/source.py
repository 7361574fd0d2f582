"""From where a model lies to its files: a directory, or a GGUF file that answers as one.

The one idea: here, and nowhere else, is it decided what a path is. Whatever reads a model takes what `files_of` takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from d3engine.errors import ModelFormatError
from d3engine.files import is_there, read_bytes
from d3engine.model.fields import Fields
from d3engine.model.fp8_config import block_of, is_fp8
from d3engine.model.gguf_file import open_gguf
from d3engine.model.gguf_files import GGUFFiles
from d3engine.model.model_files import CONFIG_FILE, ModelFiles

if TYPE_CHECKING:  # torch waits until weights are asked for
    from d3engine.model.checkpoint import Checkpoint

ModelSource: TypeAlias = str | Path | ModelFiles
"""A model directory, a GGUF file, or what `files_of` has made of either."""


class DirectoryFiles(ModelFiles):
    """The files of a model directory, as they are."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def has(self, name: str) -> bool:
        return is_there(self.path / name)

    def place(self, name: str) -> Path:
        return self.path / name

    def content(self, name: str, most: int) -> bytes:
        return read_bytes(self.path / name, most)

    @contextmanager
    def open_checkpoint(self) -> Iterator[Checkpoint]:
        from d3engine.model.checkpoint import open_safetensors
        from d3engine.model.fp8_tensors import own_form_of_fp8

        with open_safetensors(self.path) as checkpoint:
            published = self._published_fp8()
            yield checkpoint if published is None else own_form_of_fp8(checkpoint, block_of(published))

    def scheme_of_others(self) -> str | None:
        published = self._published_fp8()
        if published is None:
            return None
        from d3engine.model.checkpoint import INDEX_FILE, SINGLE_FILE, open_safetensors
        from d3engine.model.fp8_tensors import scheme_of_fp8

        if not self.has(SINGLE_FILE) and not self.has(INDEX_FILE):  # a config alone, of which sizes are asked
            return None
        with open_safetensors(self.path) as checkpoint:
            return scheme_of_fp8(checkpoint, block_of(published))

    def _published_fp8(self) -> Fields | None:
        """The quantization_config, if it is that of weights in 8-bit floats."""
        if not self.has(CONFIG_FILE):
            return None
        given = self.read_json_object(CONFIG_FILE).get("quantization_config")
        if not isinstance(given, dict):
            return None
        fields = Fields(given, f"{self.place(CONFIG_FILE)}: quantization_config")
        return fields if is_fp8(fields) else None


def files_of(model: ModelSource) -> ModelFiles:
    """The files of the model that lies there.

    Raises `ModelFormatError` where there is neither a directory nor a GGUF file whose header can be believed, and
    `MissingExtraError` for a GGUF file without the package that reads those.
    """
    if isinstance(model, ModelFiles):
        return model
    path = Path(model)
    if path.is_dir():
        return DirectoryFiles(path)
    if path.is_file():
        return GGUFFiles(open_gguf(path))
    raise ModelFormatError(f"{path} is neither a directory with config.json and weights nor a GGUF file")


def open_checkpoint(model: ModelSource) -> AbstractContextManager[Checkpoint]:
    """The weights of a model: a block in which its tensors can be read.

    Raises `ModelFormatError` as `open_safetensors` and `files_of` do. Which tensors there must be, of which shapes and
    dtypes, is `check_tensors`' business.
    """
    return files_of(model).open_checkpoint()
