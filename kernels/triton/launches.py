"""A kernel launch as a value, and the registry of launches that `kernels/inspect.py` compiles without a GPU.

Every operation first builds a `Launch` from its tensors and then runs it. Building reads shapes, strides and dtypes
only, so it works on meta tensors: what is inspected ahead of time is, tile by tile, what a GPU would run.

To add a kernel: give its file a function `launches(shape, dtype)` that yields (label, `Launch`) made by the file's own
builder from meta tensors, and add the file to `MODULES`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

MODULES = (
    "rms_norm",
    "qkv",
    "linear_residual",
    "gate_up",
    "lm_head",
    "sample",
    "copy_entries",
    "paged_attention",
    "decode_rows",
)
"""The files of this package that have a function `launches`, in the order of a layer."""

ROW_COUNTS = (1, 8, 16, 32, 64)
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


SHAPES = {
    shape.name: shape
    for shape in (
        ModelShape("tiny", 256, 4, 2, 64, 512, 512, bias=True),
        ModelShape("llama2-7b", 4096, 32, 32, 128, 11008, 32000),
        ModelShape("llama2-13b", 5120, 40, 40, 128, 13824, 32000),
        ModelShape("llama2-70b", 8192, 64, 8, 128, 28672, 32000),
        ModelShape("llama3-8b", 4096, 32, 8, 128, 14336, 128256),
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

    @property
    def compile_options(self) -> dict[str, Any]:
        """All options of the compiler; fused multiply-adds are asked for, as Triton 3.10 changes the default."""
        return {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "enable_fp_fusion": True,
            **self.options,
        }

    def run(self) -> None:
        """Launch on the current stream; a grid without programs is no launch."""
        if all(self.grid):
            self.kernel[self.grid](**self.arguments, **self.compile_options)


def meta(*shape: int, dtype: torch.dtype) -> Tensor:
    """A tensor without memory, for the functions `launches`."""
    return torch.empty(shape, dtype=dtype, device="meta")


def registered(shape: ModelShape, dtype: torch.dtype) -> Iterator[tuple[str, str, Launch]]:
    """Yield (operation, label, launch) of every kernel for one model; a file that does not exist yet has none."""
    for name in MODULES:
        try:
            module = importlib.import_module(f"{__package__}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{__package__}.{name}":
                raise
            continue
        for label, launch in module.launches(shape, dtype):
            yield name, label, launch
