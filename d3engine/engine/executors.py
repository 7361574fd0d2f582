"""Chooses the executor: CUDA graphs on a GPU, the native library on a CPU, or a call an
operation. Asked when arguments are read and when the weights are there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import cache, partial, reduce

import torch
from torch import Tensor

from d3engine.depth.policy import MAX_DRAFT_LENGTH
from d3engine.depth.schedule import AUTO_BRIDGES
from d3engine.engine.device import check_fp8_products, refuse_backend, settle_programmatic_launch
from d3engine.engine.memory import num_blocks
from d3engine.engine.settings import EngineSettings, ExecutorKind
from d3engine.errors import require
from d3engine.executor.adapters import AdapterStore
from d3engine.executor.bridging import BridgeStore
from d3engine.executor.cuda_graph import GraphExecutor
from d3engine.executor.eager import EagerExecutor
from d3engine.executor.graph_shapes import CudaGraphs, Repeats
from d3engine.executor.interface import Executor
from d3engine.executor.memory import workspace_bytes
from d3engine.executor.native import NativeExecutor
from d3engine.kernels import for_device
from d3engine.kernels.bfloat16_pairs import in_pairs
from d3engine.kernels.blocks import blocks_in_lanes
from d3engine.kernels.interleaved import in_lanes
from d3engine.kernels.matrices import Weight
from d3engine.kernels.native.bf12 import packed
from d3engine.kernels.native.library import LibraryMissing, isas_here, reads_interleaved
from d3engine.kernels.native.model import NativeError
from d3engine.kernels.quantized import for_fp8_rows
from d3engine.kernels.target import target_of
from d3engine.model.config import ModelConfig
from d3engine.model.shard import Ranks
from d3engine.model.weights import LlamaWeights
from d3engine.scheduling.kv_cache import KVCache
from d3engine.utils.environment import NATIVE_ISA

NOWHERE = torch.device("meta")
"""For who checks requests and computes none: bridges are read and looked at, and take neither memory nor a device."""


def bridge_store(settings: EngineSettings, device: torch.device | None = None) -> BridgeStore:
    """Those beside the weights, and those that the engine's own policy names, on `device` or where the weights are;
    none where there are several ranks, which have no way yet to get them."""
    allowed = settings.own_bridges | {AUTO_BRIDGES} if settings.tensor_parallel_size == 1 else frozenset()
    return BridgeStore(
        settings.directory,
        settings.config,
        dtype=settings.dtype,
        weight_dtype=settings.weight_dtype,
        device=settings.device if device is None else device,
        allowed=allowed,
    )


def adapter_store(settings: EngineSettings, device: torch.device | None = None) -> AdapterStore:
    """The LoRA adapters of an engine, those of its arguments loaded, on `device` or where the weights are."""
    absent = None if settings.tensor_parallel_size == 1 else "tensor_parallel_size is above 1"
    store = AdapterStore(
        settings.config,
        dtype=_dtype_of_maps(settings),
        device=settings.device if device is None else device,
        max_rank=settings.max_lora_rank,
        most=settings.max_loras,
        absent=absent,
    )
    modules = settings.lora_modules or {}
    assert isinstance(modules, Mapping), "its check keeps a mapping"
    for name, path in modules.items():
        store.load(name, path)
    return store


def _dtype_of_maps(settings: EngineSettings) -> torch.dtype | None:
    """The dtype of adapters' values; None: as stored."""
    asked = settings.lora_dtype
    if settings.kernels == "triton":
        own = str(settings.dtype).removeprefix("torch.")
        require(asked in ("auto", own), "lora_dtype", asked, f"auto or {own}, as activations are on this backend")
        return settings.dtype
    if asked != "auto":
        return getattr(torch, asked)  # type: ignore[no-any-return]
    is_narrow = settings.keeps_blocks or settings.config.quantization or settings.weight_dtype != torch.float32
    return torch.float16 if is_narrow and settings.dtype == torch.float32 else None


def matrix_form(settings: EngineSettings) -> Callable[[Weight], Weight] | None:
    """What makes of a matrix the form that it is held in; None: all stay as they are.

    On a CPU bfloat16 is packed where the user asks for it (`kernels/bf12.py`), and int8 and int4 lie in lanes where
    the native library reads them so (`kernels/interleaved.py`). On a GPU 8-bit floats are those that rows of such
    floats meet, where the user asks for it and the device passes a trial.
    """
    changes: list[Callable[[Weight], Weight]] = []
    if settings.weight_compression == "bf12":
        changes.append(packed)
    if settings.executor == "native" and reads_interleaved(NATIVE_ISA.read()):
        changes.append(in_lanes)
    if settings.activations == "int8":
        changes.append(blocks_in_lanes)
    if settings.activations == "bfloat16":
        changes.append(in_pairs)
    if settings.activations == "fp8":
        check_fp8_products(settings.device, settings.dtype)
        changes.append(partial(for_fp8_rows, dtype=settings.dtype, target=target_of(settings.device)))
    return (lambda matrix: reduce(lambda held, change: change(held), changes, matrix)) if changes else None


_log = logging.getLogger(__name__)


def executor_for(device: torch.device, dtype: torch.dtype, enforce_eager: bool, backend: str) -> ExecutorKind:
    """The executor for activations of `dtype` on `device`, by `backend`."""
    if enforce_eager:
        return "eager"
    if device.type == "cuda":
        return "eager" if backend == "torch" else "graphs"  # plain PyTorch asks the device for numbers: no graph can
    if backend not in ("auto", "native") or dtype != torch.float32:
        return "eager"
    missing = _what_is_missing()
    if missing is not None and backend == "native":
        refuse_backend(backend, f"another than native, since {missing}")
    return "eager" if missing else "native"


@cache
def _what_is_missing() -> str | None:
    """Why the native library cannot run here, None if it can; said once in a process, with what that costs."""
    try:
        isas_here()
    except LibraryMissing as error:
        _log.warning("decoding takes several times longer than it could on this CPU: %s", error)
        return str(error)
    return None


def build_executor(
    settings: EngineSettings,
    weights: LlamaWeights,
    num_blocks: int,
    ranks: Ranks | None = None,
    bridges: BridgeStore | None = None,
) -> Executor:
    """The executor of these settings over a pool of `num_blocks` blocks; with `ranks`, of one of them.

    `bridges` has those that plans name.
    """
    eager = eager_executor(settings, settings.config, weights, num_blocks, ranks, bridges, takes_adapters=ranks is None)
    eager.stats.backend = settings.kernels
    if settings.executor == "native":
        return _native(settings, eager)
    begins_early = False
    if settings.device.type == "cuda" and settings.kernels == "triton":  # the trial comes before any capture
        graphs = partial(CudaGraphs, settings.device)
        new_recorder = graphs if settings.executor == "graphs" else Repeats
        begins_early = settle_programmatic_launch(settings.device, new_recorder)
    executor: Executor = eager if settings.executor == "eager" else graph_executor(settings, eager)
    executor.stats.executor += ", programmatic launch" if begins_early else ""
    return executor


def room(settings: EngineSettings, build: Callable[[int], Executor], draft: ModelConfig | None) -> int:
    """Blocks for what `build` makes, beside weights, steps and a `draft` model; on GPUs all ranks measure together."""

    def workspace() -> int:
        return workspace_bytes(
            build,
            settings.scheduler_config,
            num_layers=settings.config.num_layers,
            block_size=settings.block_size,
            free_bytes=lambda: torch.cuda.mem_get_info(settings.device)[0],
        )

    return num_blocks(settings, workspace, draft)


VERIFIED_ROWS = 64
"""Rows at most of a graph that leaves the choice of tokens to the host: products of more go to the matrix library."""


def draft_rows(settings: EngineSettings) -> int:
    """Rows of such a graph where the engine's policy drafts by the text; 0 where no graph runs steps of drafts."""
    rule = settings.depth.draft_rule(settings.config.num_layers)
    if rule is None or not rule.is_by_text or settings.tensor_parallel_size > 1:  # other ranks know of no drafts
        return 0
    return min(settings.max_num_seqs * (rule.length + 1), VERIFIED_ROWS)


def graph_executor(settings: EngineSettings, eager: EagerExecutor, *, is_draft: bool = False) -> GraphExecutor:
    """CUDA graphs over the model and the pool of `eager`, which may be those of a draft model."""
    graphs = GraphExecutor(
        eager,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=settings.max_model_len,
        max_steps=MAX_DRAFT_LENGTH if is_draft else settings.num_scheduler_steps,
        logit_rows=draft_rows(settings),
        is_draft=is_draft,
    )
    depth, num_layers = settings.depth, settings.config.num_layers
    rule = depth.draft_rule(num_layers)
    decodes = depth.exit_rule(num_layers) is None if rule is None else rule.model is not None
    graphs.expect(depth.schedule(num_layers) if decodes else None)
    return graphs


def _native(settings: EngineSettings, eager: EagerExecutor) -> Executor:
    isa = NATIVE_ISA.read()
    require(isa == "auto" or isa in isas_here(), NATIVE_ISA.name, isa, f"auto, or one of {', '.join(isas_here())} here")
    try:
        return native_executor(settings, eager)
    except NativeError as error:
        require(not settings.batch_invariant, "batch_invariant", True, f"False here, since {error}")
        if settings.backend == "native":
            refuse_backend("native", f"another than native, since {error}")
        _log.warning("decoding by PyTorch alone, which takes several times longer: %s", error)
        return eager


def native_executor(
    settings: EngineSettings, eager: EagerExecutor, head_tokens: Tensor | None = None
) -> NativeExecutor:
    """The native library over the model and the pool of `eager`; raises `NativeError` for what it does not know."""
    return NativeExecutor(
        eager,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=settings.max_model_len,
        max_steps=settings.num_scheduler_steps,
        num_threads=settings.num_threads,
        isa=NATIVE_ISA.read(),
        head_tokens=head_tokens,
    )


def new_cache(settings: EngineSettings, config: ModelConfig, num_blocks: int) -> KVCache:
    """A cache of `num_blocks` blocks for a model of `config`."""
    return KVCache(
        num_layers=config.num_layers,
        num_blocks=num_blocks,
        block_size=settings.block_size,
        max_sequences=settings.max_num_seqs,
        max_length=settings.max_model_len,
        windows=config.windows,
    )


def eager_executor(
    settings: EngineSettings,
    config: ModelConfig,
    weights: LlamaWeights,
    num_blocks: int,
    ranks: Ranks | None = None,
    bridges: BridgeStore | None = None,
    *,
    takes_adapters: bool = False,
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
        kv_dtype=settings.kv_dtype,
        device=settings.device,
        kernels=for_device(settings.device, settings.kernels, batch_invariant=by_kernels),
        tells_prompts=by_kernels,
        ranks=ranks,
        bridges=bridges,
        adapter_slots=(settings.max_num_seqs, settings.max_lora_rank) if takes_adapters else None,
    )
