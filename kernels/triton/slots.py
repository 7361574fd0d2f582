"""The order in which tensor cores take columns, so that a thread's share of stored int8 or int4 is bytes side by side.

Of each 16 columns a thread multiplies four: 2 t, 2 t + 1, 2 t + 8 and 2 t + 9. Of stored bytes in their own order that
is two loads of 2 bytes, and as many instructions to put them together as to make floats of them. A sum does not depend
on the order of its terms if both operands have the same one: so of each 64 columns (or bytes of int4) a thread takes 16
that lie side by side, and rows of activations are stored in the order that follows, once, before the product.
"""

from __future__ import annotations

import triton
import triton.language as tl

from d3engine.kernels.quantized import GROUP

RUN: tl.constexpr = tl.constexpr(64)
"""Columns that change places among themselves: four threads with 16 each."""

_GROUP: tl.constexpr = tl.constexpr(GROUP)


def arranged_columns(columns: int) -> int:
    """Columns of a row of so many that is stored in this order: whole groups, filled up with zeros."""
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
