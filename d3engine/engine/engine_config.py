"""EngineConfig: every argument of the engine, with its type, its default, its bounds and its help."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from d3engine.errors import require, require_name
from d3engine.utils.arguments import (
    KW_ONLY,
    Check,
    Integers,
    Numbers,
    OneOf,
    Switch,
    Unchecked,
    argument,
    check_arguments,
)

if TYPE_CHECKING:
    import torch

    from d3engine.depth import DepthPolicy
    from d3engine.model.weights import LlamaWeights
    from d3engine.request.admission import Admission

MOST_THREADS = 1024
MOST_RANKS = 1024
BACKENDS = ("auto", "native", "torch", "triton")

RENAMED: Mapping[str, tuple[str, Mapping[Any, Any]]] = {
    "pack_weights": ("weight_compression", {True: "bf12", False: "none"}),
}
"""Arguments of the release before, as `d3engine.utils.arguments.accepts` takes them. They go with the next release."""


class LoRAModules(Check):
    """Adapters by name: a mapping of names and directories, or "NAME=PATH" each."""

    kind: type = list[str]

    def check(self, field: str, value: object) -> None:
        allowed = 'a mapping of names and directories, or a list of "NAME=PATH"'
        require(isinstance(value, Mapping | list | tuple), field, value, allowed)
        assert isinstance(value, Mapping | list | tuple)
        pairs = list(value.items()) if isinstance(value, Mapping) else [str(one).partition("=")[::2] for one in value]
        for name, path in pairs:
            require_name(field, name)
            require(isinstance(path, str | os.PathLike) and os.fspath(path) != "", field, value, allowed)
        names = [name for name, _ in pairs]
        require(len(set(names)) == len(names), field, value, "names that differ from each other")

    def kept(self, value: Any) -> dict[str, str]:
        pairs = value.items() if isinstance(value, Mapping) else (one.split("=", 1) for one in value)
        return {name: os.fspath(path) for name, path in pairs}


@dataclass(frozen=True)
class EngineConfig:
    """The arguments of `Engine`, checked as far as that takes no model.

    Args:
        model: A model directory, a GGUF file, "demo" (comes with the package), a model that `d3engine weights fetch`
            has fetched, such as "smollm2", or one of the Hugging Face hub as "owner/name", at a branch, tag or commit
            as "owner/name@revision", and with the quantization of a GGUF file as "owner/name:Q4_K_M".
        depth: The layers that each generated token runs: a policy such as `D3(alpha, start)`, or "auto", the setting
            in `d3.json` beside the weights and full depth without one. A request may bring its own policy. The log
            warns once of each policy that was never certified for the model.
        speculative_config: Speculative decoding, as JSON text or a mapping; None: none. It is {"method": "draft_model",
            "model": MODEL}, or {"method": "ngram"} for lookups in prompt and answer, and may have
            "num_speculative_tokens": without it each draft is as long as pays. Tokens and log-probabilities stay the
            same. It stands in the place of `depth`: drafts are verified at full depth.
        draft_model: A smaller model with the same vocabulary, for drafts; None: none. Short for a `speculative_config`.
        device: "auto" (CUDA where there is one), "cpu", "cuda" or "cuda:N".
        dtype: Type of activations, float weights and KV cache: "auto" (float32 on a CPU, the file's on a GPU),
            "float32", "bfloat16", or on a GPU "float16". Quantized matrices stay as their directory has them.
        weight_dtype: Type of float matrices and the embedding alone: `dtype`, or on a CPU "bfloat16" or "float16"
            under float32 activations, with half the bytes. "auto" keeps a file's 16-bit floats, and the
            quantized matrices of a GGUF file or an AWQ, GPTQ or llm-compressor checkpoint, where the native library
            decodes and no `dtype` is named, or where Triton's kernels do.
        activations: Type of activations in products on a CPU: "float32" is exact. "int8" has 8 bits and a scale for
            each 32 values, for quantized matrices of GGUF, AWQ or GPTQ files on x86 processors with AVX2. "bfloat16"
            is for bfloat16 matrices, where a processor has AVX-512 with such products and no AMX. "auto" is one of
            these two from a hidden size of 896 on: narrower models lose more by it. "fp8" rounds steps of more than
            512 rows, which read prompts, to 8-bit floats with a scale for each row: for models in 8-bit floats with
            such scales, on a GPU of compute capability 8.9 or later.
        weight_compression: "bf12" holds bfloat16 matrices in 12 bits a weight without loss, for the native library on
            a CPU.
        max_model_len: Maximum tokens of prompt and answer; None: the model's, or what fits the memory.
        max_num_seqs: Maximum sequences that run at once.
        max_num_batched_tokens: Maximum tokens computed in one step; longer prompts are computed in chunks.
        block_size: KV entries per block.
        kv_cache_dtype: Type of KV entries: "auto" for that of activations, or "fp8" ("fp8_e4m3") for 8-bit floats with
            a scale for each head of each entry. A GPU must have compute capability 8.9.
        kv_cache_memory_bytes: Size of the KV cache; None: 1 GiB on a CPU, or one whole sequence if that is more, and
            `gpu_memory_utilization` on a GPU.
        gpu_memory_utilization: Share of a GPU's memory to use, with weights, CUDA graphs and the largest step.
        enable_prefix_caching: Let prompts share the KV blocks of a common beginning.
        prefix_cache_file: File of the prefix cache: read at the start, written at the end; None: none.
        prefix_cache_file_bytes: Maximum bytes of entries in that file.
        admission: When waiting requests join the batch: `Immediate()` (also None), or `IntervalAdmission(steps)`.
        enforce_eager: Run without CUDA graphs and without the native library: the host calls each operation.
        warm_up: Compile kernels and capture the first CUDA graphs before the engine is ready, on a GPU.
        num_scheduler_steps: Tokens of each answer that a batch may generate without the host; None: 64 with CUDA
            graphs, and 16 with the native library, where few answers of a small model get up to 128 and streams four
            times as many. Without either it is 1.
        num_threads: CPU threads of the native library and of PyTorch, which gets fewer where layers are small; None:
            PyTorch's number, within the usable CPUs. Outside of the engine's calls PyTorch's number is unchanged.
        tensor_parallel_size: Number of devices to split the model across, a process for each: of this machine, or
            those that torchrun has started. On CPUs without the native library.
        batch_invariant: Make tokens and logits bitwise independent of the batch, of how a prompt is cut, of preemption
            and prefix hits; slower on a GPU, refused where it cannot be had.
        backend: Implementation of the operations: "native" (the C++ library, CPU), "torch" (plain PyTorch), "triton" (a
            GPU, or Triton's interpreter), or "auto" (triton on a GPU, native on a CPU where its library is built).
        lora_modules: LoRA adapters to load, each as NAME=PATH of a directory that PEFT has written; None: none. Or a
            mapping. Requests name them; `Engine.load_lora_adapter` loads further ones.
        max_lora_rank: Maximum rank of an adapter.
        max_loras: Maximum adapters that are loaded at once.
        lora_dtype: Type of adapters' values: "auto" (as stored, but in 16 bits where matrices have at most as many),
            "float32", "bfloat16" or "float16". Triton's kernels take that of activations.
        stream_interval: Tokens between two outputs of a request; its first and its last are sent at once.
        seed: Seed for requests that have none.
        tokenizer: A directory or a GGUF file to take the tokenizer from; None: the model's.
        skip_tokenizer_init: Work with token ids alone.
        weights: Ready weights in place of the directory's (random ones for a benchmark).

    Raises:
        InvalidValueError: for a value out of bounds.
    """

    model: str | os.PathLike[str]
    _: KW_ONLY
    depth: DepthPolicy | str = argument("auto")
    speculative_config: Mapping[str, Any] | str | None = argument(None, panel="Engine")
    draft_model: str | os.PathLike[str] | None = argument(None, panel="Engine")
    device: str | torch.device = argument("auto", panel="Engine")
    dtype: str | torch.dtype = argument("auto", panel="Engine")
    weight_dtype: str | torch.dtype = argument("auto", panel="Memory", listed=False)
    activations: str = argument("auto", OneOf("auto", "float32", "int8", "bfloat16", "fp8"), panel="Engine")
    weight_compression: str = argument("none", OneOf("none", "bf12"), panel="Memory", listed=False)
    max_model_len: int | None = argument(None, Unchecked(int), panel="Memory")
    max_num_seqs: int = argument(64, Integers(1, 4096), panel="Engine")
    max_num_batched_tokens: int = argument(2048, Integers(1), panel="Advanced", listed=False)
    block_size: int = argument(16, Integers(1, 1024), panel="Advanced", listed=False)
    kv_cache_dtype: str = argument("auto", panel="Memory")
    kv_cache_memory_bytes: int | None = argument(None, Unchecked(int), panel="Memory")
    gpu_memory_utilization: float = argument(0.9, Numbers(0.0, 1.0, open_low=True), panel="Memory")
    enable_prefix_caching: bool = argument(True, Switch(), panel="Memory")
    prefix_cache_file: str | os.PathLike[str] | None = argument(None, panel="Memory")
    prefix_cache_file_bytes: int = argument(2**29, Integers(1), panel="Memory", listed=False)
    admission: Admission | None = argument(None)
    enforce_eager: bool = argument(False, Switch())
    warm_up: bool = argument(True, Switch(), panel="Advanced", listed=False)
    num_scheduler_steps: int | None = argument(None, Integers(1, 256))
    num_threads: int | None = argument(None, Integers(1, MOST_THREADS))
    tensor_parallel_size: int = argument(1, Integers(1, MOST_RANKS), panel="Engine")
    batch_invariant: bool = argument(False, Switch(), panel="Advanced")
    backend: str = argument("auto", OneOf(*BACKENDS), panel="Engine")
    lora_modules: Mapping[str, str] | list[str] | None = argument(None, LoRAModules())
    max_lora_rank: int = argument(16, Integers(1, 512))
    max_loras: int = argument(64, Integers(1, 4096))
    lora_dtype: str = argument("auto", OneOf("auto", "float32", "bfloat16", "float16"))
    stream_interval: int = argument(1, Integers(1))
    seed: int = argument(0, Integers(0, 2**63 - 1), panel="Engine")
    tokenizer: str | os.PathLike[str] | None = argument(None, panel="Advanced", listed=False)
    skip_tokenizer_init: bool = argument(False, Switch())
    weights: LlamaWeights | None = argument(None)

    def __post_init__(self) -> None:
        check_arguments(self)

    def given(self) -> dict[str, Any]:
        """The arguments that are not the default, but for `model`."""
        return {
            one.name: getattr(self, one.name)
            for one in fields(EngineConfig)
            if one.name != "model" and getattr(self, one.name) is not one.default
        }
