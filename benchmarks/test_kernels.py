"""The reference kernels of one layer on the CPU, at the demo model's and at the 349 M benchmark model's shape.

A group holds the parts of one layer at one shape and number of rows, so that they show what a layer's time is made of;
rms_norm stands beside torch's own.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor

from benchmarks.systems import RANDOM_MODELS
from d3engine import kernels
from d3engine.engine.model_directory import model_directory
from d3engine.model.config import ModelConfig
from d3engine.model.llama import Llama, Rope
from d3engine.model.source import CONFIG_FILE
from d3engine.model.weights import LlamaWeights, random_weights

CPU = torch.device("cpu")
BLOCK_SIZE, CONTEXT = 16, 144
KERNELS: Any = kernels.for_device(CPU)


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer of a model, and a batch of sequences that each decode one token at the same context."""

    config: ModelConfig
    weights: LlamaWeights
    model: Llama
    hidden: Tensor
    rotations: Tensor
    pool: Tensor
    entries: Tensor
    attention: Any

    def run(self, part: str) -> None:
        """Run one part, or the "whole layer"; what that adds to `hidden` at every call is bounded by the norms."""
        config, weights, hidden = self.config, self.weights.layers[0], self.hidden
        eps, rows = config.rms_norm_eps, hidden.shape[0]
        if part == "whole layer":
            self.model.layer(0, hidden, self.rotations, self.pool, self.entries, self.attention)
        elif part == "qkv":
            self.model.project(0, hidden, self.rotations, self.pool, self.entries)
        elif part == "paged_attention":
            queries = hidden.new_ones(rows, config.num_heads, config.head_dim)
            KERNELS.paged_attention(queries, self.pool, self.attention, config.head_dim**-0.5)
        elif part == "linear_residual (output)":
            KERNELS.linear_residual(hidden.new_zeros(rows, config.q_size), weights.output, None, hidden)
        elif part == "gate_up":
            KERNELS.gate_up(hidden, weights.mlp_norm, eps, weights.gate_up, None)
        elif part == "linear_residual (down)":
            KERNELS.linear_residual(hidden.new_zeros(rows, config.intermediate_size), weights.down, None, hidden)
        else:
            self.model.logits(hidden)


PARTS = ["qkv", "paged_attention", "linear_residual (output)", "gate_up", "linear_residual (down)", "whole layer"]


def config_of(shape: str) -> dict[str, Any]:
    if shape in RANDOM_MODELS:
        return {"model_type": "llama", **RANDOM_MODELS[shape]}
    config: dict[str, Any] = json.loads((model_directory(shape) / CONFIG_FILE).read_text(encoding="utf-8"))
    return config


@cache
def layer_of(shape: str, rows: int) -> Layer:
    config = ModelConfig.from_dict(config_of(shape) | {"num_hidden_layers": 1})
    weights = random_weights(config, dtype=torch.float32, device=CPU, seed=0)
    blocks = CONTEXT // BLOCK_SIZE
    tables = torch.arange(rows * blocks).view(1, rows, blocks)
    last = torch.full((rows,), CONTEXT - 1)
    keys = tables[0, :, -1] * 2 * BLOCK_SIZE + last % BLOCK_SIZE
    return Layer(
        config=config,
        weights=weights,
        model=Llama(config, weights, KERNELS),
        hidden=torch.randn(rows, config.hidden_size, generator=torch.Generator().manual_seed(0)),
        rotations=Rope(config, CONTEXT, CPU).rotations(last),
        pool=torch.randn(rows * blocks, 2, BLOCK_SIZE, config.num_kv_heads, config.head_dim),
        entries=torch.stack((keys, keys + BLOCK_SIZE), dim=-1),
        attention=KERNELS.attention_inputs(list(range(rows + 1)), [CONTEXT] * rows, tables)[0],
    )


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("shape", ["demo", "large"])
def test_layer(benchmark: BenchmarkFixture, shape: str, rows: int, part: str) -> None:
    benchmark.group = f"one layer, {shape}, {rows} rows, context {CONTEXT}"
    layer = layer_of(shape, rows)
    with torch.inference_mode():
        benchmark(layer.run, part)


@pytest.mark.parametrize("shape", ["demo", "large"])
@pytest.mark.parametrize("rows", [1, 8])
def test_head(benchmark: BenchmarkFixture, shape: str, rows: int) -> None:
    benchmark.group = f"lm_head, {rows} rows"
    layer = layer_of(shape, rows)
    with torch.inference_mode():
        benchmark(layer.run, "lm_head")


@pytest.mark.parametrize("implementation", [KERNELS.rms_norm, F.rms_norm], ids=["ours", "torch"])
@pytest.mark.parametrize("width", [128, 1024])
def test_rms_norm(benchmark: BenchmarkFixture, width: int, implementation: Any) -> None:
    benchmark.group = f"rms_norm, 1 row of {width}"
    hidden, weight = torch.randn(1, width), torch.ones(width)
    arguments = (hidden, weight, 1e-5) if implementation is KERNELS.rms_norm else (hidden, (width,), weight, 1e-5)
    with torch.inference_mode():
        benchmark(implementation, *arguments)
