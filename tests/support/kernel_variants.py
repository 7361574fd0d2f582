"""A program that prints which compiled kernels of eager steps no graph has, which no warm-up compiles, and which of
graphs `kernels/inspect.py` does not. None is compiled: launches are described on meta tensors, and what the compiler
specializes on is compared."""

import json
from typing import Any

import torch
from torch import Tensor

import d3engine.kernels.triton as kernels
from d3engine.executor.graph_shapes import batch_sizes
from d3engine.executor.warm_up import row_classes
from d3engine.kernels.ahead_of_time import specialization
from d3engine.kernels.decode_rows import DecodeRows
from d3engine.kernels.triton import launches
from d3engine.kernels.triton.launches import Launch, ModelShape, meta, meta_weight
from d3engine.kernels.triton.lm_head import logits_launches
from d3engine.kernels.triton.paged_attention import AttentionInputs, attention_launches
from d3engine.kernels.triton.products import product_tile

DTYPE, MOST_ROWS, BLOCKS = torch.bfloat16, 64, 512
SHAPES = (
    launches.SHAPES["llama2-7b"],
    launches.SHAPES["llama3-8b"],
    ModelShape("qwen2.5-0.5b", 896, 14, 2, 64, 4864, 151936),  # so small that products are cut by rows in many ways
)


def layer(shape: ModelShape, rows: int, weights: str, attention: AttentionInputs, count: Tensor | None) -> list[Launch]:
    """What a layer and the logits launch on `rows` rows; `count` is the number of live rows, None that of all."""

    def weight(outputs: int, columns: int) -> Any:
        return meta_weight(outputs, columns, dtype=DTYPE, weights=weights)

    def rows_of(columns: int) -> Tensor:
        return meta(rows, columns, dtype=DTYPE)

    size, heads, width = shape.hidden_size, shape.num_heads, shape.head_dim
    hidden, norm = rows_of(size), meta(size, dtype=DTYPE)
    pool = meta(1024, 2, 16, shape.num_kv_heads, width, dtype=DTYPE)
    rotations, entries = meta(rows, width // 2, dtype=torch.complex64), meta(rows, 2, dtype=torch.int64)
    projections = weight((heads + 2 * shape.num_kv_heads) * width, size)
    queries, found = kernels.qkv.__wrapped__(  # type: ignore[attr-defined]
        hidden, norm, 1e-5, projections, None, rotations, pool, entries, heads, num_rows=count
    )
    found += attention_launches(rows_of(heads * width), queries, pool, attention, 0.1)
    gated, steps = kernels.gate_up.__wrapped__(  # type: ignore[attr-defined]
        hidden, norm, 1e-5, weight(2 * shape.intermediate_size, size), None, num_rows=count
    )
    found += steps
    for x in (rows_of(heads * width), gated):
        add = kernels.linear_residual.__wrapped__  # type: ignore[attr-defined]
        found += add(x, weight(size, x.shape[1]), None, hidden, num_rows=count)[1]
    vocabulary = weight(shape.vocab_size, size)
    tile = product_tile(rows, vocabulary, DTYPE)
    if tile is not None:
        logits = meta(rows, shape.vocab_size, dtype=torch.float32)
        found += logits_launches(tile, hidden, norm, 1e-5, vocabulary, logits, count, None)
    return [step for step in found if isinstance(step, Launch)]


def graph(shape: ModelShape, rows: int, weights: str) -> list[Launch]:
    """What a graph of decoding holds."""
    state = DecodeRows.empty(rows, 1, BLOCKS, shape.head_dim, 1, "meta")
    (attention,) = kernels.decode_attention_inputs(state, meta(rows + 1, dtype=torch.int32), 16 * BLOCKS)
    return layer(shape, rows, weights, attention, state.active_rows[:1])


def eager(shape: ModelShape, starts: list[int], weights: str, blocks: int = 43) -> list[Launch]:
    """What an eager step launches on chunks that begin at `starts`."""
    tables = meta(1, len(starts) - 1, blocks, dtype=kernels.TABLE_DTYPE)
    (attention,) = kernels.attention_inputs(starts, [16 * blocks] * (len(starts) - 1), tables)
    return layer(shape, starts[-1], weights, attention, None)


def variants(found: list[Launch]) -> set[str]:
    """The compiled kernels, by name and all that the compiler specializes on."""
    return {f"{one.kernel.fn.__module__}.{one.kernel.fn.__name__} {specialization(one, 90)}" for one in found}


found = {}
for launches.PROGRAMMATIC in (False, True):
    for shape in SHAPES:
        for weights in ("", "int8", "int4"):
            held = set().union(*[variants(graph(shape, rows, weights)) for rows in batch_sizes(MOST_ROWS)])
            asked: set[str] = set()
            for rows in range(1, MOST_ROWS + 1):
                for starts in ([0, rows], [*range(rows + 1)], [0, 1, rows] if rows > 1 else [0, 1]):
                    asked |= variants(eager(shape, starts, weights)) | variants(eager(shape, starts, weights, 1))
            in_graphs = {one for one in asked if "long_chunks" not in one}
            classes = row_classes(shape.num_heads // shape.num_kv_heads)
            warmed = held.union(*[variants(eager(shape, [0, rows], weights)) for rows in classes])
            for rows in range(MOST_ROWS + 1, 1100, 7):
                for starts in ([0, rows], [0, rows - 1, rows]):
                    asked |= variants(eager(shape, starts, weights))
            known = variants([one for *_, one in launches.registered(shape, DTYPE, weights)])
            found[f"{shape.name} {weights} {launches.PROGRAMMATIC}"] = {
                "graphs": len(held),
                "not inspected": sorted(held - known),
                "eager": len(in_graphs),
                "in no graph": sorted(in_graphs - held),
                "not warmed up": sorted(asked - warmed),
            }
print(json.dumps(found))
