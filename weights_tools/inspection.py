"""Looks at a model directory: `inspect_model` shows what is in it, `verify_model` runs every check of the
loader.

The one idea: both go through the loader's own reading and checking code, one tensor at a time, so that a
directory that verifies is one that loads, in little memory. (Not named inspect.py: scripts of this folder run
with it first on the path, where that name would hide the standard library's.)
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch
from rich.console import Group
from rich.table import Table
from rich.text import Text
from tqdm import tqdm

from d3engine.model.checkpoint import Checkpoint, TensorEntry, open_checkpoint
from d3engine.model.config import ModelConfig, load_generation_config
from d3engine.model.expected_tensors import SCALES, check_tensors, check_values, expected_tensors, held_dtype

_LAYER = re.compile(r"\blayers\.\d+\.")


def inspect_model(directory: Path) -> Group:
    """Return a table of the configuration and one of the tensors, layers summed up, for rich to print.

    Reads headers only. Raises `ModelFormatError` for a directory whose files cannot be read; tensors that do
    not fit the configuration are shown as they are (`verify_model` checks them).
    """
    config = ModelConfig.from_directory(directory)
    with open_checkpoint(directory) as checkpoint:
        return Group(_config_table(config, checkpoint), _tensor_table(checkpoint))


def verify_model(directory: Path, *, show_progress: bool = True) -> None:
    """Raise `ModelFormatError` unless configuration, names, shapes and values are all fit for `load_weights`.

    Values are checked as the engine would hold them: in the configuration's dtype, or the file's where it
    names none.
    """
    config = ModelConfig.from_directory(directory)
    load_generation_config(directory)
    dtype = getattr(torch, config.dtype) if config.dtype else None
    with open_checkpoint(directory) as checkpoint:
        check_tensors(checkpoint, config)
        entries = [checkpoint.entries[name] for name in expected_tensors(config)]
        total = sum(entry.nbytes for entry in entries)
        disable = None if show_progress else True
        with tqdm(total=total, desc="verifying", unit="B", unit_scale=True, disable=disable) as progress:
            for entry in entries:
                tensor = checkpoint.read(entry.name)
                check_values(entry, tensor, tensor.to(held_dtype(entry, dtype or tensor.dtype)))
                checkpoint.give_back(entry.name)
                progress.update(entry.nbytes)


def kv_bytes_per_token(config: ModelConfig, bytes_per_value: int) -> int:
    """Bytes of keys and values that one token occupies over all layers at full depth."""
    return 2 * config.num_layers * config.kv_size * bytes_per_value


def _config_table(config: ModelConfig, checkpoint: Checkpoint) -> Table:
    table = Table(show_header=False, title="configuration", title_justify="left")
    entries = checkpoint.entries.values()
    in_files = max((entry.bytes_per_value for entry in entries if not entry.name.endswith(SCALES)), default=2)
    itemsize = getattr(torch, config.dtype).itemsize if config.dtype else in_files
    rope = config.rope
    factor = "" if rope.factor is None else f" x{rope.factor:g}"
    rows = {
        "layers": f"{config.num_layers}",
        "hidden / intermediate": f"{config.hidden_size:,} / {config.intermediate_size:,}",
        "heads / kv heads x size": f"{config.num_heads} / {config.num_kv_heads} x {config.head_dim}",
        "vocabulary": f"{config.vocab_size:,}" + (" (tied)" if config.tie_word_embeddings else ""),
        "positions": f"{config.max_position_embeddings:,}",
        "rope": f"{rope.rope_type}{factor}, theta {rope.theta:g}",
        "dtype": config.dtype or "not given",
        "bos / eos": f"{config.bos_token_id} / {', '.join(map(str, config.eos_token_ids)) or None}",
        "quantization": config.quantization or "none",
        "parameters": f"{_num_parameters(config, checkpoint):,}",
        "file bytes": f"{sum(entry.nbytes for entry in entries):,}",
        "KV bytes a token": f"{kv_bytes_per_token(config, itemsize):,} ({8 * itemsize}-bit)",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _num_parameters(config: ModelConfig, checkpoint: Checkpoint) -> int:
    """What the files hold; of a quantized model, what the float model held: scales are no parameters."""
    if config.quantization is None:
        return sum(entry.num_values for entry in checkpoint.entries.values())
    shapes = expected_tensors(replace(config, quantization=None)).values()
    return sum(prod(shape) for shape in shapes)


@dataclass
class _TensorGroup:
    """Tensors of one name, shape and dtype over all layers."""

    first: TensorEntry
    count: int = 0
    nbytes: int = 0
    values: int = 0

    def add(self, entry: TensorEntry) -> None:
        self.count += 1
        self.nbytes += entry.nbytes
        self.values += entry.num_values


def _tensor_table(checkpoint: Checkpoint) -> Table:
    groups: dict[tuple[str, tuple[int, ...], str], _TensorGroup] = {}
    for entry in checkpoint.entries.values():
        name = _LAYER.sub("layers.*.", entry.name)
        groups.setdefault((name, entry.shape, entry.dtype), _TensorGroup(entry)).add(entry)
    table = Table(title="tensors", title_justify="left")
    table.add_column("name", overflow="fold")
    for column in ("count", "shape", "dtype", "values", "bytes"):
        table.add_column(column, justify="right")
    for (name, shape, dtype), group in sorted(groups.items()):
        # Text, not markup: a name comes from the file and may hold brackets or control characters.
        table.add_row(
            Text(name),
            f"{group.count}",
            " x ".join(map(str, shape)),
            dtype,
            f"{group.values:,}",
            f"{group.nbytes:,}",
        )
    return table
