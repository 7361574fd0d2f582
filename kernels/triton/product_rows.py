"""The rows of a product in the form that its tile takes: as they are, or normed and in order, stored once before it.

A norm costs few rows nothing when it is carried along. More rows would be normed once by every program that reads them,
in between their copies and the tensor cores, which is most of what such a loop does beside its weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from d3engine.kernels.matrices import Weight
from d3engine.kernels.triton.launches import Launch, arranged_columns
from d3engine.kernels.triton.products import Tile, product_launch
from d3engine.kernels.triton.rms_norm import arrange_launch, norm_launch


def product_launches(
    kernel: Any,
    tile: Tile,
    x: Tensor,
    weight: Weight,
    num_rows: Tensor | None,
    *,
    norm: tuple[Tensor | None, float] | None = None,
    **others: object,
) -> list[Launch]:
    """`product_launch` last, and before it what makes rows out of `x` [T, K] that its tile takes.

    Of a `norm` that was applied before, the kernel gets none; nor where it has no weight, which is no norm.
    """
    is_arranged = tile.is_arranged(weight, x.dtype)
    norm_weight, eps = norm or (None, 0.0)
    if norm is not None:
        others |= {"norm_ptr": norm_weight, "eps": 0.0 if norm_weight is None else eps}
    if not tile.is_normed or (norm_weight is None and not is_arranged):
        return [product_launch(kernel, tile, x, weight, num_rows, **others)]
    rows, columns = x.shape
    stored = torch.empty(rows, arranged_columns(columns) if is_arranged else columns, dtype=x.dtype, device=x.device)
    if norm_weight is None:
        before = arrange_launch(x, num_rows, stored)
    else:
        before = norm_launch(x, norm_weight, eps, None, num_rows, stored, arranged=is_arranged)
        others |= {"norm_ptr": None, "eps": 0.0}
    return [before, product_launch(kernel, tile, stored, weight, num_rows, **others)]


_BESIDE = {"_norm_kernel": "norm", "_arrange_kernel": "arranged", "_add_kernel": "add", "_finish_kernel": "finish"} | {
    "_norm_projections_kernel": "norms"
}


def labelled(launches: Iterable[Launch], label: str, rows: int) -> Iterator[tuple[str, Launch]]:
    """The launches of one operation with the labels that inspection prints; the product's is `label` alone."""
    for launch in launches:
        names = (label, _BESIDE.get(launch.kernel.fn.__name__, ""))
        yield f"{', '.join(name for name in names if name)} rows={rows}".strip(), launch
