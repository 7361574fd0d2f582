"""A kernel launch as a value, and the registry of launches that `kernels/inspect.py` compiles without a GPU.

Every operation first builds a `Launch` from its tensors and then runs it. Building reads shapes, strides and dtypes
only, so it works on meta tensors: what is inspected ahead of time is, tile by tile, what a GPU would run.

To add a kernel: give its file a function `launches(shape, dtype)` that yields (label, `Launch`) made by the file's own
builder from meta tensors, and add the file to `MODULES`; those of projections take a third argument, the form of the
weights, and stand in `PROJECTIONS` too. Every kernel has the argument `PDL`: then it may be launched before the one in
front of it has ended, see `PROGRAMMATIC`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from d3engine.kernels.kv_pool import FP8, Fp8Pool
from d3engine.kernels.matrices import Weight
from d3engine.kernels.quantized import FORMATS, GROUP, Fp8Weight, Int4Weight, Int8Weight
from d3engine.kernels.split_blocks import SPLIT_TYPES, SplitBlockWeight, split_columns
from d3engine.kernels.target import NO_TARGET, Target, target_of

if triton.knobs.runtime.interpret and triton.__version__.startswith("3.6."):
    # Its interpreter makes an index of an array of one element, which NumPy refuses from 2.4 on.
    from triton.runtime import interpreter

    def _patch_tensor(tensor: Any, scope: Any, patch: Any = interpreter._patch_lang_tensor) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = _patch_tensor

MODULES = (
    "rms_norm",
    "qkv",
    "linear_residual",
    "gate_up",
    "lm_head",
    "low_rank",
    "unpack",
    "fp8_rows",
    "sample",
    "copy_entries",
    "paged_attention",
    "decode_rows",
    "programmatic",
)
"""The files of this package that have a function `launches`, in the order of a layer."""

PROJECTIONS = ("qkv", "linear_residual", "gate_up", "lm_head", "unpack")
"""Those of `MODULES` that read weights, which may be quantized."""

QUANTIZED = tuple(FORMATS)
"""Forms of weights beside floats and blocks."""

BLOCKS = tuple(sorted(SPLIT_TYPES))
"""Types of blocks that weights may be in."""

PROGRAMMATIC = False
"""Programmatic dependent launch: a kernel begins while the one before it ends, and loads weights until that has ended.

The one switch for all kernels; it takes effect on targets that have it. An engine turns it on once its device
has shown that it can (`programmatic.py`).
"""

ROW_COUNTS = (1, 8, 16, 32, 64, 128)
"""Row counts worth inspecting: one for every path of the products, and a few between."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of one model that decide how its kernels are compiled."""

    name: str
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    block_size: int = 16
    bias: bool = False
    head_norms: bool = False
    projection_norms: bool = False
    post_norms: bool = False
    activation: str = "silu"
    soft_caps: bool = False


SHAPES = {
    shape.name: shape
    for shape in (
        ModelShape("tiny", 256, 4, 2, 64, 512, 512, bias=True),
        ModelShape("small-heads", 64, 4, 2, 16, 128, 512),
        ModelShape("llama2-7b", 4096, 32, 32, 128, 11008, 32000),
        ModelShape("llama2-13b", 5120, 40, 40, 128, 13824, 32000),
        ModelShape("llama2-70b", 8192, 64, 8, 128, 28672, 32000),
        ModelShape("llama3-8b", 4096, 32, 8, 128, 14336, 128256),
        ModelShape("qwen3-8b", 4096, 32, 8, 128, 12288, 151936, head_norms=True),
        ModelShape("olmo2-7b", 4096, 32, 32, 128, 11008, 100352, projection_norms=True, post_norms=True),
        ModelShape(
            "gemma2-9b", 3584, 16, 8, 256, 14336, 256000, post_norms=True, activation="gelu_tanh", soft_caps=True
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel, its grid, and all its arguments by name: tensors, numbers, None and constexprs alike.

    Tensors only need to be real when `run` is called.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    options: dict[str, Any] = field(default_factory=dict)  # further compile options, such as maxnreg
    programmatic_options: dict[str, Any] = field(default_factory=dict)  # in their place under programmatic launch
    least_capability: int = 0  # the first compute capability that has its instructions, without the point
    turns: int = 0  # at most, in which the last of its programs puts together what others have left
    rounds: int | None = None  # that its loop goes round each time; None where they are many
    loads_before: int = 0  # one after another, each time before the loop
    streams: bool = False  # whether reading weights or the cache once is its work: then bandwidth is its limit

    def for_target(self, target: Target) -> tuple[dict[str, Any], dict[str, Any]]:
        """All arguments and all compile options on that kind of GPU.

        Fused multiply-adds are asked for, as Triton 3.10 changes the default.
        """
        options = {
            "num_warps": self.num_warps,
            "num_stages": target.stages(self.num_stages),
            "enable_fp_fusion": True,
            **self.options,
        }
        programmatic = PROGRAMMATIC and target.has_programmatic_launch
        if programmatic:
            options |= {"launch_pdl": True, **self.programmatic_options}
        filled: dict[str, Any] = {"PDL": programmatic}
        if "STAGES" in self.arguments:
            filled["STAGES"] = target.stages(self.arguments["STAGES"])
        if "num_rows_ptr" in self.arguments and self.arguments["num_rows_ptr"] is None:
            filled["num_rows_ptr"] = every_row(self._device())
        return self.arguments | filled, target.options(options)

    def run(self) -> Any:
        """Launch on the current stream of the tensors' device; a grid without programs is no launch.

        Returns the compiled kernel; None where nothing was compiled: without programs, and in the interpreter.
        """
        if not all(self.grid):
            return None
        device = self._device()
        arguments, options = self.for_target(_target(device))
        # Triton launches on the current device, wherever the tensors are.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            return self.kernel[self.grid](**arguments, **options)

    def in_order(self) -> list[Any]:
        """All arguments of the kernel as `run` gives them, in its order."""
        arguments, _ = self.for_target(_target(self._device()))
        return [arguments[name] for name in self.kernel.arg_names]

    def _device(self) -> torch.device:
        return next(value.device for value in self.arguments.values() if isinstance(value, Tensor))


@cache
def every_row(device: torch.device) -> Tensor:
    """The count of live rows that kernels read where there is none: prompts run the kernels that graphs hold."""
    return torch.full((1,), torch.iinfo(torch.int32).max, dtype=torch.int32, device=device)


@cache
def _target(device: torch.device) -> Target:
    """What kernels on this device are compiled for."""
    return NO_TARGET if triton.knobs.runtime.interpret else target_of(device)


def strided(**tensors: Tensor) -> dict[str, Any]:
    """The arguments of tensors whose rows may lie apart: of `x` they are `x_ptr` and `x_stride`."""
    pointers: dict[str, Any] = {f"{name}_ptr": tensor for name, tensor in tensors.items()}
    return pointers | {f"{name}_stride": tensor.stride(0) for name, tensor in tensors.items()}


def row_counts(num_rows: Tensor | None, rows: int) -> dict[str, Any]:
    """The arguments of a kernel that computes the rows that live, of `rows`."""
    return {"num_rows_ptr": num_rows, "total_rows": rows}


def meta(*shape: int, dtype: torch.dtype) -> Tensor:
    """A tensor without memory, for the functions `launches`."""
    return torch.empty(shape, dtype=dtype, device="meta")


def meta_fp8_pool(shape: ModelShape, block_size: int) -> Fp8Pool:
    """A pool of 8-bit entries without memory."""
    values = meta(1024, 2, block_size, shape.num_kv_heads, shape.head_dim, dtype=FP8)
    return Fp8Pool(values, meta(1024, 2, shape.num_kv_heads, block_size, dtype=torch.float32))


def meta_weight(outputs: int, columns: int, *, dtype: torch.dtype, weights: str) -> Weight:
    """A matrix [outputs, columns] without memory: of `dtype`, or as `weights`, of `QUANTIZED` or `BLOCKS`, says."""
    scales = meta(outputs, dtype=torch.float32)
    if weights == "int8":
        return Int8Weight(meta(outputs, columns, dtype=torch.int8), scales)
    if weights == "fp8":
        return Fp8Weight(meta(outputs, columns, dtype=FP8), scales)
    if weights == "fp8_groups":
        of_groups = meta(outputs, triton.cdiv(columns, GROUP), dtype=torch.float32)
        return Fp8Weight(meta(outputs, columns, dtype=FP8), of_groups)
    if weights == "int4":
        groups = triton.cdiv(columns, GROUP)
        packed = meta(outputs, groups * GROUP // 2, dtype=torch.uint8)
        return Int4Weight(packed, meta(outputs, groups, dtype=torch.float32), columns)
    if weights in SPLIT_TYPES:
        codes, words = split_columns(weights, columns)
        split = meta(outputs, codes, dtype=torch.uint8), meta(outputs, words, dtype=torch.int32)
        return SplitBlockWeight(weights, *split, columns)
    return meta(outputs, columns, dtype=dtype)


def registered(
    shape: ModelShape,
    dtype: torch.dtype,
    weights: str = "",
    operations: Iterable[str] = MODULES,
    *,
    batch_invariant: bool = False,
) -> Iterator[tuple[str, str, Launch]]:
    """Yield (operation, label, launch) of the kernels for one model; its matrices are `weights`, see `meta_weight`.

    With `batch_invariant` projections are those of `batch_invariant.py`.
    """
    for name in MODULES:
        if name not in operations or (batch_invariant and name == "unpack"):  # none is left to torch.matmul there
            continue
        module = importlib.import_module(f"{__package__}.{name}")
        given = {"batch_invariant": True} if batch_invariant else {}
        found = (
            module.launches(shape, dtype, weights, **given) if name in PROJECTIONS else module.launches(shape, dtype)
        )
        for label, launch in found:
            yield name, label, launch


RUN: tl.constexpr = tl.constexpr(64)
"""Columns that change places among themselves: four threads with 16 each."""

_GROUP: tl.constexpr = tl.constexpr(GROUP)


def arranged_columns(columns: int) -> int:
    """Columns of a row of `columns` that is stored in this order: whole groups, filled up with zeros."""
    return -(-columns // GROUP) * GROUP


@triton.jit
def places_of(columns):
    """Where in its row the value of each column stands."""
    thread, step, half, nth = columns % RUN // 16, columns % 16 // 4, columns % 4 // 2, columns % 2
    return columns // RUN * RUN + step * 16 + half * 8 + thread * 2 + nth


@triton.jit
def in_places(stored):
    """A tile [outputs, columns] of weights in their own order with its columns in their places; nothing is moved."""
    OUTPUTS: tl.constexpr = stored.shape[0]
    COLUMNS: tl.constexpr = stored.shape[1]
    by_thread = tl.reshape(stored, (OUTPUTS, COLUMNS // RUN, 4, 4, 2, 2))
    return tl.reshape(tl.trans(by_thread, (0, 1, 3, 4, 2, 5)), (OUTPUTS, COLUMNS))
