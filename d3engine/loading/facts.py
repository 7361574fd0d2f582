"""What an engine says of itself: the model, the policy and the limits that hold for every request."""

from __future__ import annotations

from pathlib import Path

import torch

from d3engine.depth import DepthPolicy
from d3engine.errors import InvalidValueError
from d3engine.loading.settings import EngineSettings
from d3engine.model.config import ModelConfig
from d3engine.request.params import SamplingParams
from d3engine.text.tokenizer import Tokenizer


class EngineProperties:
    """What is known once an engine is loaded, and never changes; may be asked at any time, from any thread."""

    settings: EngineSettings
    tokenizer: Tokenizer | None
    default_sampling_params: SamplingParams

    @property
    def config(self) -> ModelConfig:
        """The model's sizes and constants."""
        return self.settings.config

    @property
    def depth(self) -> DepthPolicy:
        """The policy of requests that bring none of their own."""
        return self.settings.depth

    @property
    def device(self) -> torch.device:
        """What it runs on."""
        return self.settings.device

    @property
    def dtype(self) -> torch.dtype:
        """Of activations, norms and biases, and of cache entries that are not held in 8 bits."""
        return self.settings.dtype

    @property
    def weight_dtype(self) -> torch.dtype:
        """Of matrices that are not quantized, and of the embedding."""
        return self.settings.weight_dtype

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and answer at most."""
        return self.settings.max_model_len

    @property
    def directory(self) -> Path:
        """Where the model's files are; for a GGUF file, that file."""
        return self.settings.directory

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer, with `encode` and `decode`; raises `InvalidValueError` for an engine without one."""
        if self.tokenizer is None:
            raise InvalidValueError("skip_tokenizer_init", True, "False for get_tokenizer()")
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What requests without parameters get: generation_config.json's."""
        return self.default_sampling_params
