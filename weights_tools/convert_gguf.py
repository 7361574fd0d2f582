"""Converts GGUF files of Llamas into safetensors directories.

The one idea: a GGUF file already answers as a model directory (`model/gguf_files.py`), and here that is written down.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from d3engine.errors import ModelFormatError, TokenizerError, require
from d3engine.model.checkpoint import Checkpoint
from d3engine.model.config import ModelConfig
from d3engine.model.gguf_file import open_gguf
from d3engine.model.gguf_files import GGUFFiles
from d3engine.model.model_files import CONFIG_FILE
from d3engine.text.tokenizer import load_tokenizer
from d3engine.weights_tools.writing import (
    DEFAULT_SHARD_BYTES,
    PendingTensor,
    copy_companions,
    output_directory,
    write_json,
    write_weights,
)

GGUF_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def convert_gguf(
    source: Path,
    destination: Path,
    *,
    dtype: str = "float32",
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    overwrite: bool = False,
    show_progress: bool = True,
) -> None:
    """Convert a GGUF file to a model directory, its tensors dequantized to `dtype`.

    Tokenizer, special tokens and chat template come along. Raises `ModelFormatError` for a file that is damaged or
    holds what is not supported, `InvalidValueError` for a destination in use or another dtype, and `MissingExtraError`
    without the package `gguf`.
    """
    require(dtype in GGUF_DTYPES, "dtype", dtype, f"one of {', '.join(GGUF_DTYPES)}")
    files = GGUFFiles(open_gguf(source))
    with files.open_checkpoint() as checkpoint, output_directory(destination, overwrite=overwrite) as folder:
        copy_companions(files, folder)
        write_json(folder / CONFIG_FILE, files.read_json_object(CONFIG_FILE) | {"torch_dtype": dtype})
        try:
            load_tokenizer(files)
        except TokenizerError as error:
            raise ModelFormatError(f"{source}: its tokenizer cannot be loaded: {error}") from None
        tensors = dict(_pending(checkpoint, GGUF_DTYPES[dtype]))
        config = ModelConfig.from_directory(folder)
        write_weights(folder, config, tensors, shard_bytes=shard_bytes, show_progress=show_progress)


def _pending(checkpoint: Checkpoint, dtype: torch.dtype) -> Iterator[tuple[str, PendingTensor]]:
    for name, entry in checkpoint.entries.items():
        yield name, PendingTensor(entry.file, entry.shape, dtype, partial(_read, checkpoint, name, dtype))


def _read(checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> Tensor:
    return checkpoint.read(name).to(dtype)
