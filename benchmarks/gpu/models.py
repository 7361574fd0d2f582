"""The models of the round, with random weights, and the engines that run them.

What parts need of the engine beside its public steps is asked for here, so that its changes are followed once.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.cases import Draw
from benchmarks.gpu.common import Round
from d3engine.cli.plan import KNOWN, sizes
from d3engine.depth import DepthPolicy
from d3engine.engine.engine import Engine
from d3engine.engine.memory import named_dtype
from d3engine.kernels.kv_pool import block_bytes
from d3engine.kernels.weight_format import WeightFormat
from d3engine.model.config import ModelConfig
from d3engine.model.source import CONFIG_FILE
from d3engine.model.weights import LlamaWeights, in_layout, quantize_weights, random_weights
from d3engine.request.params import SamplingParams
from d3engine.utils.environment import KERNELS, PROGRAMMATIC_LAUNCH

TINY = sizes(64, 96, 8, 4, 2) | {"vocab_size": 256, "max_position_embeddings": 256}
SHAPES: dict[str, dict[str, Any]] = {
    "llama2-7b": KNOWN["llama-2-7b"],
    "llama3-8b": KNOWN["llama-3-8b"] | {"rope_theta": 500000.0},
}

GRAPH_FIGURES = (
    "executor",
    "graphs_captured",
    "graph_capture_seconds",
    "graph_memory_bytes",
    "graph_steps",
    "eager_steps",
)
BLOCK_SIZE = 16


@dataclass(frozen=True, eq=False)
class Model:
    """A random model: its directory (nothing but a config.json), weights, its cache, and what of them a step reads."""

    name: str
    scheme: str  # "bf16" (float32 in a rehearsal), one of QUANTIZATION_SCHEMES, or a type of blocks
    directory: Path
    config: ModelConfig
    weights: LlamaWeights
    kv_cache_dtype: str = "auto"

    @property
    def entry_bytes(self) -> int:
        """Bytes of a token's keys and values in a layer, with their scales if they have any."""
        dtype = named_dtype(self.kv_cache_dtype, self.weights.final_norm.dtype)
        return block_bytes(1, self.config.num_kv_heads, self.config.head_dim, dtype)

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's weights."""
        values = (getattr(self.weights.layers[0], field.name) for field in fields(self.weights.layers[0]))
        return sum(value.nbytes for value in values if value is not None)

    @property
    def head_bytes(self) -> int:
        """Bytes of the final norm and the LM head; the rows of the embedding that a step reads are not counted."""
        return self.weights.final_norm.nbytes + self.weights.lm_head.nbytes

    def card(self) -> dict[str, Any]:
        """What the figures of this model depend on."""
        return {
            "name": self.name,
            "scheme": self.scheme,
            "layers": self.config.num_layers,
            "layer_bytes": self.layer_bytes,
            "head_bytes": self.head_bytes,
            "kv_bytes_a_token_and_layer": self.entry_bytes,
        }


@contextmanager
def random_model(name: str, current: Round) -> Iterator[Model]:
    """A model of a named shape in the round's dtype; in a rehearsal a tiny one under that name."""
    shape = SHAPES[name] if current.on_gpu else TINY
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        (directory / CONFIG_FILE).write_text(json.dumps({"model_type": "llama"} | shape), encoding="utf-8")
        config = ModelConfig.from_directory(directory)
        weights = random_weights(config, dtype=current.dtype, device=current.device, seed=0)
        scheme = "bf16" if current.dtype == torch.bfloat16 else str(current.dtype).removeprefix("torch.")
        yield Model(name, scheme, directory, config, weights)


def quantized(model: Model, scheme: str) -> Model:
    """The same model with weights quantized by one of QUANTIZATION_SCHEMES."""
    return Model(model.name, scheme, model.directory, model.config, quantize_weights(model.weights, scheme))


def in_blocks(model: Model, type_name: str, current: Round) -> Model:
    """A model of the same sizes whose matrices are random blocks of a type."""
    draw = Draw(current)
    weights = in_layout(model.weights, lambda matrix: draw.matrix(matrix.shape[0], matrix.shape[1], type_name))
    return replace(model, scheme=type_name, weights=weights)


def dequantized(weights: LlamaWeights) -> LlamaWeights:
    """The matrices that quantized weights stand for, in the dtype of their norms; others as they are."""
    dtype = weights.final_norm.dtype

    def plain(value: Any) -> Any:
        return value.dequantize(dtype) if isinstance(value, WeightFormat) else value

    def of(part: Any) -> dict[str, Any]:
        return {field.name: plain(getattr(part, field.name)) for field in fields(part) if field.name != "layers"}

    layers = [replace(layer, **of(layer)) for layer in weights.layers]
    return replace(weights, **of(weights), layers=layers)


def with_8_bit_cache(model: Model) -> Model:
    """The same model over cache entries of 8 bits; its scheme says so."""
    return replace(model, scheme=f"{model.scheme}, fp8 cache", kv_cache_dtype="fp8")


def new_engine(
    model: Model, current: Round, *, max_num_seqs: int, max_model_len: int, kv_tokens: int, **options: Any
) -> Engine:
    """An engine whose cache holds `kv_tokens` tokens at full depth, run the way that the round's mode says."""
    if current.leaves_out("no-pdl"):
        os.environ[PROGRAMMATIC_LAUNCH.name] = "off"
    if current.leaves_out("reference"):
        os.environ[KERNELS.name] = "reference"
    num_blocks = model.config.num_layers * -(-kv_tokens // BLOCK_SIZE)
    return Engine(
        model.directory,
        weights=model.weights,
        device=current.device,
        dtype=current.dtype,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        block_size=BLOCK_SIZE,
        kv_cache_dtype=model.kv_cache_dtype,
        kv_cache_memory_bytes=num_blocks * BLOCK_SIZE * model.entry_bytes,
        enable_prefix_caching=False,
        enforce_eager=current.leaves_out("eager"),
        skip_tokenizer_init=True,
        **options,
    )


def graph_figures(engine: Engine) -> dict[str, Any]:
    """What the engine tells of how it decodes, and of its CUDA graphs: all 0 without any."""
    stats = engine.stats()
    return {name: getattr(stats, name) for name in GRAPH_FIGURES}


def params_for(depth: DepthPolicy, num_tokens: int) -> SamplingParams:
    """Greedy, to exactly a given number of tokens."""
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, depth=depth)
