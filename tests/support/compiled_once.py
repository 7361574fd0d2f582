"""A program that prints how many kernels an engine's start loads, and which later steps load further ones.
Kernels are compiled for a GPU that is not there, and a driver counts what it is given to load; nothing is computed.
Arguments: the directory of a model, what `warm_up` is, and those of a draft model and of an adapter, "" for none."""

import json
import sys

import torch

from benchmarks.gpu import absent

absent.install()
torch.empty = torch.zeros  # logits that no kernel writes are finite

from pathlib import Path  # noqa: E402 (the driver comes first)

from d3engine import D3, Engine, SamplingParams, Speculative  # noqa: E402
from d3engine.engine import resolve  # noqa: E402
from d3engine.engine.settings import EngineSettings  # noqa: E402
from d3engine.kernels.target import TARGETS  # noqa: E402
from d3engine.kernels.triton import launches  # noqa: E402
from d3engine.model.config import ModelConfig  # noqa: E402
from d3engine.model.weights import random_weights  # noqa: E402

launches._target = lambda device: TARGETS[90]  # torch knows of no device
launches.PROGRAMMATIC = True
resolve.executor_for = lambda *given: "graphs"  # type: ignore[assignment]
resolve.resolve_backend = lambda *given: "triton"
EngineSettings.warms_up = property(lambda settings: settings.warm_up)  # type: ignore[assignment]

MOST = 80
_, target, warm_up, draft, adapter = sys.argv
config = ModelConfig.from_directory(Path(target))
engine = Engine(
    target,
    weights=random_weights(config, dtype=torch.bfloat16, device="cpu", seed=3),
    depth=Speculative(draft, 3) if draft else D3(0.5, 0.5),
    dtype="bfloat16",
    max_num_seqs=4,
    max_num_batched_tokens=MOST,
    enable_prefix_caching=False,
    device="cpu",
    skip_tokenizer_init=True,
    warm_up=json.loads(warm_up),
    lora_modules={"own": adapter} if adapter else None,
)
utils = absent._Driver.utils
at_start = utils.loaded
ways = [SamplingParams(temperature=0), SamplingParams(temperature=1), SamplingParams(temperature=1, top_p=0.9)]
ways.append(SamplingParams(temperature=1, top_p=0.9, repetition_penalty=1.1))
batches = [[rows] for rows in range(1, MOST + 1)] + [[1, 2], [1, 1, 1], [3, 70, 1, 9], [90, 5], [20, 20, 20, 20]]
later = {}
own = "own" if adapter else None
for nth, lengths in enumerate(batches):
    before = utils.loaded
    engine.generate([[1] * length for length in lengths], ways[nth % 4], use_tqdm=False, lora_request=own)
    if utils.loaded > before:
        later[str(lengths)] = utils.loaded - before
stats = engine.stats()
print(json.dumps({"start": at_start, "later": later, "steps": [stats.eager_steps, stats.graph_steps]}))
