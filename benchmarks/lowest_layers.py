"""A model made of another's lowest layers: the plainest draft model there is where no second one was trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from d3engine.engine.model_directory import model_directory


def save_lowest_layers(model: str, count: int, directory: Path) -> Path:
    """Write the `count` lowest layers of `model` with its embedding, final norm and LM head as a model of its own.

    `model` has its weights in one file. Its tokenizer comes along, so that an engine can see that both have the same.
    """
    source = model_directory(model)
    directory.mkdir(parents=True)
    config = json.loads((source / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"num_hidden_layers": count}))
    for name in ("tokenizer.model", "tokenizer_config.json"):
        shutil.copy(source / name, directory / name)
    weights = load_file(source / "model.safetensors")
    gone = tuple(f"model.layers.{layer}." for layer in range(count, config["num_hidden_layers"]))
    save_file({name: weights[name] for name in weights if not name.startswith(gone)}, directory / "model.safetensors")
    return directory
