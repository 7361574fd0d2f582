"""A Llama's weights in the engine: loaded, made at random, or quantized in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from tqdm import tqdm

from d3engine.errors import InvalidValueError, ModelFormatError, require
from d3engine.kernels.blocks import BLOCK_TYPES, BlockWeight, Stackable, StackedWeight, stacked
from d3engine.kernels.matrices import Table, Weight, float_dtype, tensors_of
from d3engine.kernels.quantized import FORMATS, QUANTIZERS, Int8Weight, QuantizedWeight
from d3engine.kernels.split_blocks import SPLIT_TYPES, SplitBlockWeight, split_blocks
from d3engine.model.checkpoint import SCALES, VALUES, Checkpoint, TensorEntry, dtype_of
from d3engine.model.checkpoint_formats import floats_of_rows
from d3engine.model.config import ModelConfig
from d3engine.model.expected_tensors import (
    HEAD_NORMS,
    check_tensors,
    check_values,
    expected_tensors,
    held_dtype,
    rows_of,
    scheme_of,
)
from d3engine.model.gguf_file import forget_header
from d3engine.model.quantization_config import DEFAULT_HEAD_SCHEME, QUANTIZATION_SCHEMES, head_schemes
from d3engine.model.shard import ModelShard, shard_checkpoint
from d3engine.model.source import ModelSource, open_checkpoint
from d3engine.utils.progress import bar_columns, hides_bars


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """One layer. H hidden, Q = heads * head_dim, K = kv heads * head_dim, I intermediate; all on one device.

    The four matrices are float, packed or quantized. Norms and biases have the dtype of activations; float matrices
    have that dtype or a narrower one, which an operation widens. The first Q + K rows of `qkv` and `qkv_bias` are in
    adjacent-pair order (`to_adjacent_pairs`), so that rope is one complex multiplication; the last K rows (values) are
    not permuted. `head_norms`, D values for a query's head and D for a key's, and `projection_norms` are in that order
    too. A sublayer without a norm takes the hidden states as they are; one with a norm behind it adds its normed output
    to them.
    """

    attention_norm: Tensor | None  # [H]
    qkv: Weight  # [Q + 2 K, H]
    qkv_bias: Tensor | None  # [Q + 2 K]
    head_norms: Tensor | None  # [2, D]
    output: Weight  # [H, Q]
    output_bias: Tensor | None  # [H]
    mlp_norm: Tensor | None  # [H]
    gate_up: Weight  # [2 I, H], gate rows first
    gate_up_bias: Tensor | None  # [2 I]
    down: Weight  # [H, I]
    down_bias: Tensor | None  # [H]
    projection_norms: Tensor | None = None  # [Q + K]
    attention_post_norm: Tensor | None = None  # [H]
    mlp_post_norm: Tensor | None = None  # [H]

    def tensors(self) -> list[Tensor]:
        """Return all tensors in the order of the fields; a quantized or packed matrix has several."""
        weights = (getattr(self, field.name) for field in fields(self))
        return [tensor for weight in weights if weight is not None for tensor in tensors_of(weight)]


@dataclass(frozen=True, eq=False)
class LlamaWeights:
    """All weights; V vocabulary, H hidden.

    `lm_head` is the same object as `embedding` when tied, unless it is packed; an untied embedding is float.
    """

    embedding: Table  # [V, H]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [H]
    lm_head: Weight  # [V, H]

    @property
    def dtype(self) -> torch.dtype:
        """Of activations, norms and biases."""
        return self.final_norm.dtype

    @property
    def weight_dtype(self) -> torch.dtype:
        """Of float matrices and the embedding; that of activations where all are quantized."""
        for matrix in (self.layers[0].qkv, self.embedding):
            if (dtype := float_dtype(matrix)) is not None:
                return dtype
        return self.dtype

    @property
    def has_float_matrices(self) -> bool:
        """Whether any matrix has `weight_dtype`."""
        return any(float_dtype(matrix) is not None for matrix in (self.layers[0].qkv, self.embedding))

    @property
    def device(self) -> torch.device:
        """Of all weights."""
        return self.final_norm.device

    @property
    def nbytes(self) -> int:
        """Bytes of all weights; tied ones count once."""
        tensors = [*tensors_of(self.embedding), self.final_norm]
        if self.lm_head is not self.embedding:
            tensors.extend(tensors_of(self.lm_head))
        for layer in self.layers:
            tensors.extend(layer.tensors())
        return sum(tensor.nbytes for tensor in tensors)


def load_weights(
    model: ModelSource,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    weight_dtype: torch.dtype | None = None,
    form: Callable[[Weight], Weight] | None = None,
    keeps_blocks: bool = False,
    splits_blocks: bool = False,
    show_progress: bool = True,
    part: ModelShard | None = None,
) -> LlamaWeights:
    """Load a model directory's safetensors, or a GGUF file, on `device`; a progress bar only on a terminal.

    Floats, and what a GGUF file has quantized, become `dtype`; matrices and the embedding become `weight_dtype` where
    that is given. An embedding that its family scales stays in `dtype`: the product has more bits than the file's
    values. Matrices of `d3engine weights quantize`, and published 8-bit floats with scales of rows, stay quantized;
    where `config` calls the latter floats they are dequantized.

    safetensors files are memory-mapped. On a CPU a tensor that is held as stored stays in the file, so the file must
    not be written to while the weights are in use (a rename may replace it). Other tensors are copied to their place
    and their pages released: the peak is the model and one tensor for each of up to four threads.

    With `keeps_blocks`, for the native library, quantized matrices of a GGUF file stay in ggml's blocks; with
    `splits_blocks`, for Triton's kernels, those of `SPLIT_TYPES` do so on `device`, codes and scales apart.
    `form`, for the native library, replaces each matrix by one of the same values in another layout. With `part` only a
    rank's shard is read and checked; `config` is still the whole model's.

    Raises `ModelFormatError`, naming tensor and file and before anything is allocated, for tensors that are missing,
    unexpected, doubled, or of the wrong shape or dtype; and for values that are not finite or too large for `dtype`.
    `check_tensors` has the rule of a tied lm_head.
    """
    with open_checkpoint(model) as checkpoint:
        if config.quantization is None:
            checkpoint = floats_of_rows(checkpoint)
        check_tensors(checkpoint, config)
        if part is not None:
            checkpoint, config = shard_checkpoint(checkpoint, config, part), part.config(config)
        total = sum(checkpoint.entries[name].nbytes for name in expected_tensors(config))
        with byte_progress(total, "loading weights", show_progress, delay=0.5, leave=False) as progress:
            held = weight_dtype or dtype
            types = SPLIT_TYPES if splits_blocks else frozenset(BLOCK_TYPES if keeps_blocks else ())
            given = (checkpoint, config, dtype, held, form, types, splits_blocks, torch.device(device), progress)
            loader = _Loader(*given)
            weights = loader.load()
    forget_header()
    return weights


def byte_progress(total: int, description: str, show: bool, **options: Any) -> tqdm[None]:
    """A progress bar of bytes, on a terminal only; `options` are further ones of tqdm."""
    disable = hides_bars() if show else True
    return tqdm(
        total=total, desc=description, unit="B", unit_scale=True, disable=disable, ncols=bar_columns(), **options
    )


def random_weights(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int,
    weight_dtype: torch.dtype | None = None,
) -> LlamaWeights:
    """Return weights as at the start of a training, for benchmarks, where only sizes matter.

    Normal with deviation 0.02, divided by sqrt(2 L) for the two matrices of a layer that write to the residual stream
    (GPT-2's rule, so that activations keep their size at any depth); norms are ones, biases zeros. Dtypes as of
    `load_weights`.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    residual = 0.02 / math.sqrt(2 * config.num_layers)

    def normal(rows: int, columns: int, deviation: float = 0.02) -> Tensor:
        matrix = torch.empty(rows, columns, dtype=weight_dtype or dtype, device=device)
        return matrix.normal_(0.0, deviation, generator=generator)

    def ones(*shape: int) -> Tensor:
        return torch.ones(*shape, dtype=dtype, device=device)

    def bias(rows: int, present: bool) -> Tensor | None:
        return torch.zeros(rows, dtype=dtype, device=device) if present else None

    def norm(name: str | None) -> Tensor | None:
        return None if name is None else ones(config.hidden_size)

    hidden, intermediate, norms = config.hidden_size, config.intermediate_size, config.tensor_names.norms
    qkv_rows = config.q_size + 2 * config.kv_size
    layers = tuple(
        LayerWeights(
            attention_norm=norm(norms.attention),
            qkv=normal(qkv_rows, hidden),
            qkv_bias=bias(qkv_rows, config.biases.qkv),
            head_norms=ones(2, config.head_dim) if config.has_head_norms else None,
            output=normal(hidden, config.q_size, residual),
            output_bias=bias(hidden, config.biases.output),
            mlp_norm=norm(norms.mlp),
            gate_up=normal(2 * intermediate, hidden),
            gate_up_bias=bias(2 * intermediate, config.biases.mlp),
            down=normal(hidden, intermediate, residual),
            down_bias=bias(hidden, config.biases.mlp),
            projection_norms=ones(config.q_size + config.kv_size) if config.has_projection_norms else None,
            attention_post_norm=norm(norms.attention_post),
            mlp_post_norm=norm(norms.mlp_post),
        )
        for _ in range(config.num_layers)
    )
    embedding = normal(config.vocab_size, hidden)
    lm_head = embedding if config.tie_word_embeddings else normal(config.vocab_size, hidden)
    return LlamaWeights(embedding, layers, ones(hidden), lm_head)


@dataclass(frozen=True)
class _Loader:
    """Copies the checked tensors of a checkpoint to their places."""

    checkpoint: Checkpoint
    config: ModelConfig
    dtype: torch.dtype
    weight_dtype: torch.dtype
    form: Callable[[Weight], Weight] | None
    block_types: frozenset[str]
    splits_blocks: bool
    device: torch.device
    progress: tqdm[None]

    def load(self) -> LlamaWeights:
        config, names, multipliers = self.config, self.config.tensor_names, self.config.multipliers
        is_tied = config.tie_word_embeddings
        table = partial(self._embedding, names.embedding, multipliers.on_embedding)
        head = partial(self._matrix, {"lm_head": None}, config.hidden_size)
        layers = [partial(self._layer, names.layer(index)) for index in range(config.num_layers)]
        embedding, *made = _at_once([table, *([] if is_tied else [head]), *layers], self.device)
        lm_head = self._held(embedding, [names.embedding]) if is_tied else made.pop(0)
        on_norm = multipliers.on_final_norm(is_tied)
        if on_norm == 1.0:
            final_norm = self._norm({names.final_norm: None})
        else:
            final_norm = self._vector_or_table(names.final_norm, on_norm, self.dtype)
        return LlamaWeights(embedding, tuple(made), final_norm, lm_head)

    def _layer(self, prefix: str) -> LayerWeights:
        config, biases, names = self.config, self.config.biases, self.config.tensor_names
        norms, attention = names.norms, prefix + "self_attn."
        heads = [self._heads(config.num_heads), self._heads(config.num_kv_heads)]
        parts = rows_of(names.qkv, [*heads, _Rows(config.kv_size)])
        qkv: _Modules = {attention + name: rows for name, rows in parts.items()}
        gate_up: _Modules = {prefix + name: None for name in names.gate_up}
        output: _Modules = {attention + "o_proj": None}
        down: _Modules = {prefix + names.down: None}
        return LayerWeights(
            attention_norm=self._layer_norm(prefix, norms.attention),
            qkv=self._matrix(qkv, config.hidden_size),
            qkv_bias=self._bias(qkv, biases.qkv),
            head_norms=self._head_norms(attention) if config.has_head_norms else None,
            output=self._matrix(output, config.q_size),
            output_bias=self._bias(output, biases.output),
            mlp_norm=self._layer_norm(prefix, norms.mlp),
            gate_up=self._matrix(gate_up, config.hidden_size),
            gate_up_bias=self._bias(gate_up, biases.mlp),
            down=self._matrix(down, config.intermediate_size),
            down_bias=self._bias(down, biases.mlp),
            projection_norms=self._projection_norms(attention) if config.has_projection_norms else None,
            attention_post_norm=self._layer_norm(prefix, norms.attention_post),
            mlp_post_norm=self._layer_norm(prefix, norms.mlp_post),
        )

    def _matrix(self, modules: _Modules, num_columns: int) -> Weight:
        """Return the modules' matrices on top of each other, in the config's scheme."""
        scheme = scheme_of(next(iter(modules)) + ".weight", self.config)
        if scheme is None:
            tensors = _with(".weight", modules)
            if self._stays_in_blocks(tensors):
                parts = [self._blocks_or_floats(name, rows) for name, rows in tensors.items()]
                return self._stack_of(parts, tensors)
            return self._held(self._stack(tensors, self.weight_dtype), tensors)
        names = _with(VALUES, modules), _with(SCALES, modules)
        values, scales = (self._stack(tensors, self.dtype) for tensors in names)
        return self._held(FORMATS[scheme].of(values, scales, num_columns), names[0])

    def _stack_of(self, parts: Sequence[Stackable], names: Collection[str]) -> Weight:
        """The parts as one matrix in its layout; where that is another, from where they lie in the file."""
        whole = parts[0] if len(parts) == 1 else StackedWeight(tuple(parts))
        held = self._held(whole, names)
        return stacked(held.parts) if isinstance(held, StackedWeight) else held

    def _stays_in_blocks(self, tensors: Collection[str]) -> bool:
        """Whether a matrix of these tensors is held as a GGUF file has it."""
        kinds = {self.checkpoint.entries[name].type_name for name in tensors}
        if kinds.isdisjoint(self.block_types):
            return False
        if self.splits_blocks and any(self.checkpoint.order_of(name) is not None for name in tensors):
            return False  # Triton's kernels gather no inputs
        halves = len(tensors) == 2  # of gates and what they let through, which are read together
        return not halves or (len(kinds) == 1 and self._have_one_order(tensors))

    def _have_one_order(self, tensors: Collection[str]) -> bool:
        """Whether the columns of matrices in blocks are the same input channels."""
        orders = [self.checkpoint.order_of(name) for name in tensors]
        given = [order for order in orders if order is not None]
        return not given or (len(given) == len(orders) and all(torch.equal(order, given[0]) for order in given))

    def _blocks_or_floats(self, name: str, rows: list[_Rows] | None) -> BlockWeight | SplitBlockWeight | Tensor:
        """The rows of one tensor, in ggml's blocks where the file has such."""
        entry = self.checkpoint.entries[name]
        if entry.type_name not in self.block_types:
            return self._stack({name: rows}, self.weight_dtype)
        source = self.checkpoint.read_blocks(name)
        target = source
        if rows is not None and any(part.num_heads is not None for part in rows):
            target = torch.empty_like(source)
            _copy_parts(source, target, rows)
        weight = BlockWeight(entry.type_name, target, entry.shape[1], self.checkpoint.order_of(name))
        if not weight.is_finite:
            raise ModelFormatError(f"{entry.file}: tensor {name!r} holds NaN or infinity")
        if not self.splits_blocks:
            self.progress.update(entry.nbytes)
            return weight
        split = split_blocks(weight, self.device)
        self.checkpoint.give_back(name)
        self.progress.update(entry.nbytes)
        return split

    def _held(self, matrix: Weight, names: Iterable[str]) -> Weight:
        """A matrix of these tensors in its layout; if that is in new memory, the file's pages are released."""
        made = matrix if self.form is None else self.form(matrix)
        if made is not matrix and all(tensor is not matrix for tensor in tensors_of(made)):
            for name in names:
                self.checkpoint.give_back(name)
        return made

    def _bias(self, modules: _Modules, present: bool) -> Tensor | None:
        return self._stack(_with(".bias", modules), self.dtype) if present else None

    def _heads(self, count: int) -> _Rows:
        """The rows of `count` heads of queries or keys."""
        config = self.config
        rows = count * config.head_dim
        return _Rows(rows) if config.has_interleaved_rope else _Rows(rows, count, config.rotary_dim)

    def _head_norms(self, attention: str) -> Tensor:
        norms = self._norm({attention + name: [self._heads(1)] for name in HEAD_NORMS})
        return norms.view(len(HEAD_NORMS), self.config.head_dim)

    def _projection_norms(self, attention: str) -> Tensor:
        heads = self.config.num_heads, self.config.num_kv_heads
        return self._norm({attention + name: [self._heads(n)] for name, n in zip(HEAD_NORMS, heads, strict=True)})

    def _layer_norm(self, prefix: str, name: str | None) -> Tensor | None:
        return None if name is None else self._norm({f"{prefix}{name}.weight": None})

    def _norm(self, norms: _Modules) -> Tensor:
        """What norms multiply by; with an offset it is rounded once."""
        offset = self.config.norm_offset
        return (self._stack(norms, torch.float32) + offset).to(self.dtype) if offset else self._stack(norms, self.dtype)

    def _embedding(self, name: str, multiplier: float) -> Table:
        if scheme_of(name, self.config) is None:
            # No kernel reads single rows of columns in another order.
            if multiplier == 1.0 and self._stays_in_blocks([name]) and self.checkpoint.order_of(name) is None:
                blocks = self._blocks_or_floats(name, None)
                held = self._held(blocks, [name]) if self.config.tie_word_embeddings else blocks
                assert isinstance(held, Table), "single rows are read from it"
                return held
            return self._vector_or_table(name, multiplier, self.weight_dtype)
        module: _Modules = {name.removesuffix(".weight"): None}
        values, scales = (self._stack(_with(suffix, module), self.dtype) for suffix in (VALUES, SCALES))
        int8 = Int8Weight(values, scales if multiplier == 1.0 else scales * multiplier)
        table = self._held(int8, _with(VALUES, module))
        assert isinstance(table, Table), "single rows are read from it"
        return table

    def _vector_or_table(self, name: str, multiplier: float, dtype: torch.dtype) -> Tensor:
        """One tensor times a number; with the number 1 it may stay in its file."""
        if multiplier == 1.0:
            return self._stack({name: None}, dtype)
        entry = self.checkpoint.entries[name]
        scaled = torch.empty(entry.shape, dtype=self.dtype, device=self.device)
        self._copy(name, scaled, None, multiplier)
        return scaled

    def _stack(self, tensors: _Modules, dtype: torch.dtype) -> Tensor:
        """Return the named tensors on top of each other, those of float in `dtype`."""
        entries = [self.checkpoint.entries[name] for name in tensors]
        held = held_dtype(entries[0], dtype)
        is_held_as_it_is = self.device.type == "cpu" and dtype_of(entries[0].dtype) == held
        if len(entries) == 1 and not any(tensors.values()) and is_held_as_it_is:
            return self._mapped(entries[0])
        rows = [entry.shape[0] for entry in entries]
        stacked = torch.empty((sum(rows), *entries[0].shape[1:]), dtype=held, device=self.device)
        for (name, parts), target in zip(tensors.items(), torch.split(stacked, rows), strict=True):
            self._copy(name, target, parts)
        return stacked

    def _mapped(self, entry: TensorEntry) -> Tensor:
        source = self.checkpoint.read(entry.name)
        check_values(entry, source, source)
        self.progress.update(entry.nbytes)
        return source

    def _copy(self, name: str, target: Tensor, parts: list[_Rows] | None, multiplier: float = 1.0) -> None:
        source = self.checkpoint.read(name)
        _copy_parts(source, target, parts or [_Rows(source.shape[0])])
        if multiplier != 1.0:  # after the conversion, as transformers rounds
            target.mul_(multiplier)
        check_values(self.checkpoint.entries[name], source, target)
        self.checkpoint.give_back(name)
        self.progress.update(self.checkpoint.entries[name].nbytes)


@dataclass(frozen=True)
class _Rows:
    """`count` rows of a tensor; of each of `num_heads` heads the first `rotary_dim` become adjacent pairs."""

    count: int
    num_heads: int | None = None
    rotary_dim: int = 0


_Modules: TypeAlias = Mapping[str, list[_Rows] | None]
"""Modules or tensors to stack, from top to bottom; None: all rows as stored."""

_LOADING_THREADS = 4
"""Layers that are loaded at once at most: each holds a tensor twice for a while."""


def _at_once(parts: Sequence[Callable[[], Any]], device: torch.device) -> list[Any]:
    """What these parts of a model's weights are; on a CPU several are made at once."""
    if device.type != "cpu":  # the current device and stream are a thread's own
        return [part() for part in parts]
    with ThreadPoolExecutor(min(torch.get_num_threads(), _LOADING_THREADS)) as pool:
        return list(pool.map(lambda part: part(), parts))


def _with(suffix: str, modules: _Modules) -> _Modules:
    return {module + suffix: rows for module, rows in modules.items()}


def _copy_parts(source: Tensor, target: Tensor, parts: list[_Rows]) -> None:
    sizes = [part.count for part in parts]
    for part, given, place in zip(parts, torch.split(source, sizes), torch.split(target, sizes), strict=True):
        _copy_rows(given, place, part)


def _copy_rows(source: Tensor, target: Tensor, part: _Rows) -> None:
    if part.num_heads is None:
        target.copy_(source)
    else:  # to_adjacent_pairs, but straight into place: no permuted copy in between
        heads, places = (rows.view(part.num_heads, -1, *rows.shape[1:]) for rows in (source, target))
        turned = part.rotary_dim
        for half, place in zip(heads[:, :turned].chunk(2, dim=1), (0, 1), strict=True):
            places[:, place:turned:2].copy_(half)
        places[:, turned:].copy_(heads[:, turned:])


def quantize_matrix(matrix: Weight, scheme: str) -> QuantizedWeight:
    """Return a float matrix [N, K] as "int8" or "fp8" (one scale per row), or "int4" (a scale for 128 columns).

    Raises `InvalidValueError` for another scheme and for a matrix that is quantized already, `ValueError` for NaN or
    infinity in it.
    """
    require(scheme in QUANTIZATION_SCHEMES, "scheme", scheme, f"one of {', '.join(QUANTIZATION_SCHEMES)}")
    if not isinstance(matrix, Tensor):
        raise InvalidValueError("weights", type(matrix).__name__, "float matrices")
    return QUANTIZERS[scheme](matrix)


def check_head_scheme(scheme: str, is_tied: bool) -> None:
    """Raise `InvalidValueError` unless an LM head, which may be the embedding, can have this scheme."""
    schemes = head_schemes(is_tied)
    tied = " for a model whose head is its embedding" if is_tied else ""
    require(scheme in schemes, "lm_head", scheme, f"one of {', '.join(schemes)}{tied}")


def quantize_weights(weights: LlamaWeights, scheme: str, *, lm_head: str = DEFAULT_HEAD_SCHEME) -> LlamaWeights:
    """Return `weights` with the matrices of the layers and the LM head quantized on their device.

    The head becomes `lm_head`, one of LM_HEAD_SCHEMES. Norms, biases and an embedding that is no head are those of
    `weights`. Raises as `quantize_matrix`, and `InvalidValueError` for a scheme that the head cannot have.
    """
    is_tied = weights.lm_head is weights.embedding
    check_head_scheme(lm_head, is_tied)
    return with_matrices(
        weights,
        lambda matrix: quantize_matrix(matrix, scheme),
        lambda matrix: matrix if lm_head == "float" else quantize_matrix(matrix, lm_head),
    )


def in_layout(weights: LlamaWeights, form: Callable[[Weight], Weight]) -> LlamaWeights:
    """Return `weights` with every matrix in the layout that `form` gives it, of the same values.

    The embedding stays, unless it is the head and single rows can be read from the new layout.
    """
    made = with_matrices(weights, form)
    if made.lm_head is not made.embedding:
        return made
    head = form(made.lm_head)
    return replace(made, lm_head=head, embedding=head if isinstance(head, Table) else made.embedding)


def with_matrices(
    weights: LlamaWeights, change: Callable[[Weight], Weight], change_head: Callable[[Weight], Weight] | None = None
) -> LlamaWeights:
    """Return `weights` with `change` applied to the layers' matrices and `change_head` to the LM head.

    None: `change` for an untied head, and none for the embedding.
    """

    layers = tuple(
        replace(
            layer,
            qkv=change(layer.qkv),
            output=change(layer.output),
            gate_up=change(layer.gate_up),
            down=change(layer.down),
        )
        for layer in weights.layers
    )
    if weights.lm_head is not weights.embedding:
        return replace(weights, layers=layers, lm_head=(change_head or change)(weights.lm_head))
    table = weights.embedding if change_head is None else change_head(weights.embedding)
    assert isinstance(table, Table), "single rows are read from it"
    return replace(weights, layers=layers, embedding=table, lm_head=table)
