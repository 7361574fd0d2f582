"""A Llama's weights as the engine wants them, loaded from safetensors or made at random.

The one idea: everything is arranged once, here, so that a layer is four matrix products. Query, key and value
are one matrix, gate and up are one; and the rows of each query and key head go from transformers' order,
where channel j is paired with channel j + head_dim / 2, to adjacent pairs (2j, 2j + 1), so that rope is one
complex multiplication (`rope.py`). A dot product of a query and a key does not see the order of channels, as
long as both have the same.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from d3engine.errors import ModelFormatError
from d3engine.model.checkpoint import Checkpoint, TensorEntry, open_checkpoint
from d3engine.model.config import CONFIG_FILE, ModelConfig

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"

# Buffers that old versions of transformers saved beside the weights; rope.py makes its own.
_IGNORED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """One layer. H hidden, Q = heads * head_dim, K = kv heads * head_dim, I intermediate; all of one dtype
    and device.

    The first Q + K rows of `qkv` and `qkv_bias` are in adjacent-pair order, the last K rows (values) are not
    permuted.
    """

    attention_norm: Tensor  # [H]
    qkv: Tensor  # [Q + 2 K, H]
    qkv_bias: Tensor | None  # [Q + 2 K]
    output: Tensor  # [H, Q]
    output_bias: Tensor | None  # [H]
    mlp_norm: Tensor  # [H]
    gate_up: Tensor  # [2 I, H], gate rows first
    gate_up_bias: Tensor | None  # [2 I]
    down: Tensor  # [H, I]
    down_bias: Tensor | None  # [H]

    def tensors(self) -> list[Tensor]:
        """Return the tensors there are, in the order of the fields."""
        values = (getattr(self, field.name) for field in fields(self))
        return [value for value in values if value is not None]


@dataclass(frozen=True, eq=False)
class LlamaWeights:
    """All weights; V vocabulary, H hidden. `lm_head` is the same object as `embedding` when tied."""

    embedding: Tensor  # [V, H]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [H]
    lm_head: Tensor  # [V, H]

    @property
    def nbytes(self) -> int:
        """Bytes of all weights; tied ones count once."""
        tensors = [self.embedding, self.final_norm]
        if self.lm_head is not self.embedding:
            tensors.append(self.lm_head)
        for layer in self.layers:
            tensors.extend(layer.tensors())
        return sum(tensor.nbytes for tensor in tensors)


def load_weights(
    directory: str | Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    show_progress: bool = True,
) -> LlamaWeights:
    """Load a model directory's safetensors, converted to `dtype` on `device`; a progress bar only on a
    terminal.

    Files are memory-mapped, and each tensor is copied straight to its place: the peak is the model and one
    tensor. All names and shapes are checked against `config` before anything is allocated. Raises
    `ModelFormatError` naming tensor and file for what is missing, unexpected, doubled, wrongly shaped, not of
    a float dtype, not finite or too large for `dtype`; see `check_tensors` for a tied lm_head.
    """
    with open_checkpoint(directory) as checkpoint:
        check_tensors(checkpoint, config)
        total = sum(checkpoint.entries[name].nbytes for name in expected_tensors(config))
        with tqdm(
            total=total,
            desc="loading weights",
            unit="B",
            unit_scale=True,
            disable=None if show_progress else True,
            leave=False,
        ) as progress:
            weights = _Loader(checkpoint, config, dtype, torch.device(device), progress).load()
    return weights


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the name (transformers' own) and shape of every tensor a model of this config must have."""
    hidden, intermediate = config.hidden_size, config.intermediate_size
    attention = {
        "q_proj": (config.q_size, hidden),
        "k_proj": (config.kv_size, hidden),
        "v_proj": (config.kv_size, hidden),
        "o_proj": (hidden, config.q_size),
    }
    mlp = {
        "gate_proj": (intermediate, hidden),
        "up_proj": (intermediate, hidden),
        "down_proj": (hidden, intermediate),
    }
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        for block, matrices, bias in (
            ("self_attn", attention, config.attention_bias),
            ("mlp", mlp, config.mlp_bias),
        ):
            for name, shape in matrices.items():
                shapes[f"{prefix}{block}.{name}.weight"] = shape
                if bias:
                    shapes[f"{prefix}{block}.{name}.bias"] = shape[:1]
    shapes[FINAL_NORM] = (hidden,)
    if not config.tie_word_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, hidden)
    return shapes


def is_ignored_tensor(name: str) -> bool:
    """True for what a checkpoint may carry although it is no weight: precomputed rope frequencies."""
    return _IGNORED.search(name) is not None


def check_tensors(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Raise `ModelFormatError` unless the checkpoint holds exactly the tensors that `config` asks for,
    rightly shaped.

    A tied model may carry an lm_head.weight equal to its embedding. If the two differ the model is refused:
    transformers 4 drops that lm_head and transformers 5 unties it, so no answer would be right for everyone.
    """
    entries = checkpoint.entries
    expected = expected_tensors(config)
    for name, shape in expected.items():
        if name not in entries:
            hint = ", and tie_word_embeddings is false" if name == LM_HEAD else ""
            raise ModelFormatError(f"tensor {name!r} is missing in {_files_of(checkpoint)}{hint}")
        if entries[name].shape != shape:
            raise ModelFormatError(
                f"{entries[name].file}: tensor {name!r} has shape {list(entries[name].shape)}; "
                f"{CONFIG_FILE} asks for {list(shape)}"
            )
    for name, entry in entries.items():
        if name not in expected and not is_ignored_tensor(name) and name != LM_HEAD:
            raise ModelFormatError(f"{entry.file}: tensor {name!r} is unexpected for this {CONFIG_FILE}")
    if config.tie_word_embeddings and LM_HEAD in entries:
        _check_stray_lm_head(checkpoint)


def check_finite(entry: TensorEntry, source: Tensor, converted: Tensor) -> None:
    """Raise `ModelFormatError` if a tensor, as read or as converted, holds NaN or infinity."""
    if _is_finite(converted):
        return
    if _is_finite(source):
        raise ModelFormatError(f"{entry.file}: tensor {entry.name!r} has values too large for {converted.dtype}")
    raise ModelFormatError(f"{entry.file}: tensor {entry.name!r} holds NaN or infinity")


def _is_finite(tensor: Tensor) -> bool:
    # The extremes carry any NaN or infinity along, and need no second tensor as isfinite of the whole would.
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low) & torch.isfinite(high))


def _check_stray_lm_head(checkpoint: Checkpoint) -> None:
    if not torch.equal(checkpoint.read(LM_HEAD), checkpoint.read(EMBEDDING)):
        raise ModelFormatError(
            f"{checkpoint.entries[LM_HEAD].file}: tensor {LM_HEAD!r} differs from {EMBEDDING!r}, but "
            f"{CONFIG_FILE} sets tie_word_embeddings; set that to false to use it, or delete the tensor"
        )


def _files_of(checkpoint: Checkpoint) -> str:
    return ", ".join(str(file) for file in sorted({entry.file for entry in checkpoint.entries.values()}))


def to_adjacent_pairs(weight: Tensor, num_heads: int) -> Tensor:
    """Permute rows per head from half-split order (channel j paired with j + D / 2) to adjacent pairs (2j, 2j
    + 1).

    weight: [num_heads * D, ...], any dtype. Returns the same shape, contiguous.
    """
    halves = weight.reshape(num_heads, 2, -1, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


def to_half_split(weight: Tensor, num_heads: int) -> Tensor:
    """The inverse of `to_adjacent_pairs`: from the order of Meta's and llama2.c's files to transformers'."""
    pairs = weight.reshape(num_heads, -1, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)


def random_weights(config: ModelConfig, *, dtype: torch.dtype, device: torch.device | str, seed: int) -> LlamaWeights:
    """Return weights of the right shapes as at the start of a training: for benchmarks, where only sizes
    matter.

    Normal with deviation 0.02, divided by sqrt(2 L) for the two matrices of a layer that write to the
    residual stream (GPT-2's rule, so that activations stay of one size at any depth); norms are ones, biases
    zeros.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    residual = 0.02 / math.sqrt(2 * config.num_layers)

    def normal(rows: int, columns: int, deviation: float = 0.02) -> Tensor:
        matrix = torch.empty(rows, columns, dtype=dtype, device=device)
        return matrix.normal_(0.0, deviation, generator=generator)

    def ones() -> Tensor:
        return torch.ones(config.hidden_size, dtype=dtype, device=device)

    def bias(rows: int, present: bool) -> Tensor | None:
        return torch.zeros(rows, dtype=dtype, device=device) if present else None

    hidden, intermediate = config.hidden_size, config.intermediate_size
    qkv_rows = config.q_size + 2 * config.kv_size
    layers = tuple(
        LayerWeights(
            attention_norm=ones(),
            qkv=normal(qkv_rows, hidden),
            qkv_bias=bias(qkv_rows, config.attention_bias),
            output=normal(hidden, config.q_size, residual),
            output_bias=bias(hidden, config.attention_bias),
            mlp_norm=ones(),
            gate_up=normal(2 * intermediate, hidden),
            gate_up_bias=bias(2 * intermediate, config.mlp_bias),
            down=normal(hidden, intermediate, residual),
            down_bias=bias(hidden, config.mlp_bias),
        )
        for _ in range(config.num_layers)
    )
    embedding = normal(config.vocab_size, hidden)
    lm_head = embedding if config.tie_word_embeddings else normal(config.vocab_size, hidden)
    return LlamaWeights(embedding, layers, ones(), lm_head)


@dataclass(frozen=True)
class _Loader:
    """Copies the checked tensors of a checkpoint to their places."""

    checkpoint: Checkpoint
    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    progress: tqdm[None]

    def load(self) -> LlamaWeights:
        layers = tuple(self._layer(f"model.layers.{index}.") for index in range(self.config.num_layers))
        embedding = self._stack([EMBEDDING])
        lm_head = embedding if self.config.tie_word_embeddings else self._stack([LM_HEAD])
        return LlamaWeights(embedding, layers, self._stack([FINAL_NORM]), lm_head)

    def _layer(self, prefix: str) -> LayerWeights:
        config = self.config
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        qkv = [attention + "q_proj", attention + "k_proj", attention + "v_proj"]
        heads = [config.num_heads, config.num_kv_heads, None]
        gate_up = [mlp + "gate_proj", mlp + "up_proj"]
        return LayerWeights(
            attention_norm=self._stack([prefix + "input_layernorm.weight"]),
            qkv=self._stack([name + ".weight" for name in qkv], heads),
            qkv_bias=self._bias(qkv, config.attention_bias, heads),
            output=self._stack([attention + "o_proj.weight"]),
            output_bias=self._bias([attention + "o_proj"], config.attention_bias),
            mlp_norm=self._stack([prefix + "post_attention_layernorm.weight"]),
            gate_up=self._stack([name + ".weight" for name in gate_up]),
            gate_up_bias=self._bias(gate_up, config.mlp_bias),
            down=self._stack([mlp + "down_proj.weight"]),
            down_bias=self._bias([mlp + "down_proj"], config.mlp_bias),
        )

    def _bias(self, modules: list[str], present: bool, heads: list[int | None] | None = None) -> Tensor | None:
        return self._stack([name + ".bias" for name in modules], heads) if present else None

    def _stack(self, names: list[str], heads: list[int | None] | None = None) -> Tensor:
        """Return the named tensors on top of each other; `heads` says whose rows become adjacent pairs."""
        shapes = [self.checkpoint.entries[name].shape for name in names]
        rows = [shape[0] for shape in shapes]
        stacked = torch.empty((sum(rows), *shapes[0][1:]), dtype=self.dtype, device=self.device)
        parts = torch.split(stacked, rows)
        for name, part, num_heads in zip(names, parts, heads or [None] * len(names), strict=True):
            self._copy(name, part, num_heads)
        return stacked

    def _copy(self, name: str, target: Tensor, num_heads: int | None) -> None:
        source = self.checkpoint.read(name)
        if num_heads is None:
            target.copy_(source)
        else:  # to_adjacent_pairs, but straight into place: no permuted copy in between
            pairs = target.view(num_heads, -1, 2, *target.shape[1:])
            pairs.transpose(1, 2).copy_(source.view(num_heads, 2, -1, *source.shape[1:]))
        check_finite(self.checkpoint.entries[name], source, target)
        self.progress.update(source.nbytes)
