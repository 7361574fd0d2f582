"""A model as the library reads it: the addresses and kinds of its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import POINTER, Structure, addressof, c_float, c_int32, c_int64, c_void_p, pointer
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from d3engine.kernels.bf12 import PackedWeight
from d3engine.kernels.blocks import StackedWeight
from d3engine.kernels.kv_pool import FP8, NO_WINDOW, KVPool, values_and_scales
from d3engine.kernels.low_rank import LowRankMap, Maps
from d3engine.kernels.matrices import Table, Weight

_FLOAT_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 9}
"""Of `D3Kind` in `types.h`; a format knows its own."""
ACTIVATIONS = ("silu", "gelu_tanh")
"""Of the gates, by their numbers in `D3Activation`."""


class NativeError(RuntimeError):
    """The library refused its arguments, or failed."""


class Bf12Structure(Structure):
    _fields_ = (("exponent", c_int32), *((name, c_void_p) for name in ("starts", "columns", "weights")))


class MatrixStructure(Structure):
    pass


MatrixStructure._fields_ = (
    *((name, c_int32) for name in ("kind", "rows", "columns")),
    *((name, c_void_p) for name in ("values", "scales", "bias")),
    ("bf12", Bf12Structure),
    ("below", POINTER(MatrixStructure)),
    ("order", c_void_p),
)


class LayerStructure(Structure):
    _fields_ = (
        ("attention_norm", c_void_p),
        ("qkv", MatrixStructure),
        ("output", MatrixStructure),
        ("mlp_norm", c_void_p),
        ("gate_up", MatrixStructure),
        ("down", MatrixStructure),
        ("head_norms", c_void_p),
        ("rotations", c_void_p),
        ("window", c_int32),
        *((name, c_void_p) for name in ("projection_norms", "attention_post_norm", "mlp_post_norm")),
    )


class BridgeStructure(Structure):
    _fields_ = (("first", c_int32), ("stop", c_int32), ("weight", MatrixStructure), ("down", MatrixStructure))


class BridgesStructure(Structure):
    _fields_ = (("bridges", POINTER(BridgeStructure)), ("count", c_int64))


_SIZES = (
    *("num_layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocab"),
    *("block_size", "max_blocks", "num_blocks", "num_slots", "max_positions", "max_rows", "num_threads", "isa"),
)


class ModelStructure(Structure):
    _fields_ = (
        *((name, c_int32) for name in _SIZES),
        ("eps", c_float),
        ("scale", c_float),
        ("embedding", MatrixStructure),
        ("lm_head", MatrixStructure),
        ("head_tokens", c_void_p),
        ("num_head_tokens", c_int64),
        ("layers", POINTER(LayerStructure)),
        *((name, c_void_p) for name in ("final_norm", "pool", "pool_scales")),
        ("activation", c_int32),
        *((name, c_float) for name in ("embedding_scale", "attention_cap", "logit_cap")),
    )


@dataclass(frozen=True, eq=False)
class Linear:
    """A weight matrix and its bias, float32 [rows] or None."""

    weight: Weight
    bias: Tensor | None = None

    def structure(self) -> MatrixStructure:
        weight = self.weight
        if isinstance(weight, StackedWeight):
            return self._parts[0]
        bias = None if self.bias is None else address_of(self.bias, torch.float32)
        if isinstance(weight, Tensor):
            if weight.dtype not in _FLOAT_KINDS:
                raise NativeError(f"the native library knows no {weight.dtype} matrices")
            kind = _FLOAT_KINDS[weight.dtype]
            return MatrixStructure(kind, *weight.shape, address_of(weight, weight.dtype), None, bias)
        if weight.native_kind is None:
            raise NativeError(f"the native library knows no matrices of {type(weight).__name__}")
        values, *others = (address_of(tensor, tensor.dtype) for tensor in weight.tensors)
        if isinstance(weight, PackedWeight):
            bf12 = Bf12Structure(weight.exponent, *others)
            return MatrixStructure(weight.native_kind, *weight.shape, values, None, bias, bf12)
        made = MatrixStructure(weight.native_kind, *weight.shape, values, *(others or (None,)), bias)
        if weight.order is not None:
            made.order = address_of(weight.order, torch.int32)
        return made

    @cached_property
    def _parts(self) -> list[MatrixStructure]:
        """The structures of a stacked matrix, each pointing to the one below it; the library reads them in place."""
        assert isinstance(self.weight, StackedWeight)
        sizes = [part.shape[0] for part in self.weight.parts]
        biases = [None] * len(sizes) if self.bias is None else torch.split(self.bias, sizes)
        made = [Linear(part, bias).structure() for part, bias in zip(self.weight.parts, biases, strict=True)]
        for above, below in pairwise(made):
            above.below = pointer(below)
        return made


@dataclass(frozen=True, eq=False)
class NativeLayer:
    """The weights of one layer; norms are float32, those that are None are left out.

    `rotations` complex64 [positions, head_dim / 2], None for a layer without RoPE. `head_norms` [2, head_dim], of query
    heads and of key heads before RoPE, or None; `projection_norms` [queries + keys], of all of them together. Post
    norms [hidden] are of a sublayer's output. `window`: positions that one attends to at most, itself included.
    """

    attention_norm: Tensor | None
    qkv: Linear
    output: Linear
    mlp_norm: Tensor | None
    gate_up: Linear
    down: Linear
    rotations: Tensor | None
    head_norms: Tensor | None = None
    window: int = NO_WINDOW
    projection_norms: Tensor | None = None
    attention_post_norm: Tensor | None = None
    mlp_post_norm: Tensor | None = None

    @property
    def matrices(self) -> tuple[Linear, ...]:
        return self.qkv, self.output, self.gate_up, self.down

    def structure(self) -> LayerStructure:
        return LayerStructure(
            _address_or_none(self.attention_norm),
            self.qkv.structure(),
            self.output.structure(),
            _address_or_none(self.mlp_norm),
            self.gate_up.structure(),
            self.down.structure(),
            _address_or_none(self.head_norms),
            None if self.rotations is None else address_of(self.rotations, torch.complex64),
            self.window,
            *map(_address_or_none, (self.projection_norms, self.attention_post_norm, self.mlp_post_norm)),
        )


@dataclass(frozen=True, eq=False)
class NativeModel:
    """A model with float32 activations, and its KV pool [blocks, 2, block_size, kv heads, head_dim].

    The pool holds float32 or 8-bit floats. Matrices are of any kind in `D3Kind`, the embedding of one whose single rows
    are read. Rotations have `max_positions` rows; `scale` multiplies attention scores, `embedding_scale` rows of the
    embedding. `activation` is one of `ACTIVATIONS`; the soft caps of scores and logits are above 0, or None.
    `head_tokens` int64, ascending, are the tokens of the head's rows where it is a draft model's and shortened; None:
    all tokens.
    """

    layers: tuple[NativeLayer, ...]
    embedding: Table
    final_norm: Tensor
    lm_head: Weight
    pool: KVPool
    num_heads: int
    max_positions: int
    eps: float
    scale: float
    head_tokens: Tensor | None = None
    activation: str = ACTIVATIONS[0]
    embedding_scale: float = 1.0
    attention_cap: float | None = None
    logit_cap: float | None = None


@dataclass(frozen=True, eq=False)
class NativeBridge:
    """A linear shortcut over the layers [first, stop): h becomes h + weight h + bias, or h + weight (down h) + bias.

    `weight` is [H, H], or [H, r] with `down` [r, H]; it has a bias.
    """

    first: int
    stop: int
    weight: Linear
    down: Linear | None = None

    def structure(self) -> BridgeStructure:
        down = MatrixStructure() if self.down is None else self.down.structure()
        return BridgeStructure(self.first, self.stop, self.weight.structure(), down)


class LowRankStructure(Structure):
    """`D3LowRank`."""

    _fields_ = (
        *((name, c_int32) for name in ("kind", "rank", "columns", "outputs")),
        *((name, c_int64) for name in ("down_stride", "up_stride")),
        *((name, c_void_p) for name in ("down", "up")),
    )


class NativeMaps:
    """The maps of an adapter, [layers, `LAYER_MAPS`] and the LM head's; `address` is that of their `D3LowRank`s."""

    def __init__(self, maps: Maps) -> None:
        self.maps = maps  # every step reads their memory
        self._array = (LowRankStructure * len(maps))(*(_low_rank_structure(one) for one in maps))

    @property
    def address(self) -> int:
        return addressof(self._array)


def _low_rank_structure(one: LowRankMap | None) -> LowRankStructure:
    if one is None:
        return LowRankStructure()
    for matrix in (one.down, one.up):
        if matrix.device.type != "cpu" or matrix.stride(1) != 1 or matrix.dtype not in _FLOAT_KINDS:
            raise NativeError(f"a map of {matrix.dtype} on {matrix.device} is not rows of floats on the CPU")
    kind, sizes = _FLOAT_KINDS[one.down.dtype], (one.rank, one.down.shape[1], one.up.shape[1])
    strides = one.down.stride(0), one.up.stride(0)
    return LowRankStructure(kind, *sizes, *strides, one.down.data_ptr(), one.up.data_ptr())


class NativeBridges:
    """Bridges over all windows of layers that rows may skip; `address` is that of their `D3Bridges`."""

    def __init__(self, bridges: Sequence[NativeBridge]) -> None:
        self.bridges = bridges  # every step reads their memory
        self._array = (BridgeStructure * len(bridges))(*(bridge.structure() for bridge in bridges))
        self._structure = BridgesStructure(self._array, len(bridges))

    @property
    def address(self) -> int:
        return addressof(self._structure)


def _address_or_none(tensor: Tensor | None) -> int | None:
    """Of float32 numbers."""
    return None if tensor is None else address_of(tensor, torch.float32)


def address_of(tensor: Tensor, dtype: torch.dtype) -> int:
    """The address of a tensor; raises `NativeError` unless it is contiguous memory of `dtype` on the CPU."""
    if tensor.dtype != dtype or tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise NativeError(f"a {tensor.dtype} tensor on {tensor.device} is not contiguous {dtype} on the CPU")
    return tensor.data_ptr()


def pool_addresses(pool: KVPool) -> tuple[int, int | None]:
    """The addresses of a pool of float32, or of 8-bit floats and their scales; raises `NativeError` for others."""
    values, scales = values_and_scales(pool)
    if scales is None:
        return address_of(values, torch.float32), None
    return address_of(values, FP8), address_of(scales, torch.float32)
