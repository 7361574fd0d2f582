"""What a step launches to choose tokens under top-p or top-k, for the model of a step (`benchmarks.gpu_model`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from d3engine.kernels.triton.launches import Launch, ModelShape

PROBES = 8
"""Of a list, by each search: two find its ends, and one of 64 tokens is found by six more."""


def choosing_launches(shape: ModelShape, rows: int) -> Iterator[tuple[str, Launch]]:
    """The launches after the logits, by name, where all rows cut."""
    from d3engine.kernels.sampling import Cuts, SamplingRows
    from d3engine.kernels.triton.finalize import settle_launch
    from d3engine.kernels.triton.launches import meta
    from d3engine.kernels.triton.sample import draw_launch
    from d3engine.kernels.triton.scores import tiles_of
    from d3engine.kernels.triton.topk_topp import Search, search_launches

    vocab = shape.vocab_size
    logits, num_rows = meta(rows, vocab, dtype=torch.float32), meta(1, dtype=torch.int32)
    floats, integers = meta(rows, dtype=torch.float32), meta(rows, dtype=torch.int64)
    best, search = meta(rows, tiles_of(vocab), dtype=torch.int64), Search.empty(logits)
    asked = SamplingRows(floats, integers, integers, Cuts(floats, integers, floats))
    yield from search_launches(logits, asked, search, num_rows).items()
    yield "draw", draw_launch(logits, asked, integers, search, best, num_rows)
    yield "settle", settle_launch(asked, integers, search, best, integers, floats, num_rows)
