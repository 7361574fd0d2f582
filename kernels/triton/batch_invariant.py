"""The same operations where no number may depend on a row's neighbours, to the last bit, in half precision too.

A position is computed by one path, which follows from what it is and never from how many rows a step has.
Products of any number of rows go tile by tile of one size, and none goes to the matrix library. Attention takes a row
of a prompt query tile by query tile, and a row of an answer by itself, whether it is decoded, replayed after a
preemption, or verified: so it does not matter how a prompt is cut, or what the prefix cache has of it. What is not
named here works on each row alone as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from d3engine.kernels.triton import gate_up as any_gate_up
from d3engine.kernels.triton import linear_residual as any_linear_residual
from d3engine.kernels.triton import lm_head as any_lm_head
from d3engine.kernels.triton import lm_head_argmax as any_lm_head_argmax
from d3engine.kernels.triton import lm_head_sample as any_lm_head_sample
from d3engine.kernels.triton import qkv as any_qkv
from d3engine.kernels.triton.attention_splits import Room
from d3engine.kernels.triton.copy_entries import copy_entries as copy_entries
from d3engine.kernels.triton.decode_rows import begin_step as begin_step
from d3engine.kernels.triton.decode_rows import decode_attention_inputs as decode_attention_inputs
from d3engine.kernels.triton.decode_rows import end_step as end_step
from d3engine.kernels.triton.paged_attention import TABLE_DTYPE as TABLE_DTYPE
from d3engine.kernels.triton.paged_attention import AttentionInputs
from d3engine.kernels.triton.paged_attention import paged_attention as paged_attention
from d3engine.kernels.triton.rms_norm import add_norm as add_norm
from d3engine.kernels.triton.rms_norm import rms_norm as rms_norm
from d3engine.kernels.triton.sample import count_tokens as count_tokens
from d3engine.kernels.triton.sample import sample as sample
from d3engine.kernels.triton.unpack import embed as embed

qkv = partial(any_qkv, batch_invariant=True)
linear_residual = partial(any_linear_residual, batch_invariant=True)
gate_up = partial(any_gate_up, batch_invariant=True)
lm_head = partial(any_lm_head, batch_invariant=True)
lm_head_argmax = partial(any_lm_head_argmax, batch_invariant=True)
lm_head_sample = partial(any_lm_head_sample, batch_invariant=True)


def attention_inputs(
    query_starts: list[int], kv_lengths: list[int], block_tables: Tensor, *, prompt_lengths: list[int]
) -> list[AttentionInputs]:
    """As `paged_attention.attention_inputs`; the first `prompt_lengths[c]` entries of chunk c are those of a prompt.

    A chunk's rows of the prompt stay together, and each further row becomes a chunk of its own.
    """
    pieces = [
        piece
        for chunk, (start, stop) in enumerate(pairwise(query_starts))
        for piece in _pieces(chunk, kv_lengths[chunk] - (stop - start), kv_lengths[chunk], prompt_lengths[chunk])
    ]
    if len(pieces) != len(kv_lengths):
        chunks = torch.tensor([piece.chunk for piece in pieces], device=block_tables.device)
        block_tables = block_tables.index_select(1, chunks)
    starts = [0, *accumulate(piece.stop - piece.start for piece in pieces)]
    single = [0 if piece.is_prompt else piece.stop for piece in pieces]
    tiled = [piece.stop if piece.is_prompt else 0 for piece in pieces]
    numbers = torch.tensor(starts + single + tiled, dtype=torch.int32).to(block_tables.device, non_blocking=True)
    count, room = len(pieces), Room()
    return [
        AttentionInputs(
            query_starts=numbers[: count + 1],
            kv_lengths=numbers[count + 1 : 2 * count + 1],
            block_tables=layer,
            num_rows=numbers[count : count + 1],
            max_kv_length=max(single, default=0),
            max_chunk_rows=max(tiled, default=0),
            single_rows=any(single),
            room=room,
            tiled_lengths=numbers[2 * count + 1 :],
        )
        for layer in block_tables.unbind()
    ]


class _Piece(NamedTuple):
    """The rows of a chunk at the positions [start, stop) of its sequence."""

    chunk: int
    start: int
    stop: int
    is_prompt: bool


def _pieces(chunk: int, start: int, stop: int, prompt_length: int) -> Iterator[_Piece]:
    if start < prompt_length:
        yield _Piece(chunk, start, min(stop, prompt_length), True)
    for position in range(max(start, prompt_length), stop):
        yield _Piece(chunk, position, position + 1, False)
