"""The parts that every model of an engine has, be it the one that answers or one that drafts for it."""

from __future__ import annotations

from d3engine.cache.kv_cache import KVCache
from d3engine.executor.bridging import BridgeStore
from d3engine.executor.eager import EagerExecutor
from d3engine.loading.device import kernels_for
from d3engine.loading.settings import EngineSettings
from d3engine.model.config import ModelConfig
from d3engine.model.parallel import Ranks
from d3engine.model.weights import LlamaWeights


def new_cache(settings: EngineSettings, config: ModelConfig, num_blocks: int) -> KVCache:
    """A cache of `num_blocks` blocks for a model of `config`."""
    return KVCache(
        num_layers=config.num_layers,
        num_blocks=num_blocks,
        block_size=settings.block_size,
        max_sequences=settings.max_num_seqs,
        max_length=settings.max_model_len,
    )


def eager_executor(
    settings: EngineSettings,
    config: ModelConfig,
    weights: LlamaWeights,
    num_blocks: int,
    ranks: Ranks | None = None,
    bridges: BridgeStore | None = None,
) -> EagerExecutor:
    """What runs a model of `config`, or with `ranks` a part of one, step by step, over a pool of `num_blocks`."""
    # The native library runs everything by itself there, and its sums have one order.
    by_kernels = settings.batch_invariant and settings.executor != "native"
    return EagerExecutor(
        config,
        weights,
        num_blocks=num_blocks,
        block_size=settings.block_size,
        max_model_len=settings.max_model_len,
        dtype=settings.dtype,
        kv_dtype=settings.kv_cache_dtype,
        device=settings.device,
        kernels=kernels_for(settings.device, batch_invariant=by_kernels),
        tells_prompts=by_kernels,
        ranks=ranks,
        bridges=bridges,
    )
