"""From where a model lies to its files: a directory, or a GGUF file that answers as one.

The one idea: here, and nowhere else, is it decided what a path is. Whatever reads a model takes what `files_of` takes.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from d3engine.errors import ModelFormatError
from d3engine.files import is_there, read_bytes
from d3engine.model.gguf_file import open_gguf
from d3engine.model.gguf_files import GGUFFiles
from d3engine.model.model_files import ModelFiles

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

    def open_checkpoint(self) -> AbstractContextManager[Checkpoint]:
        from d3engine.model.checkpoint import open_safetensors

        return open_safetensors(self.path)


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
