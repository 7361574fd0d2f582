"""How many CPU threads a command computes with.

The one idea: threads wait for each other after every product. Those of the native library lose so little by it that
two serve the smallest model, and their neighbours on a busy machine cost them no more than one; PyTorch's lose more
than they bring by it while products are small, and nearly everything where the cores are busy. So a model's size
decides, for each of them by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from d3engine.errors import InvalidValueError, require_integer

if TYPE_CHECKING:
    from d3engine.model.config import ModelConfig

AUTO = "auto"
WEIGHTS_PER_NATIVE_THREAD = 2**18
"""Weights of a layer that are worth a native thread from the third on; two are worth it with fewer for each."""
MOST = 1024


def read_threads(given: str) -> int | None:
    """The number after `--threads`; None for "auto"."""
    if given == AUTO:
        return None
    if not given.isascii() or not given.isdecimal():
        raise InvalidValueError("--threads", given, f"{AUTO!r}, or an integer from 1 to {MOST}")
    return require_integer("--threads", int(given), 1, MOST)


def native_threads_for(config: ModelConfig, most: int) -> int:
    """How many threads of the native library suit a model: at least two, and at most `most`."""
    return min(most, max(2, config.layer_parameters // WEIGHTS_PER_NATIVE_THREAD))


def use_threads(given: str, config: ModelConfig, spare_cores: int = 0) -> int:
    """Let PyTorch compute with that many threads from now on; how many the native library is to have.

    "auto" never takes more than PyTorch would by itself or the process may use, less the cores that are to be spared.
    """
    import torch

    from d3engine.loading.host_cpus import usable_cpus
    from d3engine.loading.pytorch_threads import pytorch_threads_for

    asked = read_threads(given)
    most = max(1, min(torch.get_num_threads(), usable_cpus()) - spare_cores)
    torch.set_num_threads(asked or pytorch_threads_for(config, most))
    return asked or native_threads_for(config, most)
