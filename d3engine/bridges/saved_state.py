"""How far a long run has come, in a file: what it goes on from after it was cut off."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from d3engine.files import open_regular, path_of, write_whole

State = TypeVar("State")


def write_state(path: Path, key: str, tensors: dict[str, Tensor], words: Mapping[str, str]) -> None:
    """Write the state of the run that is known by `key`."""
    write_whole(path, save(tensors, {"key": key, **words}))


def read_state(
    path: Path, key: str, read: Callable[[Callable[[str], Tensor], Mapping[str, str]], State]
) -> State | None:
    """What `read` makes of the state's tensors, by their names, and its words.

    A file of another run, or one that cannot be read or lacks something, counts as none.
    """
    try:
        with open_regular(path) as opened, safe_open(path_of(opened), framework="pt") as file:
            words = file.metadata() or {}
            return read(file.get_tensor, words) if words.get("key") == key else None
    except (SafetensorError, OSError, ValueError, KeyError, TypeError):
        return None
