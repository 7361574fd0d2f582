"""Child processes of benchmarks, which import from this checkout."""

from __future__ import annotations

import os
from pathlib import Path

from d3engine.utils.children import child_environment


def checkout_environment() -> dict[str, str]:
    """The environment of a child that imports `benchmarks`, wherever it is started."""
    environment = child_environment()
    paths = [str(Path(__file__).parent.parent), environment.get("PYTHONPATH", "")]
    return environment | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
