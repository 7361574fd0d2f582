"""PyTorch as a peer: transformers' Llama as it is, and the same one through torch.compile, step by step.

Only their forward pass is timed, without choosing a token, which is to their favour.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.systems import transformers_model
from d3engine.model.config import ModelConfig
from d3engine.model.weights import LlamaWeights

DTYPES = {"f32": torch.float32, "16-bit": torch.bfloat16}
"""The kinds of weights that a plain PyTorch model has; activations and cache are of the same type."""


class TorchPeer:
    """A model and a cache for `rows` sequences of `length` tokens.

    Args:
        compiled: run decode steps through torch.compile, which takes a minute or two the first time; over a cache of
            fixed size then, as torch.compile wants it, while without it the cache grows as transformers has it.
    """

    def __init__(
        self, directory: Path, weights: LlamaWeights, kind: str, *, compiled: bool, rows: int, length: int
    ) -> None:
        model = transformers_model(directory, ModelConfig.from_directory(directory), weights)
        self._model = model.to(DTYPES[kind])
        self._step: Callable[..., Any] = torch.compile(self._model, dynamic=False) if compiled else self._model
        self._rows, self._length, self._compiled = rows, length, compiled

    @torch.no_grad()
    def answer(self, prompts: list[list[int]], tokens: int) -> tuple[float, float]:
        """Seconds of the prompt pass, and seconds per step of the `tokens` - 1 steps after it, the same token each."""
        from transformers import DynamicCache, StaticCache

        config = self._model.config
        cache = (
            StaticCache(config=config, max_cache_len=self._length) if self._compiled else DynamicCache(config=config)
        )
        given = torch.tensor(prompts)
        length, last = given.shape[1], given[:, -1:].clone()
        start = time.perf_counter()
        self._run(self._model, given, 0, cache)
        prompt_seconds, start = time.perf_counter() - start, time.perf_counter()
        for step in range(tokens - 1):
            self._run(self._step, last, length + step, cache)
        return prompt_seconds, (time.perf_counter() - start) / max(1, tokens - 1)

    def _run(self, forward: Callable[..., Any], ids: torch.Tensor, first: int, cache: Any) -> torch.Tensor:
        """Logits [rows, 1, vocabulary] after `ids` [rows, n], which stand at positions from `first` on."""
        positions = torch.arange(first, first + ids.shape[1]).expand(self._rows, -1)
        # The cache by its place, since its name is another in transformers 5.24.
        found = forward(ids, None, positions, cache, use_cache=True, logits_to_keep=1)
        logits: torch.Tensor = found.logits
        return logits

    def close(self) -> None:
        """Drop the model, and what torch.compile made of it."""
        del self._model, self._step
        torch.compiler.reset()
