"""A program that compiles launches as the GPU round does, and prints how many kernels are compiled when they run."""

import json
import os
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.gpu import absent, compiled
from d3engine.kernels.target import TARGETS

absent.install()

import d3engine.kernels.triton as kernels  # noqa: E402 (the driver comes first)
from d3engine.kernels.quantized import quantize_int8  # noqa: E402
from d3engine.kernels.triton import launches, operations  # noqa: E402

launches._target = lambda device: TARGETS[90]  # torch knows of no device
launches.PROGRAMMATIC = True
folder = Path(os.environ["TRITON_CACHE_DIR"])


def num_compiled() -> int:
    return len(list(folder.rglob("*.cubin")))


def run() -> None:
    x, hidden = torch.zeros(1, 64, dtype=torch.bfloat16), torch.zeros(1, 64, dtype=torch.bfloat16)
    kernels.linear_residual(x, quantize_int8(torch.randn(64, 64)), None, hidden)
    kernels.rms_norm(x, torch.ones(64, dtype=torch.bfloat16), 1e-5)
    pool, queries = torch.zeros(9, 2, 16, 2, 16, dtype=torch.bfloat16), torch.zeros(1, 4, 16, dtype=torch.bfloat16)
    tables = torch.arange(9).view(1, 1, 9)
    kernels.paged_attention(queries, pool, kernels.attention_inputs([0, 1], [140], tables)[0], 0.25)


found: list[launches.Launch] = []
with patch.object(launches.Launch, "run", lambda launch: found.append(launch)):
    run()
operations.forget()
for launch in found:
    given = {name: value.to("meta") if isinstance(value, Tensor) else value for name, value in launch.arguments.items()}
    compiled._works[:] = [(replace(launch, arguments=given), 90, True)]
    assert compiled._compile(0)[1] is None
launches.PROGRAMMATIC = True
before = num_compiled()
run()
print(json.dumps({"launches": len(found), "before": before, "after": num_compiled()}))
