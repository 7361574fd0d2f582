"""A model repository for NVIDIA Triton Inference Server: three files by which its Python backend runs an engine.

`config.pbtxt` says what goes in and out, `1/model.py` names our class, `1/model.json` holds the engine's arguments as
the one of Triton's vLLM backend does. Nothing of Triton is needed to write them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from d3engine.errors import FailedError, require
from d3engine.files import naming

ARGUMENTS_FILE = "model.json"
VERSION = "1"

INPUTS = (
    ("text_input", "TYPE_STRING", False),
    ("stream", "TYPE_BOOL", True),
    ("sampling_parameters", "TYPE_STRING", True),
    ("exclude_input_in_output", "TYPE_BOOL", True),
)
"""Name, type, whether it may be absent."""

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
    """Write a model into a repository, which may hold others.

    Args:
        directory: the repository; made where it is not there.
        name: of the model in it.
        model: as for `Engine`; a path must lead to it where Triton runs.
        engine_arguments: further ones of `Engine`'s, as JSON has them; a policy as d3.json has it.
        on_gpu: whether Triton gives the model one of its GPUs.

    Returns:
        The model's directory in the repository.

    Raises:
        InvalidValueError: for a name that Triton could not have, and a model of that name that is there already.
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
    """One instance: the engine batches by itself. Decoupled: one request has as many responses as it needs."""
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
