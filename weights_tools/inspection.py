"""Inspection of a model from headers, and verification by the checks of the loader."""

# Not inspect.py: scripts of this folder, first on their path, would import it for the standard library's.
from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from d3engine.engine.model_directory import default_sampling_params
from d3engine.model.checkpoint import SCALES, Checkpoint, TensorEntry
from d3engine.model.config import ModelConfig
from d3engine.model.expected_tensors import check_tensors, check_values, expected_tensors, held_dtype
from d3engine.model.source import files_of, open_checkpoint
from d3engine.model.weights import byte_progress
from d3engine.text.chat_template import load_chat_template
from d3engine.text.tokenizer import load_tokenizer

TENSOR_COLUMNS = ("name", "count", "shape", "dtype", "values", "bytes")
_SIZES = (
    *("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size"),
    *("tie_word_embeddings", "max_position_embeddings"),
)
_LAYER = re.compile(r"\blayers\.\d+\.")


@dataclass
class TensorGroup:
    """Tensors of one name, shape and dtype over all layers: how many, their values and bytes together."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    count: int = 0
    values: int = 0
    nbytes: int = 0

    def add(self, entry: TensorEntry) -> None:
        self.count += 1
        self.values += entry.num_values
        self.nbytes += entry.nbytes

    def row(self) -> tuple[str, ...]:
        """The columns `TENSOR_COLUMNS` as text."""
        shape = " x ".join(map(str, self.shape))
        return self.name, f"{self.count}", shape, self.dtype, f"{self.values:,}", f"{self.nbytes:,}"


@dataclass(frozen=True)
class Inspection:
    """The configuration, sizes and tensors of a model directory."""

    facts: dict[str, Any]
    groups: list[TensorGroup]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**self.facts, "tensors": [asdict(group) for group in self.groups]}

    def configuration(self) -> list[tuple[str, str]]:
        """Rows of a table of config.json and sizes."""
        facts = self.facts
        scheme = facts["quantization"]
        factor = "" if facts["rope_factor"] is None else f" x{facts['rope_factor']:g}"
        rows = {
            "layers": f"{facts['num_layers']}",
            "hidden / intermediate": f"{facts['hidden_size']:,} / {facts['intermediate_size']:,}",
            "heads / kv heads x size": f"{facts['num_heads']} / {facts['num_kv_heads']} x {facts['head_dim']}",
            "vocabulary": f"{facts['vocab_size']:,}" + (" (tied)" if facts["tie_word_embeddings"] else ""),
            "positions": f"{facts['max_position_embeddings']:,}",
            "rope": f"{facts['rope_type']}{factor}, theta {facts['rope_theta']:g}",
            "dtype": facts["dtype"] or "not given",
            "bos / eos": f"{facts['bos_token_id']} / {', '.join(map(str, facts['eos_token_ids'])) or None}",
            "quantization": ", ".join(facts["packed_types"]) or "none"
            if scheme is None
            else f"{scheme}, LM head {facts['lm_head_quantization'] or 'float'}",
            "parameters": f"{facts['num_parameters']:,}",
            "file bytes": f"{facts['file_bytes']:,}",
            "KV bytes per token": f"{facts['kv_bytes_per_token']:,} ({8 * facts['bytes_per_kv_value']}-bit)",
        }
        return list(rows.items())

    def tensors(self) -> list[tuple[str, ...]]:
        """Rows of a table with the columns `TENSOR_COLUMNS`, summed over layers."""
        return [group.row() for group in self.groups]


def inspect_model(directory: Path) -> Inspection:
    """The contents of a model directory, from headers only.

    Raises `ModelFormatError` for a directory whose files cannot be read; tensors that do not fit the configuration
    are shown unchecked (`verify_model` checks them).
    """
    config = ModelConfig.from_directory(directory)
    with open_checkpoint(directory) as checkpoint:
        return Inspection(_facts(config, checkpoint), _tensor_groups(checkpoint))


def verify_model(directory: Path, *, show_progress: bool = True) -> None:
    """Raise `ModelFormatError` unless an engine would load the model: configuration, tensors and their values, and
    tokenizer and chat template where there is a tokenizer.

    Reads one tensor at a time. Values are checked in the configuration's dtype, or the file's where it names none.
    """
    config = ModelConfig.from_directory(directory)
    default_sampling_params(directory)
    files = files_of(directory)
    if files.has("tokenizer.json") or files.has("tokenizer.model"):
        load_tokenizer(files)
        load_chat_template(files)
    dtype = getattr(torch, config.dtype) if config.dtype else None
    with files.open_checkpoint() as checkpoint:
        check_tensors(checkpoint, config)
        entries = [checkpoint.entries[name] for name in expected_tensors(config)]
        total = sum(entry.nbytes for entry in entries)
        with byte_progress(total, "verifying", show_progress) as progress:
            for entry in entries:
                tensor = checkpoint.read(entry.name)
                check_values(entry, tensor, tensor.to(held_dtype(entry, dtype or tensor.dtype)))
                checkpoint.give_back(entry.name)
                progress.update(entry.nbytes)


def _facts(config: ModelConfig, checkpoint: Checkpoint) -> dict[str, Any]:
    entries = checkpoint.entries.values()
    in_files = max((entry.bytes_per_value for entry in entries if not entry.name.endswith(SCALES)), default=2)
    itemsize = getattr(torch, config.dtype).itemsize if config.dtype else in_files
    return {
        **{name: getattr(config, name) for name in _SIZES},
        "rope_type": config.rope.rope_type,
        "rope_factor": config.rope.factor,
        "rope_theta": config.rope.theta,
        "dtype": config.dtype,
        "bos_token_id": config.bos_token_id,
        "eos_token_ids": list(config.eos_token_ids),
        "quantization": config.quantization,
        "packed_types": sorted({entry.packed.name for entry in entries if entry.packed and len(entry.shape) == 2}),
        "lm_head_quantization": config.head_quantization,
        "num_parameters": _num_parameters(config, checkpoint),
        "file_bytes": sum(entry.nbytes for entry in entries),
        "kv_bytes_per_token": 2 * config.num_layers * config.kv_size * itemsize,  # at full depth
        "bytes_per_kv_value": itemsize,
    }


def _num_parameters(config: ModelConfig, checkpoint: Checkpoint) -> int:
    """Values in the files; for a quantized model those of the float model, as scales are no parameters."""
    if config.quantization is None:
        return sum(entry.num_values for entry in checkpoint.entries.values())
    shapes = expected_tensors(config.quantized(None)).values()
    return sum(prod(shape) for shape in shapes)


def _tensor_groups(checkpoint: Checkpoint) -> list[TensorGroup]:
    groups: dict[tuple[str, tuple[int, ...], str], TensorGroup] = {}
    for entry in checkpoint.entries.values():
        name = _LAYER.sub("layers.*.", entry.name)
        group = TensorGroup(name, entry.shape, entry.type_name)
        groups.setdefault((name, entry.shape, entry.type_name), group).add(entry)
    return [groups[key] for key in sorted(groups)]
