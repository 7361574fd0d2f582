"""`LLM`: the engine with vLLM's arguments."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from d3engine.arguments import with_new_names
from d3engine.calls.new_requests import Same, refuse
from d3engine.engine import Engine
from d3engine.errors import InvalidValueError
from d3engine.loading.engine_config import RENAMED, EngineConfig
from d3engine.loading.hub import at_revision

ONE_DEVICE = "1, since tensor_parallel_size alone spreads a model over devices"
ONE_REVISION = "None, since the tokenizer is of the model's own revision"
BY_ENVIRONMENT = "None, since HF_HOME and HF_TOKEN say that to huggingface_hub, which fetches what is not there yet"
BY_DIRECTORY = "None, since the model's directory says how its weights are stored"

SAME: Same = {
    "pipeline_parallel_size": ((1,), ONE_DEVICE),
    "data_parallel_size": ((1,), ONE_DEVICE),
    "trust_remote_code": ((False,), "False, since no code of a model's directory is ever run"),
    "tokenizer_mode": (("auto",), "'auto', since the tokenizer's own files decide"),
    "load_format": (("auto", "safetensors"), "'auto' or 'safetensors', since nothing else is read"),
    "quantization": ((None,), BY_DIRECTORY),
    "tokenizer_revision": ((None,), ONE_REVISION),
    "download_dir": ((None,), BY_ENVIRONMENT),
    "hf_token": ((None,), BY_ENVIRONMENT),
    "hf_overrides": ((None, {}), "None, since config.json is taken as it is"),
    "generation_config": (("auto",), "'auto', since the model's directory has it"),
    "cpu_offload_gb": ((0,), "0, since weights stay where they are computed with"),
    "swap_space": ((0,), "0, since preempted requests are computed again"),
    "enable_chunked_prefill": ((None, True), "True, since long prompts are always computed in pieces"),
    "enable_lora": ((False, True), "True or False: adapters are loaded when they are named"),
    "scheduling_policy": (("fcfs", "priority"), "'fcfs' or 'priority', which are one here"),
    "logprobs_mode": (("raw_logprobs",), "'raw_logprobs', since log-probabilities are of the raw distribution"),
    "disable_log_stats": ((True,), "True, since stats() tells instead"),
    "runner": (("auto", "generate"), "'auto' or 'generate'"),
    "task": (("auto", "generate"), "'auto' or 'generate'"),
}
"""Arguments of vLLM's without a counterpart: the values without effect, and what is allowed."""

DTYPES = {"half": "float16", "float": "float32"}
"""vLLM's other names of dtypes."""


class LLM(Engine):
    """`Engine` for code written for vLLM: the same methods, and vLLM's names of arguments.

    Args:
        model: as for `Engine`.
        revision: a branch, a tag or a commit of a model of the Hugging Face hub, as in "owner/name@revision".
        arguments: `Engine`'s, and of vLLM's others those in `SAME`, with the values listed there.

    Raises:
        InvalidValueError: for an argument that is not allowed, and for one of vLLM's that has no counterpart, by name.
    """

    def __init__(self, model: str | os.PathLike[str], *, revision: str | None = None, **arguments: Any) -> None:
        name = model if revision is None else at_revision(model, revision)
        super().__init__(name, **_engine_arguments(arguments))


def _engine_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    own = {one.name for one in fields(EngineConfig)}
    taken = {}
    for name, value in with_new_names(arguments, RENAMED).items():
        if name in own:
            taken[name] = value
        elif name in SAME:
            refuse(name, value, SAME)
        else:
            raise InvalidValueError(name, value, "left out, since LLM has no such argument")
    if taken.get("seed", 0) is None:  # vLLM's default, by which it takes 0
        taken["seed"] = 0
    for name in ("dtype", "weight_dtype"):
        if isinstance(taken.get(name), str):
            taken[name] = DTYPES.get(taken[name], taken[name])
    return taken
