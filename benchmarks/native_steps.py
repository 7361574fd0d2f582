"""Decode steps of the native library, on one thread: random weights in every format, over random cache entries."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from d3engine.kernels.blocks import BLOCK_FORMATS, BlockWeight, blocks_in_lanes
from d3engine.kernels.interleaved import in_lanes
from d3engine.kernels.kv_pool import FP8, Fp8Pool, KVPool
from d3engine.kernels.low_rank import LowRankMap
from d3engine.kernels.matrices import Weight, tensors_of
from d3engine.kernels.native.bf12 import packed
from d3engine.kernels.native.library import Decoder, reads_interleaved, reads_interleaved_blocks
from d3engine.kernels.native.model import Linear, NativeBridge, NativeBridges, NativeLayer, NativeMaps, NativeModel
from d3engine.kernels.native.runs import Rows
from d3engine.kernels.native.speculative_loop import Drafts
from d3engine.model.weights import quantize_matrix

BLOCK_SIZE = 16
ALWAYS, SKIPPED = 2**31 - 1, 0  # cutoffs
GGML_TYPES = ("Q8_0", "Q4_0", "Q4_K", "Q6_K")
BYTE_ACTIVATIONS = ", 8-bit activations"
FORMATS = (
    *("float32", "bfloat16", "bf12", "int8", "int4", "fp8"),
    *GGML_TYPES,
    *(name + BYTE_ACTIVATIONS for name in GGML_TYPES),
)


def runs_here(weight_format: str) -> bool:
    """Whether this machine's processor multiplies matrices of a format."""
    return BYTE_ACTIVATIONS not in weight_format or reads_interleaved_blocks()


def random_matrix(weight_format: str, rows: int, columns: int, isa: str = "auto") -> Weight:
    """A matrix [rows, columns] in one of `FORMATS`, in the layout in which an engine holds it for `isa`."""
    if weight_format.startswith("Q"):
        blocks = _random_blocks(weight_format.removesuffix(BYTE_ACTIVATIONS), rows, columns)
        return blocks_in_lanes(blocks) if BYTE_ACTIVATIONS in weight_format else blocks
    numbers = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)) * columns**-0.5
    if weight_format == "float32":
        return numbers
    if weight_format in ("bfloat16", "bf12"):
        narrow = numbers.bfloat16()
        return packed(narrow) if weight_format == "bf12" else narrow
    quantized = quantize_matrix(numbers, weight_format)
    return in_lanes(quantized) if reads_interleaved(isa) else quantized


def _random_blocks(type_name: str, rows: int, columns: int) -> BlockWeight:
    layout = BLOCK_FORMATS[type_name]
    blocks = torch.randint(0, 256, (rows * columns // layout.columns, layout.nbytes), dtype=torch.uint8)
    for place in layout.halves:  # random scales might be no numbers
        blocks[:, place : place + 2] = torch.tensor([1e-4], dtype=torch.float16).view(torch.uint8)
    return BlockWeight(type_name, blocks.view(rows, -1), columns)


@dataclass(frozen=True)
class Sizes:
    """A model, and the rows and entries of each row that its cache has room for."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int = 32
    rows: int = 32
    context: int = 64

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of the four matrices of a layer."""
        q_size, kv_size = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "qkv": (q_size + 2 * kv_size, self.hidden),
            "output": (self.hidden, q_size),
            "gate_up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
        }


class NativeSteps:
    """A model whose layers have matrices of one format and whose LM head has one of `head_format`.

    `kv_cache_dtype` is "float32" or "fp8".
    """

    def __init__(
        self,
        sizes: Sizes,
        weight_format: str,
        *,
        head_format: str = "float32",
        kv_cache_dtype: str = "float32",
        isa: str = "auto",
    ) -> None:
        self.sizes = sizes
        blocks = -(-sizes.context // BLOCK_SIZE)
        count = sizes.rows * sizes.layers * blocks
        order = np.random.default_rng(0).permutation(count) + 1
        self._tables = order.astype(np.int32).reshape(sizes.rows, sizes.layers, blocks)
        angles = torch.arange(sizes.context)[:, None] / 1e4 ** torch.linspace(0, 1, sizes.head_dim // 2)
        norm, rotations = torch.ones(sizes.hidden), torch.polar(torch.ones_like(angles), angles)
        matrices = {name: Linear(random_matrix(weight_format, *shape, isa)) for name, shape in sizes.matrices.items()}
        layer = partial(NativeLayer, attention_norm=norm, mlp_norm=norm, rotations=rotations)
        head = random_matrix(head_format, sizes.vocab, sizes.hidden, isa)
        pool = _random_pool(count + 1, sizes, kv_cache_dtype)
        self.layer_bytes = sum(_nbytes(linear.weight) for linear in matrices.values())
        self.head_bytes = _nbytes(head)
        self.entry_bytes = pool.nbytes // (pool.shape[0] * BLOCK_SIZE)
        model = NativeModel(
            layers=tuple(layer(**copy.deepcopy(matrices)) for _ in range(sizes.layers)),
            embedding=torch.randn(sizes.vocab, sizes.hidden),
            final_norm=norm,
            lm_head=head,
            pool=pool,
            num_heads=sizes.heads,
            max_positions=sizes.context,
            eps=1e-5,
            scale=sizes.head_dim**-0.5,
        )
        self.decoder = Decoder(
            model, max_blocks=blocks, num_slots=sizes.rows, max_rows=max(64, sizes.rows), num_threads=1, isa=isa
        )

    def rows(self, count: int, *, context: int = 16, skipped: Sequence[int] = (), **further: Any) -> Rows:
        """`count` sequences that decode a token each behind `context` entries, without the layers `skipped`."""
        ones = np.ones(count, np.int64)
        cutoffs = np.full((count, self.sizes.layers), ALWAYS, np.int32)
        cutoffs[:, list(skipped)] = SKIPPED
        return Rows(ones, (context - 1) * ones, ones, np.arange(count), cutoffs, self._tables, **further)

    def step(self, rows: Rows, count: int = 1) -> None:
        """Run `count` steps."""
        self.decoder.run(rows, count)

    def bytes_read(self, count: int, *, context: int = 16, skipped: Sequence[int] = ()) -> int:
        """Bytes that a step has to read: the matrices of the layers that run, their entries, and the LM head."""
        layers = self.sizes.layers - len(skipped)
        return layers * (self.layer_bytes + count * context * self.entry_bytes) + self.head_bytes

    def draft_and_verify(self, count: int, length: int, skipped: Sequence[int]) -> None:
        """Draft `length` tokens for each of `count` sequences without the layers `skipped`, and verify them."""
        every, lengths = np.zeros(count, np.int64), np.full(count, length)
        drafts = Drafts(
            begun=np.zeros((count, length), np.int64),
            num_begun=every,
            first_lengths=lengths,
            lengths=lengths,
            most_lengths=lengths,
            adapts=every,
            rooms=lengths + 2,
            places=np.arange(count) * (length + 1),
        )
        states = np.zeros((count * (length + 1), self.sizes.hidden), np.float32)
        self.decoder.run_speculative_loop(self.rows(count, skipped=skipped), 1, drafts, states)

    def bridges(self, first: int, stop: int, rank: int | None = None) -> NativeBridges:
        """One over the layers [first, stop), in float32."""
        hidden = self.sizes.hidden
        down = None if rank is None else Linear(torch.randn(rank, hidden) * 1e-3)
        weight = Linear(torch.randn(hidden, rank or hidden) * 1e-3, torch.zeros(hidden))
        return NativeBridges([NativeBridge(first, stop, weight, down)])

    def adapter(self, rank: int) -> NativeMaps:
        """A LoRA adapter for every matrix of the layers, in float32."""
        sizes = self.sizes
        q_size, kv_size = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        hidden, inner = sizes.hidden, sizes.intermediate
        shapes = [(q_size, hidden), (kv_size, hidden), (kv_size, hidden), (hidden, q_size)]
        shapes += [(inner, hidden), (inner, hidden), (hidden, inner)]
        cpu = torch.device("cpu")
        maps = [
            LowRankMap(torch.randn(rank, columns) * 1e-3, torch.randn(rank, rows)).to(torch.float32, cpu)
            for rows, columns in shapes
        ]
        return NativeMaps((*maps * sizes.layers, None))


def _nbytes(weight: Weight) -> int:
    return sum(tensor.nbytes for tensor in tensors_of(weight))


def _random_pool(blocks: int, sizes: Sizes, kv_cache_dtype: str) -> KVPool:
    shape = (blocks, 2, BLOCK_SIZE, sizes.kv_heads, sizes.head_dim)
    entries = torch.randn(shape)
    if kv_cache_dtype == "float32":
        return entries
    return Fp8Pool(entries.to(FP8), torch.full((blocks, 2, sizes.kv_heads, BLOCK_SIZE), 1e-2))
