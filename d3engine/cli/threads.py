"""How many CPU threads a command computes with.

The one idea: threads that wait for each other after every small product cost more than they bring, above all where the
cores are busy; so a small model gets one, and a large one as many as PyTorch would take and the process may use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from d3engine.errors import InvalidValueError, require_integer

if TYPE_CHECKING:
    from d3engine.model.config import ModelConfig

AUTO = "auto"
WEIGHTS_PER_THREAD = 2**20
"""Weights of a layer that are worth a thread: 4 MiB of float32, which one core reads in about half a millisecond."""
MOST = 1024


def read_threads(given: str) -> int | None:
    """The number after `--threads`; None for "auto"."""
    if given == AUTO:
        return None
    if not given.isascii() or not given.isdecimal():
        raise InvalidValueError("--threads", given, f"{AUTO!r}, or an integer from 1 to {MOST}")
    return require_integer("--threads", int(given), 1, MOST)


def threads_for(config: ModelConfig, most: int) -> int:
    """How many threads suit a model: one for so many weights of a layer, at least one and at most `most`."""
    return max(1, min(most, config.layer_parameters // WEIGHTS_PER_THREAD))


def use_threads(given: str, config: ModelConfig, spare_cores: int = 0) -> None:
    """Let PyTorch compute with that many threads from now on.

    "auto" never takes more than it would by itself or the process may use, less the cores that are to be spared.
    """
    import torch

    from d3engine.loading.host_cpus import usable_cpus

    most = max(1, min(torch.get_num_threads(), usable_cpus()) - spare_cores)
    torch.set_num_threads(read_threads(given) or threads_for(config, most))
