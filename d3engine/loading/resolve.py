"""From the arguments of `Engine` to its settings: what is not allowed is refused here, before weights are read."""

from __future__ import annotations

import logging
import os
from dataclasses import replace

import torch

from d3engine.depth import DepthPolicy
from d3engine.errors import NOTHING, require, require_integer, require_number
from d3engine.loading.batch_invariance import check_engine
from d3engine.loading.cache_size import MOST_LENGTH, check_memory, fitting_length
from d3engine.loading.defaults import resolve_max_model_len
from d3engine.loading.depth import resolve_depth
from d3engine.loading.device import num_scheduler_steps as resolve_scheduler_steps
from d3engine.loading.device import num_threads as resolve_threads
from d3engine.loading.device import num_tokens_ahead as resolve_tokens_ahead
from d3engine.loading.device import resolve_device, resolve_dtype
from d3engine.loading.executors import executor_for
from d3engine.loading.kv_cache_dtype import resolve_kv_cache_dtype
from d3engine.loading.model_directory import model_directory
from d3engine.loading.rank_processes import is_under_torchrun, own_index
from d3engine.loading.ranks import rank_device
from d3engine.loading.settings import EngineSettings
from d3engine.loading.weight_dtype import check_packing, held_config, kept_by_default, resolve_weight_dtype
from d3engine.model.config import ModelConfig
from d3engine.model.part import ARGUMENT, Part, part_of
from d3engine.scheduling.waiting import Admission, Immediate

_log = logging.getLogger(__name__)


def resolve_settings(
    model: str | os.PathLike[str],
    *,
    depth: DepthPolicy | str,
    device: str | torch.device,
    dtype: str | torch.dtype,
    weight_dtype: str | torch.dtype,
    held: torch.dtype | None,
    max_model_len: int | None,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    block_size: int,
    kv_cache_dtype: str,
    kv_cache_memory_bytes: int | None,
    gpu_memory_utilization: float,
    enable_prefix_caching: bool,
    admission: Admission | None,
    enforce_eager: bool,
    num_scheduler_steps: int | None,
    num_threads: int | None,
    tensor_parallel_size: int,
    stream_interval: int,
    batch_invariant: bool,
    pack_weights: bool,
) -> EngineSettings:
    """The settings of an engine, from its arguments and the model's own files; no weights are read.

    `held` is what ready weights have their matrices in, and None where those of the files are to be loaded. Raises
    `InvalidValueError` for an argument that is not allowed, `ModelFormatError` for a directory that holds no model of
    ours.
    """
    require_integer("max_num_seqs", max_num_seqs, 1, 4096)
    require_integer("max_num_batched_tokens", max_num_batched_tokens, 1)
    require_integer("block_size", block_size, 1, 1024)
    require_number("gpu_memory_utilization", gpu_memory_utilization, 0.0, 1.0, open_low=True)
    check_switches(
        enable_prefix_caching=enable_prefix_caching,
        enforce_eager=enforce_eager,
        batch_invariant=batch_invariant,
        pack_weights=pack_weights,
    )
    _check_admission(admission)
    directory = model_directory(model)
    there = resolve_device(device)
    config = held_config(ModelConfig.from_directory(directory), there)
    computed = resolve_dtype(dtype, config, there)
    part = check_ranks(tensor_parallel_size, config, there, held)
    cached = resolve_kv_cache_dtype(kv_cache_dtype, dtype=computed, device=there)
    is_alone = there.type != "cpu" or tensor_parallel_size == 1  # the native library knows nothing of ranks
    executor = executor_for(there, computed, enforce_eager or not is_alone)
    kept = held or kept_by_default(dtype, directory, config, executor)
    settings = EngineSettings(
        directory=directory,
        config=config,
        depth=resolve_depth(depth, directory),
        device=there,
        dtype=computed,
        weight_dtype=resolve_weight_dtype(weight_dtype, dtype=computed, device=there, kept=kept),
        kv_cache_dtype=cached,
        max_model_len=resolve_max_model_len(max_model_len, config),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=block_size,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        gpu_memory_utilization=gpu_memory_utilization,
        enable_prefix_caching=enable_prefix_caching,
        admission=admission or Immediate(),
        executor=executor,
        num_threads=resolve_threads(num_threads),
        num_scheduler_steps=resolve_scheduler_steps(num_scheduler_steps, executor != "eager"),
        tensor_parallel_size=tensor_parallel_size,
        stream_interval=require_integer("stream_interval", stream_interval, 1),
        batch_invariant=batch_invariant,
        pack_weights=pack_weights,
        num_tokens_ahead=resolve_tokens_ahead(num_scheduler_steps, executor, config),
    )
    if batch_invariant:
        check_engine(settings)
    if pack_weights:
        check_packing(settings)
    of_rank = settings if part is None else settings.of_part(part, rank_device(there, own_index()))
    if max_model_len is None:
        fits = fitting_length(of_rank, part or part_of(config, 0, 1))
        settings, of_rank = (_at_most(fits, one) for one in (settings, of_rank))
        _tell_length(settings)
    check_memory(of_rank)
    return settings


def _at_most(length: int, settings: EngineSettings) -> EngineSettings:
    return replace(settings, max_model_len=min(length, settings.max_model_len))


def _tell_length(settings: EngineSettings) -> None:
    """Warn of a default that is less than what the model was made for."""
    length, own, window = settings.max_model_len, settings.config.max_length, settings.config.sliding_window
    if length < own:
        why = "what the memory has room for beside the weights"
        if length in (window, MOST_LENGTH):
            why = "its sliding window" if length == window else "a longer one must be given"
        _log.warning("max_model_len is %s of the model's %s tokens: %s", f"{length:,}", f"{own:,}", why)


def check_ranks(size: int, config: ModelConfig, device: torch.device, held: torch.dtype | None) -> Part | None:
    """Refuse a number of ranks that the model or the machine has not enough for; rank 0's part, None for one rank."""
    require_integer(ARGUMENT, size, 1, 1024)
    if size == 1:
        return None
    require(torch.distributed.is_available(), ARGUMENT, size, "1 with a PyTorch that was built without distributed")
    require(held is None, "weights", NOTHING, f"None beside {ARGUMENT}={size}, where each rank loads its own part")
    if device.type == "cuda":
        require(device.index is None, "device", str(device), f'"auto" or "cuda" beside {ARGUMENT}={size}')
        here = torch.cuda.device_count()
        require(is_under_torchrun() or size <= here, ARGUMENT, size, f"at most the GPUs of this machine, {here}")
    return part_of(config, 0, size)


def check_switches(**switches: object) -> None:
    """Refuse anything but True and False for these arguments."""
    for name, value in switches.items():
        require(isinstance(value, bool), name, value, "True or False")


def _check_admission(admission: object) -> None:
    """Refuse what is no admission strategy."""
    is_strategy = admission is None or callable(getattr(admission, "admits", None))
    require(
        is_strategy,
        "admission",
        admission,
        "Immediate(), IntervalAdmission(steps), or an object with admits(engine_step)",
    )


def check_tokenizer(tokenizer: object, skip_tokenizer_init: bool) -> None:
    """Refuse a tokenizer that is no directory, or that would not be used."""
    require(
        tokenizer is None or isinstance(tokenizer, str | os.PathLike), "tokenizer", tokenizer, "a directory, or None"
    )
    contradicts = tokenizer is not None and skip_tokenizer_init
    require(not contradicts, "tokenizer", tokenizer, "None beside skip_tokenizer_init=True")
