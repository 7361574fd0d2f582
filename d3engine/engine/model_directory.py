"""Where a model lies that a user names: each kind of name is an entry of `KINDS`, and the
first that knows a name says where its files are."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from d3engine.engine.gguf_choice import DEFAULT_QUANTIZATION, choose_models, gguf_models
from d3engine.engine.hub import hub_directory
from d3engine.errors import InvalidValueError, ModelFormatError, require, require_integer
from d3engine.model.config import ModelConfig, load_generation_config, not_applied
from d3engine.model.gguf_file import is_gguf
from d3engine.model.rope_config import QUERY_SCALING
from d3engine.model.source import CONFIG_FILE, GENERATION_CONFIG_FILE, POOLING_FILE, POOLING_MODES, files_of
from d3engine.request.params import CHAT_DEFAULTS, SamplingParams
from d3engine.utils.environment import CACHE

_log = logging.getLogger(__name__)


def default_sampling_params(directory: Path) -> SamplingParams:
    """What generation_config.json asks for, as vLLM reads it: greedy when it says `do_sample: false`.

    A warning names the keys that change an answer in transformers and are not applied here.
    Raises `ModelFormatError`, naming the file, for a value that `SamplingParams` refuses.
    """
    defaults: dict[str, Any] = load_generation_config(directory)
    defaults.pop("eos_token_ids", None)
    if ignored := not_applied(directory):
        named = ", ".join(f"{name}={value!r:.60}" for name, value in ignored.items())
        _log.warning("%s: these are not applied: %s", directory / GENERATION_CONFIG_FILE, named)
    if "max_new_tokens" in defaults:
        defaults["max_tokens"] = defaults.pop("max_new_tokens")
    if defaults.pop("do_sample", True) is False:
        for name in ("top_p", "top_k", "min_p"):
            defaults.pop(name, None)
        defaults["temperature"] = 0.0
    try:
        return SamplingParams(**defaults)
    except InvalidValueError as error:
        raise ModelFormatError(f"{directory / GENERATION_CONFIG_FILE}: {error}") from None


def model_files(directory: Path) -> list[Path]:
    """The files of a model: those of a directory, or the one of a GGUF file."""
    return sorted(path for path in directory.iterdir() if path.is_file()) if directory.is_dir() else [directory]


def own_pooling(directory: Path) -> str | None:
    """How the model's files say that embeddings are pooled, as sentence-transformers and llama.cpp write it; None
    where they do not. Raises `ModelFormatError` for another way than one of `POOLINGS`."""
    files = files_of(directory)
    if not files.has(POOLING_FILE):
        return None
    found = files.read_json_object(POOLING_FILE)
    modes = {name.removeprefix("pooling_mode_") for name, is_on in found.items() if "_mode_" in name and is_on is True}
    for pooling, name in POOLING_MODES.items():
        if modes == {name.removeprefix("pooling_mode_")}:
            return pooling
    allowed = " or ".join(f'"{name}": true' for name in POOLING_MODES.values())
    raise ModelFormatError(f"{files.place(POOLING_FILE)} must hold one of {allowed}; got {', '.join(sorted(modes))}")


def chat_defaults(directory: Path) -> Mapping[str, float]:
    """With what to sample a chat of a model whose own files do not say it. Raises `ModelFormatError`."""
    named = {"do_sample", "temperature", "top_p", "top_k", "min_p"} & load_generation_config(directory).keys()
    return {} if named else CHAT_DEFAULTS


def resolve_max_model_len(max_model_len: int | None, config: ModelConfig) -> int:
    """The most tokens of prompt and answer; beyond the positions that the model was made for only with dynamic rope.

    None is the model's own length, its `longest_text`, or the trained length of a longrope. Raises `InvalidValueError`
    for a length beyond the first two.
    """
    longest = config.longest_text
    if max_model_len is None:
        return config.default_length
    limit = None if config.rope.rope_type == "dynamic" else config.max_length
    length = require_integer("max_model_len", max_model_len, 2, limit)
    if longest is not None and longest < length:
        beyond = f"max_model_len={length} (max_model_len={longest} is what can be run)"
        if (beta := config.rope.query_scaling) is not None:
            raise InvalidValueError(f"{CONFIG_FILE}: {QUERY_SCALING}", beta, f"absent for {beyond}")
        raise InvalidValueError(f"{CONFIG_FILE}: sliding_window", longest, f"null or at least {beyond}")
    return length


DEMO = "demo"
FETCHED: Mapping[str, str | None] = {
    "smollm2": None,
    "qwen2.5-coder-0.5b": "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    "qwen2.5-coder-1.5b": "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
}
"""The models that `d3engine weights fetch` gets, by the names that stand for them afterwards.

A name stands for a GGUF file in its folder, or for the folder itself.
"""

Name = str | os.PathLike[str]
"""What a user names a model by. A path is a place; only a str can be a name that stands for another one."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of name: how it reads in an error, and where the model lies; None for a name of another kind."""

    in_words: str
    directory: Callable[[Name], Path | None]


def model_directory(model: Name, advice: str = "") -> Path:
    """Where a model lies, its directory or GGUF file, whatever kind of name `KINDS` has for it; the hub's is downloaded
    where it must be.

    Raises `InvalidValueError` for what no kind knows; `advice` follows what it must be then.
    """
    *kinds, last = (kind.in_words for kind in KINDS)
    allowed = f"{', '.join(kinds)} or {last}{advice}"
    require(isinstance(model, str | os.PathLike), "model", model, allowed)
    try:
        for kind in KINDS:
            found = kind.directory(model)
            if found is not None:
                return found
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:  # of a prompt in the place of the model
            raise
    raise InvalidValueError("model", str(model), allowed)


def fetched_directory(name: str) -> Path:
    """Where a fetched model is kept, be it there or not: in D3ENGINE_CACHE, or d3engine's part of the user's cache."""
    given = CACHE.read()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return (Path(given) if given else Path(base) / "d3engine") / "models" / name


def fetched_model(name: str) -> Path:
    """What the name of a fetched model stands for, be it there or not: its directory, or the GGUF file in it."""
    return fetched_directory(name) / (FETCHED[name] or "")


def _bundled(model: Name) -> Path | None:
    return Path(__file__).parents[1] / "demo_model" if model == DEMO else None


def _fetched(model: Name) -> Path | None:
    if model not in FETCHED:
        return None
    place = fetched_model(str(model))
    if not place.exists():
        raise InvalidValueError("model", model, f"fetched once before: d3engine weights fetch {model}")
    return place


def _existing(model: Name) -> Path | None:
    path = Path(model)
    if not str(model) or not path.is_dir():  # Path("") would be the current directory
        return None
    models = gguf_models(file.name for file in path.glob("*.gguf"))
    if not models or any(path.glob("model*.safetensors*")):  # others may be a GGUF file's student or bridges
        return path
    # The rule of a repository of the hub, of which such folders are copies.
    chosen = list(models) if len(models) == 1 else choose_models(models, DEFAULT_QUANTIZATION)
    allowed = f"one of the GGUF files in this folder: {', '.join(parts[0] for parts in models.values())}"
    require(len(chosen) == 1, "model", str(model), allowed)
    return path / models[chosen[0]][0]


def _gguf(model: Name) -> Path | None:
    path = Path(model)
    # Of which no other kind has anything to say, but of a file behind the name of a repository.
    if path.suffix == ".gguf" and ":" not in path.name and not path.exists():
        raise InvalidValueError("model", str(model), "a GGUF file that is there")
    return path if is_gguf(path) else None


KINDS = (
    Kind(repr(DEMO), _bundled),
    Kind(", ".join(map(repr, FETCHED)), _fetched),
    Kind("a GGUF file", _gguf),
    Kind("a directory with a Llama model", _existing),
    Kind("'owner/name' of the Hugging Face hub", hub_directory),
)


def holds_eagle3(given: str) -> bool:
    """Whether `given` names a directory with an EAGLE-3 head; False where it names none at all."""
    from d3engine.model.eagle3 import is_eagle3  # which needs torch

    try:
        return is_eagle3(model_directory(given))
    except InvalidValueError:
        return False
