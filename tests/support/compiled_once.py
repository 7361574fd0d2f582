"""A program that prints how many kernels an engine's start loads, and which later steps load further ones.
Kernels are compiled for a GPU that is not there, and a driver counts what it is given to load; nothing is computed.
Arguments: the directory of a model, and JSON of `Case`."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import torch

from benchmarks.gpu import absent

absent.install()
torch.empty = torch.zeros  # logits that no kernel writes are finite

from pathlib import Path  # noqa: E402 (the driver comes first)

from d3engine import Engine, SamplingParams  # noqa: E402
from d3engine.depth import policy_from_dict  # noqa: E402
from d3engine.engine import resolve  # noqa: E402
from d3engine.engine.settings import EngineSettings  # noqa: E402
from d3engine.kernels.target import TARGETS  # noqa: E402
from d3engine.kernels.triton import launches  # noqa: E402
from d3engine.model.config import ModelConfig  # noqa: E402
from d3engine.model.weights import random_weights  # noqa: E402

launches._target = lambda device: TARGETS[90]  # torch knows of no device
launches.PROGRAMMATIC = True
resolve.resolve_backend = lambda *given: "triton"
EngineSettings.warms_up = property(lambda settings: settings.warm_up)  # type: ignore[assignment]

MOST = 80
EVERY = [[rows] for rows in range(1, MOST + 1)] + [[1, 2], [1, 1, 1], [3, 70, 1, 9], [90, 5], [20, 20, 20, 20]]


@dataclass
class Case:
    """An engine and its requests."""

    depth: dict[str, Any] = field(default_factory=lambda: {"policy": "d3", "alpha": 0.5, "start": 0.5})
    engine: dict[str, Any] = field(default_factory=dict)
    loads: list[str] = field(default_factory=list)  # directories of adapters that are loaded while the engine runs
    adapters: list[str | None] = field(default_factory=lambda: [None])  # of the requests, in turn
    asks: list[dict[str, Any] | None] = field(default_factory=lambda: [None])  # their policies; None: the engine's
    batches: list[list[int]] = field(default_factory=lambda: EVERY)


_, target, given = sys.argv
case = Case(**json.loads(given))
kind = "eager" if case.engine.get("enforce_eager") else "graphs"
resolve.executor_for = lambda *given: kind  # type: ignore[assignment]
config = ModelConfig.from_directory(Path(target))
engine = Engine(
    target,
    weights=random_weights(config, dtype=torch.bfloat16, device="cpu", seed=3),
    depth=policy_from_dict(case.depth),
    dtype="bfloat16",
    max_num_batched_tokens=MOST,
    enable_prefix_caching=False,
    device="cpu",
    skip_tokenizer_init=True,
    **({"max_num_seqs": 4} | case.engine),
)
utils = absent._Driver.utils
found: dict[str, Any] = {"start": utils.loaded}
ways: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1}, {"temperature": 1, "top_p": 0.9}]
ways.append({"temperature": 1, "top_p": 0.9, "repetition_penalty": 1.1})


def loaded_by(call: Callable[[], object]) -> int:
    """How many kernels a call loads."""
    before = utils.loaded
    call()
    return utils.loaded - before


def params_of(way: int, asked: dict[str, Any] | None) -> SamplingParams:
    depth = None if asked is None else policy_from_dict(asked)
    return SamplingParams(depth=depth, **ways[way])


found["loads"] = [loaded_by(partial(engine.load_lora_adapter, Path(path).name, path)) for path in case.loads]
found["asks"] = [loaded_by(partial(engine.prepare, [1], params_of(0, asked))) for asked in case.asks]
found["later"] = {}
for adapter, asked, (nth, lengths) in product(case.adapters, case.asks, enumerate(case.batches)):
    prompts = [[1] * length for length in lengths]
    own = {"use_tqdm": False, "lora_request": adapter}
    if loaded := loaded_by(partial(engine.generate, prompts, params_of(nth % 4, asked), **own)):
        found["later"][f"{adapter} {asked} {lengths}"] = loaded
stats = engine.stats()
print(json.dumps(found | {"steps": [stats.eager_steps, stats.graph_steps]}))
