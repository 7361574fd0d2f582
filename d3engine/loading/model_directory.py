"""Where a model lies that a user names: a directory, or the one that comes with the package."""

from __future__ import annotations

import os
from pathlib import Path

from d3engine.errors import require

DEMO = "demo"


def model_directory(model: str | os.PathLike[str]) -> Path:
    """The directory of a model; "demo" names the one that comes with the package."""
    allowed = f"a directory with a Llama model, or {DEMO!r}"
    require(isinstance(model, str | os.PathLike), "model", model, allowed)
    directory = Path(__file__).parents[1] / "demo_model" if model == DEMO else Path(model)
    require(directory.is_dir(), "model", str(model), allowed)
    return directory
