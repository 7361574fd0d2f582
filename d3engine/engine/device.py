"""What the engine runs on: the device, the dtype, the kernels, and how much it may do by itself."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Never

import torch

from d3engine.engine.host import usable_cpus
from d3engine.errors import InvalidValueError, require
from d3engine.executor.graph_shapes import Repeats
from d3engine.kernels.target import target_of
from d3engine.model.config import ModelConfig
from d3engine.utils.environment import KERNELS, PROGRAMMATIC_LAUNCH

_log = logging.getLogger(__name__)
_faults: dict[torch.device, str | None] = {}


def settle_programmatic_launch(device: torch.device, new_recorder: Callable[[], Repeats]) -> bool:
    """Turn such launches on or off, as D3ENGINE_PROGRAMMATIC_LAUNCH and `device` say; returns whether they are on.

    Each device is tried once, by launches that a `new_recorder()` repeats as the engine's steps will be. One that has
    them and fails ends them for the whole process, and it is said why.
    """
    # Imported late, as nothing imports Triton where no kernel of its runs.
    from d3engine.kernels.triton import launches, programmatic

    launches.PROGRAMMATIC = False
    if PROGRAMMATIC_LAUNCH.read() == "off" or not target_of(device).has_programmatic_launch:
        return False
    if device not in _faults:
        launches.PROGRAMMATIC = True
        _faults[device] = fault = programmatic.fault(device, new_recorder().record)
        if fault is not None:
            lost = "no kernel on %s begins before the one in front of it has ended, as its trial failed: %s"
            _log.warning(lost, device, fault)
    launches.PROGRAMMATIC = not any(_faults.values())
    return launches.PROGRAMMATIC


def check_fp8_products(device: torch.device, dtype: torch.dtype) -> None:
    """Refuse `activations="fp8"` on a device that fails a trial of it; raises `InvalidValueError`, which says why."""
    from d3engine.kernels.triton import fp8_rows  # late, as above

    fault = fp8_rows.fault(device, dtype)
    require(fault is None, "activations", "fp8", f"auto or float32 on {device}, since its trial failed: {fault}")


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
STEPS_AHEAD = 16
"""Steps that the native library takes before the host looks: what it does between, about one small model's step on a
CPU, is then a few hundredths of the time."""
GRAPH_STEPS = 64
"""Steps of CUDA graphs between two plans, for each of which the device waits. The host takes them one by one meanwhile,
and can end them at any, so that a long run delays nothing."""
MOST_TOKENS_AHEAD = 128
WEIGHTS_AHEAD = 3 * 2**27
"""Weights that a native run of one row goes through at most: some thirty milliseconds of one core, during which no
request joins the batch and nothing is interrupted. A streamed run can be ended, and is longer."""


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


def resolve_backend(given: str, device: torch.device) -> str:
    """`given`, or where it is "auto" what D3ENGINE_KERNELS says; refuses what does not run on `device`."""
    backend = {"reference": "torch"}.get(KERNELS.read(), KERNELS.read()) if given == "auto" else given
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if backend == "triton" and device.type == "cpu" and not is_interpreted:
        refuse_backend(backend, "auto or {torch} on a CPU, unless Triton interprets (TRITON_INTERPRET=1)")
    if backend == "native" and device.type != "cpu":
        refuse_backend(backend, f"another than native on {device}")
    return backend


def refuse_backend(backend: str, allowed: str) -> Never:
    """Raise `InvalidValueError` by the name of the argument, or of the variable where that says so.

    `{torch}` in `allowed` stands for what the field calls that backend.
    """
    by_variable = KERNELS.read() in (backend, {"torch": "reference"}.get(backend))
    field = KERNELS.name if by_variable else "backend"
    raise InvalidValueError(field, backend, allowed.format(torch="reference" if by_variable else "torch"))


def resolve_scheduler_steps(given: int | None, executor: str) -> int:
    """How many steps the device may take by itself; 0 where the host launches every step."""
    if executor == "eager":
        allowed = "1 without CUDA graphs and the native library"
        require(given in (None, 1), "num_scheduler_steps", given, allowed)
        return 0
    if given is not None:
        return given
    return GRAPH_STEPS if executor == "graphs" else STEPS_AHEAD


def num_tokens_ahead(given: int | None, executor: str, config: ModelConfig) -> int:
    """Tokens up to which a native run of few rows is longer than `num_scheduler_steps`, unless the user names it.

    The smaller the model, the more of its time would be the host's; a model with long steps gets 0.
    """
    if given is not None or executor != "native":
        return 0
    weights = config.num_layers * config.layer_parameters + config.vocab_size * config.hidden_size
    tokens = min(MOST_TOKENS_AHEAD, WEIGHTS_AHEAD // weights)
    return tokens if tokens > STEPS_AHEAD else 0


def default_threads() -> int:
    """The threads of native decoding where none are given: PyTorch's, within the CPUs that the process may use."""
    return min(torch.get_num_threads(), usable_cpus())
