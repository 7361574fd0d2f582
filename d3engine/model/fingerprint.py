"""A short name for the weights of a model directory, by which `d3.json` says whose setting it holds.

The one idea: a few rows of every tensor are read, not the gigabytes between them. Training changes every tensor nearly
everywhere, so another training run, a fine-tune or a conversion has another fingerprint; a file in which somebody has
changed a few single values by hand may keep it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict

from d3engine.model.config import ModelConfig
from d3engine.model.expected_tensors import is_ignored_tensor
from d3engine.model.families import Multipliers
from d3engine.model.source import ModelSource, files_of

ROWS = 4
"""Rows of each tensor that count: the first, the last and those evenly between them."""

_COMPUTES = ("num_layers", "num_heads", "num_kv_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings")
"""Fields of the config, beside rope's, that change what the same tensors compute. The other sizes are their shapes."""


def fingerprint(model: ModelSource) -> str:
    """ "sha256:" and the hex SHA-256 of the config's computing fields and of every tensor's name, dtype, shape and
    `ROWS` rows, in the order of the names.

    How the tensors are spread over shards does not matter. Reads a few kilobytes a tensor: about 20 MB of a model of
    seven billion parameters. Raises `ModelFormatError` for a directory without valid config and weights.
    """
    files = files_of(model)
    config = ModelConfig.from_directory(files)
    rope = {name: value for name, value in asdict(config.rope).items() if value is not None}
    computes: list[object] = [{name: getattr(config, name) for name in _COMPUTES}, rope]
    # A plain Llama keeps the fingerprint that it had before there were any of these.
    if config.multipliers != Multipliers():
        computes.append(asdict(config.multipliers))
    if config.layers_without_rope:
        computes.append({"layers_without_rope": config.layers_without_rope})
    digest = hashlib.sha256()
    digest.update(_json(computes))
    with files.open_checkpoint() as checkpoint:
        for name in sorted(checkpoint.entries):
            if is_ignored_tensor(name):
                continue
            entry = checkpoint.entries[name]
            digest.update(_json([name, entry.dtype, entry.shape]))
            rows = entry.shape[0] if entry.shape else 0
            for row in sorted({place * (rows - 1) // (ROWS - 1) for place in range(ROWS)} if rows else ()):
                digest.update(checkpoint.read_row(name, row))
    return f"sha256:{digest.hexdigest()}"


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True).encode()
