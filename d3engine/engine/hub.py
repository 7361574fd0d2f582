"""A model by its name on the Hugging Face hub: "owner/name", or "owner/name@revision" with a branch, a tag or a commit.

A colon and a quantization behind either, "owner/name:Q4_K_M", name a GGUF file of the repository.

Huggingface_hub does the talking, so its settings hold (HF_HOME, HF_HUB_OFFLINE, HF_ENDPOINT, a token, a
proxy), and it is asked for the files that our loader opens and for no others. Code and pickled weights stay there.
"""

from __future__ import annotations

import glob
import logging
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

from d3engine.engine.gguf_choice import DEFAULT_QUANTIZATION, are_all, choose_models, gguf_models, names_of
from d3engine.errors import D3EngineError, FailedError, InvalidValueError, MissingExtraError, ModelFormatError, require
from d3engine.model.source import ADAPTER_FILE, COMPANIONS, CONFIG_FILE, adapter_options
from d3engine.utils.files import DATA_BYTES, free_bytes
from d3engine.utils.progress import hides_bars

FILES = (*COMPANIONS, "model.safetensors", "model.safetensors.index.json", "model*-of-*.safetensors")
"""What is downloaded of a repository, as far as it has it; of its folders, how embeddings are pooled."""

_NAME = re.compile(r"(?P<id>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>\w[\w./-]*))?(:(?P<quantization>\w[\w.+-]*))?", re.ASCII)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Repository:
    """A repository of the hub at a revision, None for its main branch, and the GGUF file that is wanted of it."""

    id: str
    revision: str | None
    quantization: str | None = None

    def __str__(self) -> str:
        return self.place + (f":{self.quantization}" if self.quantization else "")

    @property
    def place(self) -> str:
        """Its name without a quantization."""
        return self.id if self.revision is None else f"{self.id}@{self.revision}"

    @property
    def called(self) -> str:
        """What an error calls it."""
        return f"model {str(self)!r}"


def hub_directory(model: str | os.PathLike[str]) -> Path | None:
    """A repository's snapshot, or a GGUF file of it, in the hub's cache, downloaded as far as it is not there.

    None for no name of one. Of a GGUF file in several parts all are there, and the first is returned.

    Raises `MissingExtraError` without huggingface_hub, `InvalidValueError` for a repository or a revision that is not
    to be had, `ModelFormatError` for one whose files are no model of ours, and `FailedError` where a download fails.
    """
    name = _NAME.fullmatch(model) if isinstance(model, str) else None
    if name is None or ".." in name[0]:
        return None
    return _snapshot(Repository(name["id"], name["revision"], name["quantization"]))


@cache  # a command reads configuration, template and weights one by one, and all must be of one commit
def _snapshot(wanted: Repository) -> Path:
    try:
        from huggingface_hub import HfApi, constants, snapshot_download
    except ImportError as error:
        what = f"{wanted.called} is no directory here, and looking for it on the Hugging Face hub"
        raise MissingExtraError("huggingface_hub", "hub", what) from error
    api, seconds = HfApi(), constants.HF_HUB_ETAG_TIMEOUT
    try:
        found = api.model_info(wanted.id, revision=wanted.revision, timeout=seconds, files_metadata=True)
    except Exception as error:  # its own errors, and those of an HTTP library, which is another one by its version
        return _downloaded_before(wanted, error)
    files = {file.rfilename: file.size or 0 for file in found.siblings or ()}
    parts = _gguf_parts(wanted, files, "of this repository", is_whole=True)
    sizes = {file: size for file, size in files.items() if (file in parts if parts else _is_wanted(file))}
    if not parts:
        _check_files(wanted, sizes, is_adapter=ADAPTER_FILE in files)
    missing = _missing_bytes(wanted, found.sha, sizes)
    _check_space(wanted, missing)
    try:
        with _bars(shown=missing > 0) as bar:
            patterns = [glob.escape(file) for file in sizes]
            directory = snapshot_download(wanted.id, revision=wanted.revision, allow_patterns=patterns, tqdm_class=bar)
    except Exception as error:
        raise _refusal(wanted, error) or FailedError(
            f"{wanted.called} could not be downloaded whole from the Hugging Face hub ({_in_a_line(error)}): try "
            "again, and the files that are there already are not fetched twice"
        ) from error
    _log.info("%s: commit %s of the Hugging Face hub", wanted, found.sha)
    return Path(directory, *parts[:1])


def _gguf_parts(wanted: Repository, files: Collection[str], which: str, *, is_whole: bool = False) -> list[str]:
    """The GGUF file that is wanted of a repository with these files, all of its parts; none for safetensors.

    `which` says in errors what files these are; where a repository `is_whole`, its only one needs no name. Raises
    `InvalidValueError`, naming what there is, where a quantization stands for no file or for several.
    """
    models = gguf_models(files)
    if wanted.quantization is None and (not models or any(map(_is_weights, files))):
        return []
    if not models:
        raise InvalidValueError("model", str(wanted), f"{wanted.place}, for this repository has no GGUF files")
    chosen = choose_models(models, wanted.quantization or DEFAULT_QUANTIZATION)
    if is_whole and not chosen and wanted.quantization is None and len(models) == 1:
        chosen = list(models)
        _log.warning("%s stands for %s:%s, its only GGUF file", wanted, wanted, names_of(models)[chosen[0]])
    if len(chosen) != 1:
        named = ", ".join(sorted(names_of(chosen or models).values()))
        allowed = f"{wanted.place}:NAME with one GGUF file {which}: {named}"
        raise InvalidValueError("model", str(wanted), allowed)
    parts = models[chosen[0]]
    if not are_all(parts):
        raise ModelFormatError(f"{wanted.called} is in several parts, of which there are only {', '.join(parts)}")
    return parts


def _downloaded_before(wanted: Repository, error: Exception) -> Path:
    """What the cache has where the hub could not be asked; raises the refusal where `error` is one."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    refusal = _refusal(wanted, error)
    if refusal is not None:
        raise refusal from error
    offline = isinstance(error, OfflineModeIsEnabled)
    try:
        there = partial(snapshot_download, wanted.id, revision=wanted.revision, local_files_only=True)
        directory = Path(there(allow_patterns=[]))
        files = [file.relative_to(directory).as_posix() for file in directory.rglob("*") if file.is_file()]
        if wanted.quantization and not gguf_models(files):
            raise LocalEntryNotFoundError("no GGUF file")
        parts = _gguf_parts(wanted, files, "that was downloaded before, since the hub gives no answer")
        if not parts:
            there(allow_patterns=list(FILES))
    except LocalEntryNotFoundError:
        if offline:
            allowed = "a directory, or a model downloaded before (HF_HUB_OFFLINE is set: run it once without)"
            raise InvalidValueError("model", str(wanted), allowed) from error
        raise FailedError(
            f"{wanted.called} is no directory here, and the Hugging Face hub could not be asked for it "
            f"({_in_a_line(error)}): see to the network, the proxy or the token, or name a directory"
        ) from error
    if not offline:
        _log.warning("%s is taken as it was downloaded before: the hub gave no answer (%s)", wanted, _in_a_line(error))
    return Path(directory, *parts[:1])


def at_revision(model: str | os.PathLike[str], revision: str) -> str:
    """The name of a repository at a revision; raises `InvalidValueError` for a model that is none of the hub."""
    name, colon, quantization = model.partition(":") if isinstance(model, str) else ("", "", "")
    named = f"{name}@{revision}{colon}{quantization}"
    allowed = "None beside a model that is no 'owner/name' of the Hugging Face hub"
    require(_NAME.fullmatch(named) is not None and not Path(model).is_dir(), "revision", revision, allowed)
    return named


def _refusal(wanted: Repository, error: Exception) -> D3EngineError | None:
    """What is wrong with the name by the hub's own answer; None for an error that says nothing of it."""
    from huggingface_hub import errors

    there = "a directory, or a repository of the Hugging Face hub that is there and that you may read"
    kinds: dict[type[Exception], str] = {
        errors.GatedRepoError: "a repository that you have access to: accept its terms on its page, then log in with"
        " `hf auth login` or set HF_TOKEN",
        errors.RepositoryNotFoundError: f"{there} (a private one after `hf auth login`, or with HF_TOKEN)",
        errors.RevisionNotFoundError: "a repository with a branch, a tag or a commit of its own behind the @",
        errors.HFValidationError: f"{there} ({_in_a_line(error)})",
    }
    for kind, allowed in kinds.items():
        if isinstance(error, kind):
            return InvalidValueError("model", str(wanted), allowed)
    return None


def _is_wanted(file: str) -> bool:
    return file in COMPANIONS or ("/" not in file and any(fnmatchcase(file, pattern) for pattern in FILES))


def _is_weights(file: str) -> bool:
    return _is_wanted(file) and file.endswith(".safetensors")


def _check_files(wanted: Repository, sizes: Mapping[str, int], *, is_adapter: bool) -> None:
    """Refuse what is no model of ours, or too large to be read, before any of it is fetched."""
    has_weights = any(map(_is_weights, sizes))
    if is_adapter and not (CONFIG_FILE in sizes and has_weights):
        raise ModelFormatError(
            f"{wanted.called} is an adapter, no model: name its base model, and the adapter, downloaded, by "
            f"{adapter_options('DIRECTORY')}"
        )
    if CONFIG_FILE not in sizes:
        raise ModelFormatError(f"{wanted.called} has no {CONFIG_FILE} in its repository")
    if not has_weights:
        raise ModelFormatError(
            f"{wanted.called} has no model.safetensors in its repository, nor shards of it, and other weights are "
            "never fetched: download them yourself, and convert them with d3engine weights convert"
        )
    for file, size in sizes.items():
        if not file.endswith(".safetensors") and size > DATA_BYTES:
            raise ModelFormatError(f"{wanted.called}: {file} has {size:,} bytes, and at most {DATA_BYTES:,} are read")


def _missing_bytes(wanted: Repository, commit: str | None, sizes: Mapping[str, int]) -> int:
    """How much is still to be fetched."""
    from huggingface_hub import try_to_load_from_cache

    there = (try_to_load_from_cache(wanted.id, file, revision=commit) for file in sizes)
    return sum(size for size, path in zip(sizes.values(), there, strict=True) if not isinstance(path, str))


def _check_space(wanted: Repository, missing: int) -> None:
    from huggingface_hub.constants import HF_HUB_CACHE

    place = Path(HF_HUB_CACHE).absolute()
    free = free_bytes(place)
    if missing > free:
        raise FailedError(
            f"{wanted.called} takes {missing / 1e9:.1f} GB, and {place} has {free / 1e9:.1f} GB free: make room, or"
            " set HF_HOME to another place"
        )


@contextmanager
def _bars(shown: bool) -> Iterator[Any]:
    """A class for the library's progress bars, gone from the screen at the end; none without a terminal.

    By itself the library leaves some of them open, to be drawn again over what comes after them.
    """
    bars = import_module("huggingface_hub.utils.tqdm")  # whose class of that name hides it in `utils`

    made: list[Any] = []

    class Passing(bars.tqdm):  # type: ignore[misc, name-defined, unused-ignore]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **(options | {"leave": False}))
            made.append(self)

    hidden = not bars.are_progress_bars_disabled() and (not shown or bool(hides_bars()) or not sys.stderr.isatty())
    if hidden:
        bars.disable_progress_bars()
    try:
        yield Passing
    finally:
        for bar in made:
            bar.close()
        if hidden:
            bars.enable_progress_bars()


def _in_a_line(error: Exception) -> str:
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words[:200]}" if words else type(error).__name__
