"""An engine whose model says what a test wants; see `tests/support/scripted.py`.
As in all such files, what imports Triton waits for a fixture: `tests/conftest.py` first says how Triton is to run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from scripted import Scripts

    from d3engine import Engine
    from d3engine.model.weights import LlamaWeights


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from scripted import CONFIG

    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture(scope="session")
def weights(directory: Path) -> LlamaWeights:
    import torch

    from d3engine.model.config import ModelConfig
    from d3engine.model.weights import random_weights

    return random_weights(ModelConfig.from_directory(directory), dtype=torch.float32, device="cpu", seed=0)


@pytest.fixture
def make_engine(directory: Path, weights: LlamaWeights) -> Callable[..., Engine]:
    from scripted import DEMO, Scripted

    from d3engine import Engine

    def make(scripts: Scripts | None = None, **changes: Any) -> Engine:
        arguments: dict[str, Any] = {"weights": weights, "tokenizer": DEMO, "max_num_seqs": 8, "device": "cpu"}
        arguments["enforce_eager"] = True  # what is scripted is told of every step
        engine = Engine(directory, **(arguments | changes))
        engine.executor = Scripted(scripts or {})  # type: ignore[assignment]
        return engine

    return make


@pytest.fixture
def engine(make_engine: Callable[..., Engine]) -> Engine:
    return make_engine()
