"""Where a model lies that a user names: a directory, the one that comes with the package, or one fetched before."""

from __future__ import annotations

import os
from pathlib import Path

from d3engine.environment import CACHE
from d3engine.errors import InvalidValueError, require

DEMO = "demo"
FETCHED = ("smollm2",)
"""The models that `d3engine weights fetch` gets, by the names that stand for them afterwards."""


def model_directory(model: str | os.PathLike[str], advice: str = "") -> Path:
    """The directory of a model: "demo" names the one that comes with the package, "smollm2" one that was fetched.

    `advice` follows what it must be where it is none.
    """
    allowed = f"a directory with a Llama model, {DEMO!r} or {', '.join(map(repr, FETCHED))}{advice}"
    require(isinstance(model, str | os.PathLike), "model", model, allowed)
    if model == DEMO:
        return Path(__file__).parents[1] / "demo_model"
    if model in FETCHED:
        directory = fetched_directory(str(model))
        if not directory.is_dir():
            raise InvalidValueError("model", model, f"fetched once before: d3engine weights fetch {model}")
        return directory
    require(Path(model).is_dir(), "model", str(model), allowed)
    return Path(model)


def fetched_directory(name: str) -> Path:
    """Where a fetched model is kept, be it there or not: in D3ENGINE_CACHE, or d3engine's part of the user's cache."""
    given = CACHE.read()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return (Path(given) if given else Path(base) / "d3engine") / "models" / name
