"""The most memory that one system takes while it answers, in a process of its own."""

from __future__ import annotations

import gc
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.children import checkout_environment
from benchmarks.systems import (
    FULL,
    PEER,
    PROMPT_TOKENS,
    Settings,
    decay_for,
    model_at,
    new_engine,
    ours,
    prompts_for,
    theirs,
    transformers_model,
    weights_of,
)
from d3engine.depth import FullDepth
from d3engine.model.config import ModelConfig
from d3engine.utils.children import python_command


def memory_in_subprocess(system: str, settings: Settings) -> dict[str, Any]:
    """What `memory` returns, for one system alone in a fresh process."""
    options = [f"--{name}={getattr(settings, name)}" for name in ("model", "tokens", "batch", "threads")]
    command = python_command("-m", "benchmarks.decode", *options, f"--memory-of={system}")
    done = subprocess.run(command, env=checkout_environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the process that measures the memory of {system} has failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def memory(system: str, settings: Settings) -> dict[str, Any]:
    """Resident bytes of this process with the model loaded, and at most while it answers twice.

    Where the kernel cannot forget an earlier peak (only Linux can), the peak is that of the whole process.
    """
    torch.set_num_threads(settings.threads)
    with model_at(settings.model, PROMPT_TOKENS + settings.tokens) as directory:
        config = ModelConfig.from_directory(directory)
        weights = weights_of(directory, config)
        prompts = prompts_for(config, settings.batch)
        if system == PEER:
            generate = theirs(transformers_model(directory, config, weights), prompts, settings.tokens)
        else:
            depth = FullDepth() if system == FULL else decay_for(config.num_layers, settings.tokens)
            generate = ours(new_engine(directory, weights, settings), prompts, depth, settings.tokens)
        del weights
        gc.collect()
        forgotten = _forget_peak()
        loaded = _resident_bytes("VmRSS") if forgotten else None
        for _ in range(2):
            generate()
    return {"loaded_bytes": loaded, "peak_bytes": _peak_bytes(), "peak_includes_loading": not forgotten}


def _forget_peak() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def _peak_bytes() -> int:
    if sys.platform == "linux":
        return _resident_bytes("VmHWM")
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _resident_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"the kernel does not tell {field}")
