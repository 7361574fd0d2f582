"""The interpreter as a compiler: what it returns for a launch takes addresses, as a compiled kernel does."""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from d3engine.kernels.triton.launches import Launch


class Addressed:
    """One launch's kernel, for any memory: `kernel[grid](*arguments)`, with a number where it had a tensor."""

    # Everything else must be what it was: a compiled kernel has no other.

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._first = launch.in_order()

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert grid == (*self._launch.grid, 1, 1)[:3]
        return self._run

    def _run(self, *values: Any) -> None:
        arguments = {}
        for name, value, first in zip(self._launch.kernel.arg_names, values, self._first, strict=True):
            if isinstance(first, Tensor):
                assert type(value) is int
                assert value % 16 == first.data_ptr() % 16 or first.numel() == 0
                arguments[name] = tensor_at(value, first)
            else:
                assert type(value) is type(first)
                assert value == first
                arguments[name] = value
        self._launch.kernel[self._launch.grid](**arguments)


def tensor_at(address: int, like: Tensor) -> Tensor:
    """The memory at `address` as a tensor of the shape, the strides and the dtype of another."""
    if like.numel() == 0:
        return torch.empty_like(like)
    extent = sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True))
    memory = (ctypes.c_char * ((extent + 1) * like.element_size())).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).view(like.dtype).as_strided(like.shape, like.stride())
