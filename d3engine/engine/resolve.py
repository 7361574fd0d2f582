"""From the arguments of `Engine` to its settings: what is not allowed is refused here, before weights are read."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from d3engine.depth import DepthPolicy, FullDepth
from d3engine.depth.speculative_config import as_mapping, policy_of_config
from d3engine.engine.depth import resolve_depth
from d3engine.engine.device import (
    DTYPES,
    default_threads,
    num_tokens_ahead,
    resolve_backend,
    resolve_device,
    resolve_dtype,
    resolve_scheduler_steps,
)
from d3engine.engine.engine_config import EngineConfig
from d3engine.engine.executors import executor_for
from d3engine.engine.memory import (
    MOST_LENGTH,
    check_cache_bytes,
    check_memory,
    check_weights,
    fitting_length,
    resolve_kv_cache_dtype,
)
from d3engine.engine.model_directory import holds_eagle3, model_directory, resolve_max_model_len
from d3engine.engine.prefix_file import is_foreign
from d3engine.engine.ranks import is_under_torchrun, own_index, rank_device
from d3engine.engine.settings import EngineSettings, ExecutorKind
from d3engine.errors import NOTHING, D3EngineError, InvalidValueError, require
from d3engine.kernels.blocks import INTEGER_TYPES
from d3engine.kernels.kv_pool import FP8_CAPABILITY
from d3engine.kernels.native.library import adds_bfloat16_pairs, reads_interleaved_blocks
from d3engine.kernels.quantized import has_fp8_products
from d3engine.kernels.target import target_of
from d3engine.model.checkpoint import FLOAT_DTYPES, dtype_of
from d3engine.model.config import ModelConfig
from d3engine.model.expected_tensors import float_matrices
from d3engine.model.gguf_file import TENSOR_TYPES as GGUF_TYPES
from d3engine.model.gguf_file import is_gguf
from d3engine.model.quantization_config import FP8_GROUPS
from d3engine.model.shard import ARGUMENT, Part, shard_of
from d3engine.model.source import files_of, open_checkpoint
from d3engine.request.admission import Immediate
from d3engine.utils.environment import NATIVE_ISA
from d3engine.utils.files import is_there, is_writable

BATCH_INVARIANT = "batch_invariant"


def check_engine(settings: EngineSettings) -> None:
    """Refuse `batch_invariant=True` on what has no such path; raises `InvalidValueError`."""
    ranks = settings.tensor_parallel_size
    require(
        ranks == 1, BATCH_INVARIANT, True, f"False beside tensor_parallel_size={ranks}, whose sums have no fixed order"
    )
    if settings.executor == "native":
        rope = settings.config.rope.rope_type
        require(rope != "dynamic", BATCH_INVARIANT, True, "False on a CPU for rope of the type dynamic")
        return
    needed = "dtype float32, no enforce_eager, a backend with it"
    allowed = f"False on a CPU without the native library ({needed})"
    is_triton = settings.kernels == "triton"
    require(is_triton or settings.device.type != "cpu", BATCH_INVARIANT, True, allowed)
    require(is_triton, BATCH_INVARIANT, True, "False with the backend torch: Triton's kernels alone have it")


def check_policy(settings: EngineSettings, policy: DepthPolicy) -> None:
    """Refuse a policy that such an engine cannot run; raises `InvalidValueError` that names `depth`.

    They are what the native library leaves to PyTorch, whose sums depend on how many rows there are.
    """
    if not settings.batch_invariant:
        return
    layers = settings.config.num_layers
    exits = policy.exit_rule(layers) is not None
    require(
        not exits,
        "depth",
        policy,
        f"without early exits beside {BATCH_INVARIANT}=True, as PyTorch sums up their confidences",
    )
    if settings.executor == "native":
        rule = policy.draft_rule(layers)
        drafts = rule is not None and not rule.is_by_text  # the library runs those by itself
        allowed = f"one whose own layers draft nothing beside {BATCH_INVARIANT}=True on a CPU"
        require(not drafts, "depth", policy, allowed)
        fills = policy.schedule(layers).on_skip
        allowed = f'with on_skip="none" or "copy" beside {BATCH_INVARIANT}=True on a CPU'
        require(fills != "project", "depth", policy, allowed)


READ_AS_THEY_LIE: dict[ExecutorKind, frozenset[torch.dtype]] = {"native": frozenset({torch.bfloat16, torch.float16})}
"""Dtypes in which "auto" leaves a checkpoint's matrices under float32 activations on a CPU, by what decodes.

The one place that decides it: decoding has to read them straight from memory. The operations in plain torch do not:
they widen a matrix for each product, which at batch 1 takes longer than reading float32 would.
"""


def resolve_weight_dtype(
    weight_dtype: str | torch.dtype,
    *,
    dtype: torch.dtype,
    device: torch.device,
    kept: torch.dtype | None,
    widens: bool = True,
) -> torch.dtype:
    """The dtype of float matrices and the embedding under activations of `dtype`.

    "auto" is `kept` where operations widen that to `dtype`, and `dtype` otherwise; `widens` is whether the backend does
    so. Raises `InvalidValueError` for a
    dtype that cannot be multiplied with `dtype` here.
    """
    is_wide = widens and device.type == "cpu" and dtype == torch.float32
    allowed = (dtype, torch.bfloat16, torch.float16) if is_wide else (dtype,)
    if weight_dtype == "auto":
        return kept if kept in allowed and kept is not None else dtype
    resolved = DTYPES.get(weight_dtype) if isinstance(weight_dtype, str) else weight_dtype
    if resolved is None or resolved not in allowed:
        names = ["auto", *(name for name, known in DTYPES.items() if known in allowed)]
        where = f"{device.type} with dtype={str(dtype).removeprefix('torch.')}"
        raise InvalidValueError("weight_dtype", weight_dtype, f"one of {', '.join(names)} on {where}")
    return resolved


ROUNDED_HIDDEN_SIZE = 896
"""The least hidden size at which "auto" rounds activations to 8 bits.

That costs a model below 0.001 nats of KL divergence from there on: 0.0004 at 896 and 0.0003 at 1,536, of Qwen2.5-Coder,
but 0.003 at SmolLM2's 576 (`benchmarks/results/activations-*.json`).
"""


_MATRICES = {
    "int8": "a GGUF file, held as it is, on a CPU with AVX2",
    "bfloat16": "matrices held as bfloat16, on a CPU that has AVX-512 with products of such numbers and no AMX",
}
"""What must be there for rounded activations."""


def resolve_activations(activations: str, *, has_blocks: bool, is_bfloat16: bool, config: ModelConfig) -> str:
    """What matrices are multiplied by: "float32", or what they and the processor allow.

    That is "int8" where `has_blocks` says that they are in ggml's blocks and the processor multiplies bytes, and
    "bfloat16" where `is_bfloat16` says that they are held so and it multiplies such numbers. "auto" is that from a
    hidden size of `ROUNDED_HIDDEN_SIZE` on; "fp8" is what `check_fp8_rows` judges. Raises `InvalidValueError` for what
    matrices or the processor do not allow.
    """
    if activations == "fp8":
        return activations
    fast = "int8" if has_blocks and multiplies_bytes() else "float32"
    if is_bfloat16 and not has_blocks and adds_bfloat16_pairs(NATIVE_ISA.read()):
        fast = "bfloat16"
    if activations == "auto":
        return fast if config.hidden_size >= ROUNDED_HIDDEN_SIZE else "float32"
    allowed = f"auto or float32 but for {_MATRICES.get(activations)}"
    require(activations in ("float32", fast), "activations", activations, allowed)
    return activations


def check_fp8_rows(settings: EngineSettings, *, is_random: bool) -> None:
    """Refuse `activations="fp8"` where no product would have such rows; raises `InvalidValueError`.

    Random weights say of themselves what they are, where a model's config does so.
    """
    target = target_of(settings.device)
    has_products = settings.kernels == "triton" and has_fp8_products(settings.dtype, target)
    is_fp8 = is_random or settings.config.quantization == "fp8"
    allowed = (
        "auto or float32 but for a model in 8-bit floats with a scale for each row, with dtype bfloat16 and Triton's"
        " kernels, on a GPU of compute capability 8.9 or later"
    )
    require(has_products and is_fp8, "activations", "fp8", allowed)
    for field, usual in ((BATCH_INVARIANT, False), (ARGUMENT, 1)):
        given = getattr(settings, field)
        require(given == usual, "activations", "fp8", f"auto or float32 beside {field}={given}")


def multiplies_bytes() -> bool:
    """Whether the native library multiplies blocks by activations of 8 bits on this processor."""
    return reads_interleaved_blocks(NATIVE_ISA.read())


def check_compression(settings: EngineSettings) -> None:
    """Refuse to compress matrices that the executor cannot read so, or that are not bfloat16."""
    field, value = "weight_compression", settings.weight_compression
    require(settings.executor == "native", field, value, "none where the native library does not decode")
    held = str(settings.weight_dtype).removeprefix("torch.")
    allowed = f'none where matrices are {held} (weight_dtype="bfloat16" would make them bfloat16)'
    require(settings.weight_dtype == torch.bfloat16, field, value, allowed)


def held_config(config: ModelConfig, device: torch.device) -> ModelConfig:
    """`config`, its matrices of 8-bit floats called floats on a GPU that converts none: 8.9 is the first that does."""
    if config.quantization not in ("fp8", FP8_GROUPS) or device.type != "cuda" or target_of(device).has(FP8_CAPABILITY):
        return config
    return replace(config, quantization=None)


def kept_by_default(
    dtype: str | torch.dtype, directory: Path, config: ModelConfig, executor: ExecutorKind
) -> torch.dtype | None:
    """The dtype that the matrices of a directory stay in where the user names no `dtype`; None for that of activations.

    Who names one, as in vLLM, means the weights too.
    """
    readable = READ_AS_THEY_LIE.get(executor)
    if dtype != "auto" or not readable:
        return None
    found = dtype_in_files(directory, config, reads_blocks=executor == "native")
    return found if found in readable else None


def dtype_in_files(directory: Path, config: ModelConfig, *, reads_blocks: bool) -> torch.dtype | None:
    """The dtype that loses nothing worth having of a model's float matrices, from headers alone; None where their
    files have several, or there is none.

    What config.json calls the model's dtype is not asked: a matrix of more bits would lose them. A GGUF file with
    matrices in blocks is bfloat16: its values were rounded to at most 8 bits, far coarser than bfloat16 rounds them.
    Of a directory the floats beside matrices in blocks decide, where an executor `reads_blocks`. Raises
    `ModelFormatError` as `open_checkpoint`.
    """
    with open_checkpoint(directory) as checkpoint:
        entries = [checkpoint.entries.get(name) for name in float_matrices(config)]
    types = {
        entry.type_name if entry.type_name in GGUF_TYPES else entry.dtype
        for entry in entries
        if entry is not None and not (reads_blocks and entry.type_name in INTEGER_TYPES)
    }
    if any(name in GGUF_TYPES and name not in FLOAT_DTYPES for name in types):
        return torch.bfloat16
    found = {dtype_of(name) for name in types}
    return found.pop() if len(found) == 1 else None


def _speculation(given: EngineConfig) -> DepthPolicy | None:
    """The policy by which the engine drafts, where its arguments ask for that by vLLM's names."""
    config: Mapping[str, Any] | str | None = given.speculative_config
    if given.draft_model is not None:
        require(config is None, "draft_model", given.draft_model, "absent with speculative_config, which names it")
        is_path = isinstance(given.draft_model, str | os.PathLike) and os.fspath(given.draft_model) != ""
        require(is_path, "draft_model", given.draft_model, "a Llama model, named as the engine's is")
        config = {"model": os.fspath(given.draft_model)}
    if config is None:
        return None
    field = "speculative_config" if given.draft_model is None else "draft_model"
    is_full = given.depth == "auto" or isinstance(given.depth, FullDepth)
    require(is_full, field, config, f"absent with depth={given.depth!r}: drafts are verified at full depth")
    policy, known = policy_of_config(config), as_mapping(config)
    if known.get("method") == "eagle3":
        given_head, allowed = known["model"], 'the directory of an EAGLE-3 head, with "eagle3"'
        require(holds_eagle3(given_head), f'{field}["model"]', given_head, allowed)
    return policy


def _check_prefix_file(given: EngineConfig) -> None:
    path = given.prefix_cache_file
    if path is None:
        return
    require(isinstance(path, str | os.PathLike), "prefix_cache_file", path, "a path, or None")
    require(
        is_writable(Path(path)), "prefix_cache_file", str(path), "a file that can be written, in an existing folder"
    )
    allowed = "a new file, or one of prefixes, since it is written over at the end"
    require(not is_foreign(Path(path)), "prefix_cache_file", str(path), allowed)
    require(given.enable_prefix_caching, "prefix_cache_file", str(path), "None beside enable_prefix_caching=False")
    require(given.weights is None, "prefix_cache_file", str(path), "None beside weights, which no file names")
    alone = "None beside tensor_parallel_size above 1"
    require(given.tensor_parallel_size == 1, "prefix_cache_file", str(path), alone)


_log = logging.getLogger(__name__)


def resolve_settings(given: EngineConfig) -> EngineSettings:
    """The settings of an engine, from its arguments and the model's own files; no weights are read.

    Raises `InvalidValueError` for an argument that is not allowed, `ModelFormatError` for a directory that holds no
    model of ours.
    """
    _check_tokenizer(given.tokenizer, given.skip_tokenizer_init)
    _check_admission(given.admission)
    _check_prefix_file(given)
    held = None if given.weights is None else given.weights.weight_dtype
    directory = model_directory(given.model)
    there = resolve_device(given.device)
    backend = resolve_backend(given.backend, there)
    config = held_config(ModelConfig.from_directory(directory), there)
    computed = resolve_dtype(given.dtype, config, there)
    part = check_ranks(given.tensor_parallel_size, config, there, held)
    is_alone = there.type != "cpu" or given.tensor_parallel_size == 1  # the native library knows nothing of ranks
    executor = executor_for(there, computed, given.enforce_eager or not is_alone, backend)
    kept = held or kept_by_default(given.dtype, directory, config, executor)
    widens = backend != "triton"
    weight_dtype = resolve_weight_dtype(given.weight_dtype, dtype=computed, device=there, kept=kept, widens=widens)
    is_as_it_lies = (given.dtype, given.weight_dtype, given.weight_compression) == ("auto", "auto", "none")
    is_native = executor == "native"
    has_blocks = is_native and is_as_it_lies and files_of(directory).packed_bytes() is not None
    is_bfloat16 = is_native and weight_dtype == torch.bfloat16 and config.quantization is None
    is_bfloat16 &= given.weight_compression == "none"
    is_triton = backend == "triton" or (backend == "auto" and there.type == "cuda")
    splits_blocks = is_triton and given.weight_dtype == "auto" and given.tensor_parallel_size == 1
    resolved: dict[str, Any] = {
        "directory": directory,
        "config": config,
        "depth": _speculation(given) or resolve_depth(given.depth, directory),
        "device": there,
        "dtype": computed,
        "weight_dtype": weight_dtype,
        "kv_dtype": resolve_kv_cache_dtype(given.kv_cache_dtype, dtype=computed, device=there),
        "max_model_len": resolve_max_model_len(given.max_model_len, config),
        "admission": given.admission or Immediate(),
        "backend": backend,
        "executor": executor,
        "keeps_blocks": (is_native and is_as_it_lies) or splits_blocks,
        "activations": resolve_activations(
            given.activations, has_blocks=has_blocks, is_bfloat16=is_bfloat16, config=config
        ),
        "num_threads": given.num_threads or default_threads(),
        "num_scheduler_steps": resolve_scheduler_steps(given.num_scheduler_steps, executor),
        "num_tokens_ahead": num_tokens_ahead(given.num_scheduler_steps, executor, config),
        "speculative_config": None,  # `depth` has its policy
        "draft_model": None,
        "weights": None,
    }
    settings = EngineSettings(**(vars(given) | resolved))
    if settings.batch_invariant:
        check_engine(settings)
    if settings.weight_compression != "none":
        check_compression(settings)
    if settings.activations == "fp8":
        check_fp8_rows(settings, is_random=given.weights is not None)
    of_rank = settings if part is None else settings.of_part(part, rank_device(there, own_index()))
    if given.weights is None:
        check_weights(of_rank, part or shard_of(config, 0, 1))
    check_cache_bytes(of_rank)
    if given.max_model_len is None:
        draft = _drafting(settings) if there.type == "cuda" else None
        fits = fitting_length(of_rank, part or shard_of(config, 0, 1), draft)
        settings, of_rank = (replace(one, max_model_len=min(fits, one.max_model_len)) for one in (settings, of_rank))
        _tell_length(settings)
    check_memory(of_rank)
    return settings


def _drafting(settings: EngineSettings) -> EngineSettings | None:
    """The settings of the model that drafts; None where none does, or where loading will refuse its files."""
    rule = settings.depth.draft_rule(settings.config.num_layers)
    if rule is None or rule.model is None:
        return None
    try:
        directory = model_directory(rule.model)
        return replace(settings, directory=directory, config=ModelConfig.from_directory(directory))
    except D3EngineError:
        return None


def _tell_length(settings: EngineSettings) -> None:
    """Warn of a default that is less than what the model was made for."""
    length, own, window = settings.max_model_len, settings.config.max_length, settings.config.longest_text
    if length < own:
        why = "what the memory has room for beside the weights"
        if length in (window, MOST_LENGTH):
            why = "its sliding window" if length == window else "a longer one must be given"
        if length == window and settings.config.rope.query_scaling is not None:
            why = "beyond it queries grow, which no kernel computes"
        if length == settings.config.rope.trained_length:
            why = "it was trained at that length; a longer one must be given, and has other rope frequencies"
        _log.warning("max_model_len is %s of the model's %s tokens: %s", f"{length:,}", f"{own:,}", why)


def check_ranks(size: int, config: ModelConfig, device: torch.device, held: torch.dtype | None) -> Part | None:
    """Refuse a number of ranks that the model or the machine has not enough for; rank 0's part, None for one rank."""
    if size == 1:
        return None
    require(torch.distributed.is_available(), ARGUMENT, size, "1 with a PyTorch that was built without distributed")
    require(held is None, "weights", NOTHING, f"None beside {ARGUMENT}={size}, where each rank loads its own part")
    if device.type == "cuda":
        require(device.index is None, "device", str(device), f'"auto" or "cuda" beside {ARGUMENT}={size}')
        here = torch.cuda.device_count()
        require(is_under_torchrun() or size <= here, ARGUMENT, size, f"at most the GPUs of this machine, {here}")
    return shard_of(config, 0, size)


def _check_admission(admission: object) -> None:
    """Refuse what is no admission strategy."""
    is_strategy = admission is None or callable(getattr(admission, "admits", None))
    require(
        is_strategy,
        "admission",
        admission,
        "Immediate(), IntervalAdmission(steps), or an object with admits(engine_step)",
    )


def _check_tokenizer(tokenizer: object, skip_tokenizer_init: bool) -> None:
    """Refuse what holds no tokenizer, and one that would not be used."""
    if tokenizer is None:
        return
    allowed = "a directory with tokenizer.json or tokenizer.model, a GGUF file, or None"
    require(isinstance(tokenizer, str | os.PathLike), "tokenizer", tokenizer, allowed)
    assert isinstance(tokenizer, str | os.PathLike)
    path = Path(tokenizer)
    has_files = any(is_there(path / name) for name in ("tokenizer.json", "tokenizer.model"))
    require(str(tokenizer) != "" and (has_files or is_gguf(path)), "tokenizer", str(tokenizer), allowed)
    require(not skip_tokenizer_init, "tokenizer", str(tokenizer), "None beside skip_tokenizer_init=True")
