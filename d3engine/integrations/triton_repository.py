"""A model repository of NVIDIA Triton, whose Python backend runs an engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from d3engine.errors import FailedError, require
from d3engine.utils.files import naming

ARGUMENTS_FILE = "model.json"
VERSION = "1"

INPUTS = (
    ("text_input", "TYPE_STRING", False),
    ("stream", "TYPE_BOOL", True),
    ("sampling_parameters", "TYPE_STRING", True),
    ("exclude_input_in_output", "TYPE_BOOL", True),
)
"""Name, type, whether it is optional."""

OUTPUTS = (
    ("text_output", "TYPE_STRING"),
    ("finish_reason", "TYPE_STRING"),
    ("num_output_tokens", "TYPE_UINT32"),
    ("token_ids", "TYPE_INT32"),
    ("depths", "TYPE_INT32"),
)

MODEL_PY = '''"""Written by `d3engine integrations triton-repository`."""

from d3engine.integrations.triton_model import TritonPythonModel

__all__ = ["TritonPythonModel"]
'''


def write_triton_repository(
    directory: Path, name: str, model: str, engine_arguments: Mapping[str, Any], *, on_gpu: bool = False
) -> Path:
    """Write a model into a repository, which may have others: config.pbtxt, 1/model.py and 1/model.json.

    Args:
        directory: the repository; created if it does not exist.
        name: of the model in it.
        model: as for `Engine`; a path must be valid where Triton runs.
        engine_arguments: further arguments of `Engine`, as JSON; a policy as in d3.json.
        on_gpu: whether Triton gives the model one of its GPUs.

    Returns:
        The model's directory in the repository.

    Raises:
        InvalidValueError: for a name that Triton does not allow, and for one that exists already.
        FailedError: where it cannot be written.
    """
    fits = name.isascii() and name.replace("_", "").replace("-", "").replace(".", "").isalnum() and name[0] != "."
    require(fits, "name", name, "letters, digits, and . _ - between them")
    target = directory / name
    require(not target.exists(), "name", name, f"new in the repository; {target} exists")
    try:
        version = target / VERSION
        version.mkdir(parents=True)
        arguments = {"model": model, **engine_arguments}
        files = {
            version / "model.py": MODEL_PY,
            version / ARGUMENTS_FILE: json.dumps(arguments, indent=2) + "\n",
            target / "config.pbtxt": _config(name, "KIND_GPU" if on_gpu else "KIND_CPU"),
        }
        for file, content in files.items():
            with naming(file):
                file.write_text(content)
    except OSError as error:
        raise FailedError(f"cannot write {error.filename}: {error.strerror}") from None
    return target


def _config(name: str, kind: str) -> str:
    """One instance, as the engine batches; decoupled, as a request may have several responses."""
    inputs = [
        f'  {{ name: "{field}" data_type: {type_} dims: [ 1 ]{" optional: true" if optional else ""} }}'
        for field, type_, optional in INPUTS
    ]
    outputs = [f'  {{ name: "{field}" data_type: {type_} dims: [ -1 ] }}' for field, type_ in OUTPUTS]
    lines = [
        f'name: "{name}"',
        'backend: "python"',
        "max_batch_size: 0",
        "model_transaction_policy { decoupled: true }",
        "input [",
        ",\n".join(inputs),
        "]",
        "output [",
        ",\n".join(outputs),
        "]",
        f"instance_group [ {{ count: 1 kind: {kind} }} ]",
    ]
    return "\n".join(lines) + "\n"
