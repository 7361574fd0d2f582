"""An engine's arguments for one model as a value: checked, every "auto" resolved
(`engine/resolve.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from d3engine.depth import DepthPolicy, policy_from_dict
from d3engine.depth.policy import named_bridges, named_students
from d3engine.engine.engine_config import EngineConfig
from d3engine.engine.model_directory import own_pooling
from d3engine.errors import InvalidValueError
from d3engine.kernels.kv_pool import block_bytes
from d3engine.model.config import ModelConfig
from d3engine.model.shard import Part
from d3engine.request.admission import Admission
from d3engine.request.params import SamplingParams
from d3engine.scheduling.scheduler import SchedulerConfig
from d3engine.text.tokenizer import Tokenizer

ExecutorKind: TypeAlias = Literal["graphs", "native", "eager"]
"""See `engine/executors.py`, which chooses."""


@dataclass(frozen=True, kw_only=True)
class EngineSettings(EngineConfig):
    """The arguments of `Engine`, with every "auto" and None resolved for the model in `directory`.

    `num_scheduler_steps` is 0 where the host launches every step. `weights` is None.
    """

    directory: Path
    config: ModelConfig
    depth: DepthPolicy = field()
    device: torch.device = field()
    dtype: torch.dtype = field()
    weight_dtype: torch.dtype = field()
    kv_dtype: torch.dtype
    max_model_len: int = field()
    admission: Admission = field()
    num_threads: int = field()
    num_scheduler_steps: int = field()
    num_tokens_ahead: int
    executor: ExecutorKind
    keeps_blocks: bool
    """Whether quantized matrices of a GGUF file stay in ggml's blocks."""

    @property
    def splits_blocks(self) -> bool:
        """Whether they do so as Triton's kernels read them."""
        return self.keeps_blocks and self.kernels == "triton"

    @property
    def kernels(self) -> Literal["torch", "triton"]:
        """The operations that the host calls: the native library's are not among them."""
        is_triton = self.backend == "triton" or (self.backend == "auto" and self.device.type == "cuda")
        return "triton" if is_triton else "torch"

    @property
    def warms_up(self) -> bool:
        """Whether kernels are compiled before the engine is ready: those that Triton compiles for a GPU."""
        return self.warm_up and self.device.type == "cuda" and self.kernels == "triton"

    @property
    def own_bridges(self) -> frozenset[str]:
        """The bridges that the engine's policy names, or that by which it drafts, and its students."""
        return named_bridges(self.depth) | named_students(self.depth)

    @property
    def scheduler_config(self) -> SchedulerConfig:
        """What the scheduler needs of it."""
        return SchedulerConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            admission=self.admission,
            enable_prefix_caching=self.enable_prefix_caching,
            num_scheduler_steps=self.num_scheduler_steps,
            num_tokens_ahead=self.num_tokens_ahead,
        )

    def of_part(self, part: Part, device: torch.device) -> EngineSettings:
        """The settings of one rank, which has that part of the model on that device."""
        return replace(self, config=part.config(self.config), device=device)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of the KV cache."""
        return self.block_bytes_of(self.config)

    def block_bytes_of(self, config: ModelConfig) -> int:
        """The same of the cache that a second model of `config` keeps."""
        return block_bytes(self.block_size, config.num_kv_heads, config.head_dim, self.kv_dtype)

    @property
    def sequence_blocks(self) -> int:
        """Blocks that one sequence of full length takes."""
        return self.config.num_layers * -(-self.max_model_len // self.block_size)


_DTYPES = ("dtype", "weight_dtype", "kv_dtype")


def plain_settings(settings: EngineSettings) -> dict[str, Any]:
    """The settings as they go to another process: all but config and tokenizer, which lie in files, and admission.

    `settings_of_plain` makes settings of them again.
    """
    plain = {field.name: getattr(settings, field.name) for field in fields(EngineSettings)}
    for name in ("config", "admission", "weights", "tokenizer"):
        del plain[name]
    plain |= {"model": str(settings.model), "directory": str(settings.directory), "device": str(settings.device)}
    plain |= {name: str(plain[name]).removeprefix("torch.") for name in _DTYPES}
    plain["depth"] = settings.depth.describe()
    return plain


def settings_of_plain(plain: Mapping[str, Any], admission: Admission) -> EngineSettings:
    """The settings of an engine in another process; the model's config is read from its files again."""
    given = dict(plain)
    given |= {name: getattr(torch, given[name]) for name in _DTYPES}
    given |= {"directory": Path(given["directory"]), "device": torch.device(given["device"])}
    given["depth"] = policy_from_dict(given["depth"])
    return EngineSettings(config=ModelConfig.from_directory(given["directory"]), admission=admission, **given)


class EngineProperties:
    """What is known once an engine is loaded, and never changes; may be asked at any time, from any thread."""

    settings: EngineSettings
    tokenizer: Tokenizer | None
    default_sampling_params: SamplingParams

    @property
    def config(self) -> ModelConfig:
        """The model's sizes and constants."""
        return self.settings.config

    @property
    def depth(self) -> DepthPolicy:
        """The policy of requests that bring none of their own."""
        return self.settings.depth

    @property
    def device(self) -> torch.device:
        """What it runs on."""
        return self.settings.device

    @property
    def dtype(self) -> torch.dtype:
        """Of activations, norms and biases, and of cache entries that are not held in 8 bits."""
        return self.settings.dtype

    @property
    def weight_dtype(self) -> torch.dtype:
        """Of matrices that are not quantized, and of the embedding."""
        return self.settings.weight_dtype

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and answer at most."""
        return self.settings.max_model_len

    @property
    def directory(self) -> Path:
        """Where the model's files are; for a GGUF file, that file."""
        return self.settings.directory

    @cached_property
    def own_pooling(self) -> str | None:
        """How the model's files say that embeddings are pooled; None where they do not."""
        return own_pooling(self.directory)

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer, with `encode` and `decode`; raises `InvalidValueError` for an engine without one."""
        if self.tokenizer is None:
            raise InvalidValueError("skip_tokenizer_init", True, "False for get_tokenizer()")
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What requests without parameters get: generation_config.json's."""
        return self.default_sampling_params
