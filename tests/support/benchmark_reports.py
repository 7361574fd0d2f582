"""Reports of benchmarks, as their --json writes them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def report_of(main: Callable[[list[str]], int | None], folder: Path, *arguments: str) -> dict[str, Any]:
    """The report that a benchmark writes into a folder; it must end well."""
    file = folder / "report.json"
    assert not main([*arguments, f"--json={file}"])
    found: dict[str, Any] = json.loads(file.read_text())
    return found
