"""What a step must do, launch by launch: the bytes that each kernel reads and the products that it makes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from d3engine.kernels.kv_pool import KVPool, block_bytes
from d3engine.kernels.quantized import GROUP

if TYPE_CHECKING:
    from d3engine.kernels.triton.launches import Launch, ModelShape

WEIGHT_BYTES = {"bf16": 2.0, "int8": 1.0, "fp8": 1.0, "int4": 0.5 + 4 / GROUP}

PROBES = 8
"""Of a list, by each search: two find its ends, and one of 64 tokens is found by six more."""


@dataclass(frozen=True, slots=True)
class Work:
    """A launch of a step and what it must do; without `launch` it is a product left to torch."""

    operation: str
    launch: Launch | None
    num_bytes: float = 0.0  # 0: of small size (adding, combining, norms, both ends of a step)
    products: float = 0.0
    additions: float = 0.0
    is_alone: bool = False  # whether one program does what there is to do for a row
    pieces: int = 0  # that its programs take one after another; 0: each has one
    turns: int = 0  # in which the last program of a row puts together what the others have left


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step in bfloat16 of one model, with weights of that form: `batch` rows that decode, or those of one prompt.

    Of a prompt one row goes to the head, and attention within it is taken for small. The likeliest tokens are chosen,
    or with `is_sampled` some under top-p, in every row. With a `cache` of "fp8" a layer has a launch more, for the
    scales of its entries. `batch_invariant`: the kernels of an engine that is so called.
    """

    shape: ModelShape
    weights: str = "bf16"
    batch: int = 1
    context: int = 512
    is_prompt: bool = False
    is_sampled: bool = False
    cache: str = "auto"
    batch_invariant: bool = False


def step_work(step: Step) -> Iterator[Work]:
    """What a step does, launch by launch."""
    from d3engine.kernels.triton import launches

    shape, batch = step.shape, step.batch
    heads, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    head_rows, head = 1 if step.is_prompt else batch, "logits" if step.is_sampled else "argmax"
    sizes = {
        f"qkv: rows={batch}": (heads + 2 * kv) * shape.hidden_size,
        f"linear_residual: output rows={batch}": heads * shape.hidden_size,
        f"linear_residual: down rows={batch}": shape.intermediate_size * shape.hidden_size,
        f"gate_up: rows={batch}": 2 * shape.intermediate_size * shape.hidden_size,
        f"lm_head: {head} rows={head_rows}": shape.vocab_size * shape.hidden_size,
    }
    small = _small_launches(batch) | {f"lm_head: {head}, norm rows={head_rows}"}
    small |= set() if step.is_sampled else {"lm_head: best"}
    form = "" if step.weights == "bf16" else step.weights
    missing, launch_of_scales = dict(sizes), None
    asked = (shape, torch.bfloat16, form, launches.PROJECTIONS)
    for operation, label, launch in launches.registered(*asked, batch_invariant=step.batch_invariant):
        name = f"{operation}: {label}"
        if name == "qkv: finish, into 8 bits":
            launch_of_scales = launch
        if name in sizes:
            values = missing.pop(name)
            rows = launch.grid[0] * launch.arguments["BLOCK_T"]
            yield Work(operation, launch, values * WEIGHT_BYTES[step.weights], 2.0 * rows * values)
        elif name in small:
            yield Work(operation, launch)
    for name, values in missing.items():
        rows = -(-batch // 128) * 128
        yield Work(name.partition(":")[0], None, values * 2.0, 2.0 * rows * values)
    if step.cache == "fp8" and not step.is_prompt:
        yield Work("qkv", launch_of_scales)
    yield from _attention(step)
    if step.is_sampled:
        yield from _choosing(shape, head_rows)


def choosing_launches(shape: ModelShape, rows: int) -> Iterator[tuple[str, Launch]]:
    """The launches after the logits, by name, where all rows cut."""
    from d3engine.kernels.sampling import Cuts, SamplingRows
    from d3engine.kernels.triton.launches import meta
    from d3engine.kernels.triton.sample import draw_launch
    from d3engine.kernels.triton.scores import tiles_of
    from d3engine.kernels.triton.topk_topp import Search, search_launches, settle_launch

    vocab = shape.vocab_size
    logits, num_rows = meta(rows, vocab, dtype=torch.float32), meta(1, dtype=torch.int32)
    floats, integers = meta(rows, dtype=torch.float32), meta(rows, dtype=torch.int64)
    best, search = meta(rows, tiles_of(vocab), dtype=torch.int64), Search.empty(logits)
    asked = SamplingRows(floats, integers, integers, Cuts(floats, integers, floats))
    yield from search_launches(logits, asked, search, num_rows).items()
    yield "draw", draw_launch(logits, asked, integers, search, best, num_rows)
    yield "settle", settle_launch(asked, integers, search, best, integers, floats, num_rows)


def _choosing(shape: ModelShape, rows: int) -> Iterator[Work]:
    tokens = rows * shape.vocab_size
    for name, launch in choosing_launches(shape, rows):
        is_alone = name == "settle"
        additions = tokens if name == "bins" else 0
        yield Work("sample", launch, 0 if is_alone else tokens * 4.0, additions=additions, is_alone=is_alone)


def _small_launches(batch: int) -> set[str]:
    around = {"qkv": ("finish", "norm"), "gate_up": ("swiglu", "norm"), "linear_residual": ()}
    names = {f"{operation}: {label} rows={batch}" for operation, labels in around.items() for label in labels}
    names |= {f"linear_residual: {name}, {kind} rows={batch}" for name in ("output", "down") for kind in _RESIDUAL}
    return names


_RESIDUAL = ("add", "arranged")


def _attention(step: Step) -> Iterator[Work]:
    from d3engine.kernels.triton import launches
    from d3engine.kernels.triton.attention_splits import MOST_SPLITS, PARTS_TOGETHER, SPLIT
    from d3engine.kernels.triton.paged_attention import AttentionInputs, attention_launches

    if step.is_prompt:
        yield Work("attention", None)
        return
    shape, batch, context, meta = step.shape, step.batch, step.context, launches.meta
    queries = meta(batch, shape.num_heads, shape.head_dim, dtype=torch.bfloat16)
    pool: KVPool = meta(1024, 2, shape.block_size, shape.num_kv_heads, shape.head_dim, dtype=torch.bfloat16)
    if step.cache == "fp8":
        pool = launches.meta_fp8_pool(shape, shape.block_size)
    entry = block_bytes(shape.block_size, shape.num_kv_heads, shape.head_dim, pool.dtype) / shape.block_size
    integers = meta(batch + 1, dtype=torch.int32)
    tables = meta(batch, -(-context // shape.block_size), dtype=torch.int32)
    inputs = AttentionInputs(integers, integers[:batch], tables, integers[:1], context, 1, True)
    out = meta(batch, shape.num_heads * shape.head_dim, dtype=torch.bfloat16)
    splits = min(MOST_SPLITS, -(-context // SPLIT))
    pieces, turns = batch * shape.num_kv_heads * splits, -(-splits // PARTS_TOGETHER) if splits > 1 else 0
    for launch in attention_launches(out, queries, pool, inputs, shape.head_dim**-0.5)[1:]:  # the first is a step's
        yield Work("attention", launch, batch * context * entry, pieces=pieces, turns=turns)
