"""What a format of weight matrices says about itself: operations, loaders and the native library ask it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor


class WeightFormat(ABC):
    """A matrix [N, K] in another format than floats, made of `tensors`.

    A subclass is an entry of the table of formats: what it does not say here holds for none but itself.
    """

    values_a_byte: ClassVar[int] = 0
    """Of a format that Triton's kernels read as `values` and `scales`; 0 for others, and blocks."""
    least_capability: ClassVar[int] = 0
    """The first compute capability that reads it, without the point; 0 for any."""
    native_isas: ClassVar[frozenset[str]] = frozenset()
    """Instruction sets of the native library that are better with it, of those that are not always better."""
    meets_bytes: ClassVar[bool] = False
    """Whether rows are rounded to 8 bits before they meet it."""
    float_dtype: ClassVar[torch.dtype | None] = None
    """Of the floats that it holds without loss."""

    order: Tensor | None = None
    """int32 [K]: the input channel of each stored column; None: they are in the order of the channels."""

    @property
    @abstractmethod
    def native_kind(self) -> int | None:
        """Its number in `D3Kind` (`native/types.h`); None for a matrix whose parts have theirs."""

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """(N, K)."""

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """What it is made of: values, then scales."""

    def rounded(self, x: Tensor) -> Tensor:
        """The rows `x` [T, K] as they meet it, in their dtype."""
        return x

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def row_scales(self) -> Tensor | None:
        """float32 [N], where each value only has to be multiplied by that of its row."""
        return None

    @abstractmethod
    def rows(self, start: int, stop: int) -> Any:
        """Output channels [start, stop) alone, as a format that has `dequantize`."""

    @abstractmethod
    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The matrix [N, K] it stands for, rounded once to `dtype`."""
