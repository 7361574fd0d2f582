"""How many threads PyTorch computes with while an engine works."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from d3engine.model.config import ModelConfig

WEIGHTS_PER_PYTORCH_THREAD = 2**20
"""Weights of a layer that are worth a thread: 4 MiB of float32, which one core reads in about half a millisecond."""


def pytorch_threads_for(config: ModelConfig, most: int) -> int:
    """How many threads of PyTorch suit a model: at least one and at most `most`."""
    return max(1, min(most, config.layer_parameters // WEIGHTS_PER_PYTORCH_THREAD))


@contextmanager
def pytorch_threads(most: int) -> Iterator[None]:
    """Let PyTorch compute with at most so many threads in this block, and afterwards with as many as before.

    The number is the calling thread's, but for what PyTorch's other threads start with and the number of MKL.
    """
    before = torch.get_num_threads()
    if before <= most:
        yield
        return
    try:
        torch.set_num_threads(most)
        yield
    finally:
        torch.set_num_threads(before)
