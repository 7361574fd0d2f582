"""Rows at or beyond `num_rows`, in plain torch: neither read nor written, and undefined where rows are returned."""

from __future__ import annotations

import math

from torch import Tensor


def live_rows(num_rows: Tensor) -> slice:
    """The rows to compute, of tensors that may have more."""
    return slice(0, int(num_rows))


def undefined_beyond(out: Tensor, like: Tensor) -> Tensor:
    """`out` with as many rows as `like` has: NaN, or -1 for integers, in those that were not computed."""
    filler = math.nan if out.is_floating_point() else -1
    padded = out.new_full((like.shape[0], *out.shape[1:]), filler)
    padded[: out.shape[0]] = out
    return padded
