"""From what a user names (a model directory, "auto") to what the engine runs on: device, dtype, depth, cache size."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from d3engine.depth import DepthPolicy
from d3engine.depth.policy import POLICY_FILE, calibrated_for, calibrated_task, policy_from_directory
from d3engine.depth.words import policy_in_words
from d3engine.environment import KERNELS
from d3engine.errors import InvalidValueError, ModelFormatError, require, require_integer, require_number
from d3engine.files import is_there
from d3engine.host_memory import check_length, machine_bytes
from d3engine.kernels import for_device
from d3engine.model.config import GENERATION_CONFIG_FILE, ModelConfig, load_generation_config
from d3engine.model.fingerprint import fingerprint
from d3engine.model.weights import LlamaWeights
from d3engine.request import SamplingParams

_log = logging.getLogger(__name__)

DEMO = "demo"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
GRAPH_STEPS = 16
"""Steps that CUDA graphs take before the host looks: at 3 ms a step, what the host does between is then 2 % of it."""
CPU_CACHE_BYTES = 2**30
"""What the KV cache takes on a CPU unless told otherwise, or one sequence of full length if that is more."""


def model_directory(model: str | os.PathLike[str]) -> Path:
    """The directory of a model; "demo" names the one that comes with the package."""
    allowed = f"a directory with a Llama model, or {DEMO!r}"
    require(isinstance(model, str | os.PathLike), "model", model, allowed)
    directory = Path(__file__).parent / "demo_model" if model == DEMO else Path(model)
    require(directory.is_dir(), "model", str(model), allowed)
    return directory


def check_switches(**switches: object) -> None:
    """Refuse anything but True and False for these arguments."""
    for name, value in switches.items():
        require(isinstance(value, bool), name, value, "True or False")


def check_admission(admission: object) -> None:
    """Refuse what is no admission strategy."""
    is_strategy = admission is None or callable(getattr(admission, "admits", None))
    require(is_strategy, "admission", admission, "Immediate(), Waves(steps), or an object with admits(engine_step)")


def check_tokenizer(tokenizer: object, skip_tokenizer_init: bool) -> None:
    """Refuse a tokenizer that is no directory, or that would not be used."""
    require(
        tokenizer is None or isinstance(tokenizer, str | os.PathLike), "tokenizer", tokenizer, "a directory, or None"
    )
    contradicts = tokenizer is not None and skip_tokenizer_init
    require(not contradicts, "tokenizer", tokenizer, "None beside skip_tokenizer_init=True")


def resolve_device(device: str | torch.device) -> torch.device:
    """The device to run on; "auto" is CUDA where there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError:
        raise InvalidValueError("device", device, '"auto", "cpu", "cuda" or "cuda:N"') from None
    require(resolved.type in ("cpu", "cuda"), "device", device, '"auto", "cpu", "cuda" or "cuda:N"')
    require(resolved.type != "cuda" or torch.cuda.is_available(), "device", device, "a device this machine has")
    if resolved.index is not None and resolved.type == "cuda":
        require(resolved.index < torch.cuda.device_count(), "device", device, "a device this machine has")
    return resolved


def check_weights(weights: LlamaWeights, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse ready weights that lie elsewhere, or are of another float type, than the engine computes with."""
    given = weights.embedding
    there = given.device.type == device.type and device.index in (None, given.device.index)
    allowed = f"{dtype} on {device}"
    require(there and given.dtype == dtype, "weights", f"{given.dtype} on {given.device}", allowed)


def resolve_dtype(dtype: str | torch.dtype, config: ModelConfig, device: torch.device) -> torch.dtype:
    """The dtype of activations, cache and float weights.

    "auto" is float32 on a CPU, where narrower ones are slower, and the file's on a GPU.
    """
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else DTYPES[config.dtype or "bfloat16"]
    resolved = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    allowed = ["auto", *DTYPES] if device.type != "cpu" else ["auto", "float32", "bfloat16"]
    is_allowed = any(resolved is DTYPES.get(name) for name in allowed if name != "auto")
    require(is_allowed, "dtype", dtype, f"one of {', '.join(allowed)} on {device.type}")
    assert resolved is not None
    return resolved


def resolve_depth(depth: str | DepthPolicy, directory: Path) -> DepthPolicy:
    """The engine's depth policy; "auto" is what calibration has written beside the weights, full depth without, and
    the log says for which task that was found.

    Raises `ModelFormatError` where `d3.json` names the fingerprint of other weights: what is safe for those says
    nothing of these, and a quiet fall to full depth would hide that the file is stale.
    """
    if isinstance(depth, DepthPolicy):
        return depth
    require(depth == "auto", "depth", depth, 'a DepthPolicy such as D3(alpha=0.9, start=0.6), or "auto"')
    policy = policy_from_directory(directory)
    calibrated = calibrated_for(directory)
    if calibrated is not None and calibrated != fingerprint(directory):
        raise ModelFormatError(
            f"{directory / POLICY_FILE} was calibrated on other weights than those beside it; run d3engine calibrate "
            "on these, delete the file, or name a depth"
        )
    if (found := own_setting(policy, directory)) is not None:
        _log.info(found)
    return policy


def own_setting(policy: DepthPolicy, directory: Path) -> str | None:
    """A sentence on the setting that "auto" has found in `d3.json`: for which task it is; None without that file."""
    if not is_there(directory / POLICY_FILE):
        return None
    task = calibrated_task(directory)
    shown = f"found safe for {task}, for no other task" if task else "the file does not say for which task"
    return f"depth from {POLICY_FILE}: {policy_in_words(policy)} ({shown})"


def kernels_for(device: torch.device) -> ModuleType:
    """The operations that run on `device`, as D3ENGINE_KERNELS says."""
    chosen = KERNELS.read()
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    allowed = "auto or reference on a CPU, unless Triton interprets (TRITON_INTERPRET=1)"
    require(not (chosen == "triton" and device.type == "cpu") or is_interpreted, KERNELS.name, chosen, allowed)
    module: ModuleType = for_device(device, chosen)
    return module


def uses_graphs(device: torch.device, enforce_eager: bool) -> bool:
    """Whether decoding runs in CUDA graphs."""
    return device.type == "cuda" and not enforce_eager


def num_scheduler_steps(given: int | None, uses_graphs: bool) -> int:
    """How many steps the device may take by itself; 0 where the host launches every step."""
    if given is not None:
        require_integer("num_scheduler_steps", given, 1, 256)
        require(uses_graphs or given == 1, "num_scheduler_steps", given, "1 without CUDA graphs")
    if not uses_graphs:
        return 0
    return GRAPH_STEPS if given is None else given


def log_ready(
    directory: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    num_blocks: int,
    block_size: int,
    depth: DepthPolicy,
) -> None:
    """Tell a reader of the log what an engine has been made of."""
    name = str(dtype).removeprefix("torch.")
    size = num_blocks * block_bytes(config, block_size, dtype)
    _log.info("%s: %d layers, %s on %s; %s", directory, config.num_layers, name, device, policy_in_words(depth))
    _log.info("KV cache: %d blocks of %d entries of one layer, %.1f MiB", num_blocks, block_size, size / 2**20)


def default_sampling_params(directory: Path) -> SamplingParams:
    """What generation_config.json asks for, as vLLM reads it: greedy when it says `do_sample: false`.

    Raises `ModelFormatError`, naming the file, for a value that `SamplingParams` refuses.
    """
    defaults: dict[str, Any] = load_generation_config(directory)
    defaults.pop("eos_token_ids", None)
    if "max_new_tokens" in defaults:
        defaults["max_tokens"] = defaults.pop("max_new_tokens")
    if defaults.pop("do_sample", True) is False:
        for name in ("top_p", "top_k", "min_p"):
            defaults.pop(name, None)
        defaults["temperature"] = 0.0
    try:
        return SamplingParams(**defaults)
    except InvalidValueError as error:
        raise ModelFormatError(f"{directory / GENERATION_CONFIG_FILE}: {error}") from None


def resolve_max_model_len(max_model_len: int | None, config: ModelConfig) -> int:
    """The most tokens of prompt and answer; beyond the positions that the model was made for only with dynamic rope."""
    if max_model_len is None:
        return config.max_length
    limit = None if config.rope.rope_type == "dynamic" else config.max_length
    return require_integer("max_model_len", max_model_len, 2, limit)


def check_memory(
    config: ModelConfig,
    *,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    max_num_seqs: int,
    max_model_len: int,
    kv_cache_memory_bytes: int | None,
) -> None:
    """Refuse, before anything is allocated, a KV cache or a length that the machine has no memory for."""
    is_cpu = device.type == "cpu"
    if kv_cache_memory_bytes is not None:
        least = block_bytes(config, block_size, dtype) * config.num_layers
        require_integer("kv_cache_memory_bytes", kv_cache_memory_bytes, least)
        there = machine_bytes() if is_cpu else torch.cuda.mem_get_info(device)[1]
        allowed = f"at most the memory that is there, {there} bytes"
        fits = there is None or kv_cache_memory_bytes <= there
        require(fits, "kv_cache_memory_bytes", kv_cache_memory_bytes, allowed)
    blocks = config.num_layers * -(-max_model_len // block_size) if is_cpu and kv_cache_memory_bytes is None else 0
    check_length(
        config,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        block_size=block_size,
        sequence_bytes=blocks * block_bytes(config, block_size, dtype),
    )


def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block: keys and values of `block_size` positions of one layer."""
    return 2 * block_size * config.kv_size * dtype.itemsize


def num_blocks(
    config: ModelConfig,
    *,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    max_num_seqs: int,
    max_model_len: int,
    kv_cache_memory_bytes: int | None,
    gpu_memory_utilization: float,
    workspace_bytes: Callable[[], int],
    draft: ModelConfig | None = None,
) -> int:
    """Blocks of the pool: what the memory allows, and no more than all sequences at full length could use.

    On a GPU, whose weights are loaded by now, `workspace_bytes()` is asked what steps and graphs need beside them, and
    with each block goes its share of the cache that a second model, `draft`, keeps for the same entries.
    """
    share = require_number("gpu_memory_utilization", gpu_memory_utilization, 0.0, 1.0, open_low=True)
    one = block_bytes(config, block_size, dtype)
    sequence = config.num_layers * -(-max_model_len // block_size)
    if kv_cache_memory_bytes is not None:
        return kv_cache_memory_bytes // one
    most = max_num_seqs * sequence
    if device.type == "cpu":
        return min(most, max(sequence, CPU_CACHE_BYTES // one))
    workspace = workspace_bytes()
    free, total = torch.cuda.mem_get_info(device)
    with_draft = one
    if draft is not None:
        with_draft += block_bytes(draft, block_size, dtype) * draft.num_layers // config.num_layers
    room = max(0, int(free - workspace - (1 - share) * total)) // with_draft
    require(
        room >= sequence,
        "gpu_memory_utilization",
        gpu_memory_utilization,
        f"enough for one sequence of max_model_len={max_model_len}, {sequence} blocks of {with_draft} bytes"
        f" (beside weights, graphs and {workspace} bytes of workspace there is room for {room})",
    )
    return min(most, room)
