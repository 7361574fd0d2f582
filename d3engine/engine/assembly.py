"""Assembles weights, cache, executor and scheduler. On a GPU the cache depends on what the
executor takes, so that is a function of the number of blocks until then."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import torch

from d3engine.depth.labels import policy_in_words
from d3engine.engine.draft_model import DraftWeights, load_draft_weights, load_head, with_cache
from d3engine.engine.executors import build_executor, matrix_form, new_cache, room
from d3engine.engine.ranks import is_under_torchrun, lead, meet_under_torchrun, start_ranks
from d3engine.engine.settings import EngineSettings
from d3engine.errors import require
from d3engine.executor.bridging import BridgeStore
from d3engine.executor.draft_target import DraftTargetExecutor
from d3engine.executor.eager import EagerExecutor
from d3engine.executor.eagle3 import Eagle3Executor
from d3engine.executor.interface import Executor
from d3engine.executor.native import NativeExecutor
from d3engine.model.eagle3 import Eagle3Head
from d3engine.model.weights import LlamaWeights, in_layout, load_weights
from d3engine.scheduling.scheduler import Scheduler
from d3engine.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)


def assemble(
    settings: EngineSettings,
    tokenizer: Tokenizer | None,
    weights: LlamaWeights | None = None,
    bridges: BridgeStore | None = None,
) -> tuple[Scheduler, Executor]:
    """Load the weights that are not given, and put together what plans and what runs these plans; `bridges` has those
    that requests will name.

    A second model is loaded where the policy of the settings drafts with one; its tokenizer must be `tokenizer`'s like.
    Raises `ModelFormatError` for files that cannot be loaded, `InvalidValueError` for what does not fit together.
    """
    config = settings.config
    is_alone = settings.tensor_parallel_size == 1
    make = _on_one_device(settings, weights, bridges) if is_alone else partial(_on_ranks, settings)
    rule = settings.depth.draft_rule(config.num_layers)
    draft = head = None
    if rule is not None and rule.model is not None:
        head = load_head(rule.model, settings)
        draft = load_draft_weights(rule.model, settings, tokenizer) if head is None else None
    second_model = draft if head is None else head
    executor, blocks = make(second_model)
    cache = new_cache(settings, config, blocks)
    _log_ready(settings, blocks, executor.stats.executor)
    # How far plans may run ahead is the executor's to say: it may be another than the settings hoped for.
    scheduler_config = replace(
        settings.scheduler_config, num_scheduler_steps=executor.max_steps, capabilities=executor.capabilities
    )
    if head is not None:
        assert isinstance(executor, EagerExecutor), "a head was refused elsewhere"
        # A cached prompt would leave no hidden states.
        scheduler_config = replace(scheduler_config, enable_prefix_caching=False)
        second_cache = new_cache(settings, head.config, max(blocks // settings.config.num_layers, 1))
        scheduler = Scheduler(scheduler_config, cache, second_cache, reads_states=True)
        return scheduler, DraftTargetExecutor(executor, Eagle3Executor(head, executor))
    if draft is None:
        if rule is not None and rule.by_cost and isinstance(executor, NativeExecutor):
            executor.draft_with(None)
        return Scheduler(scheduler_config, cache), executor
    drafting, second_cache = with_cache(draft, blocks, settings, native=isinstance(executor, NativeExecutor))
    if isinstance(executor, NativeExecutor) and isinstance(drafting, NativeExecutor):
        executor.draft_with(drafting)
        return Scheduler(scheduler_config, cache, second_cache), executor
    pair = DraftTargetExecutor(executor, drafting)
    return Scheduler(scheduler_config, cache, second_cache, draft_rows=pair.draft_rows), pair


_Make: TypeAlias = Callable[[DraftWeights | Eagle3Head | None], tuple[Executor, int]]
"""Makes the executor and says how many blocks it has, beside a second model that drafts."""


def _on_one_device(settings: EngineSettings, weights: LlamaWeights | None, bridges: BridgeStore | None) -> _Make:
    form = matrix_form(settings)
    if weights is None:
        weights = load_weights(
            settings.directory,
            settings.config,
            dtype=settings.dtype,
            weight_dtype=settings.weight_dtype,
            device=settings.device,
            form=form,
            keeps_blocks=settings.keeps_blocks,
            splits_blocks=settings.splits_blocks,
        )
    elif form is not None:
        weights = in_layout(weights, form)
    _check_weights(weights, settings)
    build = partial(build_executor, settings, weights, bridges=bridges)

    def make(draft: DraftWeights | Eagle3Head | None) -> tuple[Executor, int]:
        def build_both(num_blocks: int) -> Executor:
            executor = build(num_blocks)
            if not isinstance(draft, DraftWeights):
                return executor
            return DraftTargetExecutor(executor, with_cache(draft, num_blocks, settings, native=False)[0])

        blocks = room(settings, build_both, None if draft is None else draft.config)
        return build(blocks), blocks

    return make


def _on_ranks(settings: EngineSettings, draft: DraftWeights | Eagle3Head | None) -> tuple[Executor, int]:
    """Under torchrun this is where other ranks than 0 stay."""
    meet = meet_under_torchrun if is_under_torchrun() else start_ranks
    return lead(settings, *meet(settings.tensor_parallel_size), None if draft is None else draft.config)


def _check_weights(weights: LlamaWeights, settings: EngineSettings) -> None:
    """Refuse ready weights that lie elsewhere, or are of another float type, than the engine computes with."""
    device, given = settings.device, weights.device
    there = given.type == device.type and device.index in (None, given.index)
    computes = weights.dtype == settings.dtype
    is_as_narrow = weights.weight_dtype == settings.weight_dtype or not weights.has_float_matrices
    fits = there and computes and is_as_narrow
    found = _in_words(weights.dtype, weights.weight_dtype, given)
    matrices = settings.weight_dtype if computes else settings.dtype
    require(fits, "weights", found, _in_words(settings.dtype, matrices, device))


def _in_words(dtype: torch.dtype, weight_dtype: torch.dtype, device: torch.device) -> str:
    matrices = "" if weight_dtype == dtype else f" with matrices in {weight_dtype}"
    return f"{dtype}{matrices} on {device}"


def _log_ready(settings: EngineSettings, num_blocks: int, executor: str) -> None:
    """Tell a reader of the log what the engine has been made of."""
    config = settings.config
    floats = _in_words(settings.dtype, settings.weight_dtype, settings.device).replace("torch.", "")
    packed = ", packed into 12 bits" if settings.weight_compression == "bf12" else ""
    rounded = "" if settings.activations == "float32" else f", activations in {settings.activations}"
    where = f"{config.num_layers} layers, {floats}{packed}{rounded}, executor: {executor}"
    _log.info("%s: %s; %s", settings.directory, where, policy_in_words(settings.depth))
    size = num_blocks * settings.block_bytes / 2**20
    _log.info("KV cache: %d blocks of %d entries of one layer, %.1f MiB", num_blocks, settings.block_size, size)
