"""Observers of saved models."""

from typing import Any

import torch

from d3engine.model.config import ModelConfig
from d3engine.model.weights import load_weights
from d3engine.research.analysis.observer import Observer


def observer_of(directory: Any) -> Observer:
    config = ModelConfig.from_directory(directory)
    return Observer(config, load_weights(directory, config, dtype=torch.float32, device="cpu"))
