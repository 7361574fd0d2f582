"""The random numbers of `kernels/random.py` inside Triton kernels: the same words, bit for bit.

One Philox call gives the words of four neighbouring tokens. Where a program holds a run of neighbours they are laid
side by side; elsewhere each token computes all four and keeps its own.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_words(seed, index, step, first, BLOCK: tl.constexpr):
    """uint32 [BLOCK]: the words of tokens `first`, `first` + 1 ... of one row; `first` and BLOCK are multiples of 4."""
    w0, w1, w2, w3 = _group_words(seed, index, step, first // 4 + tl.arange(0, BLOCK // 4))
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@triton.jit
def token_words(seed, index, step, tokens):
    """uint32: the words of `tokens`, with which `seed`, `index` and `step` broadcast."""
    w0, w1, w2, w3 = _group_words(seed, index, step, tokens // 4)
    place = tokens % 4
    return tl.where(place < 2, tl.where(place == 0, w0, w1), tl.where(place == 2, w2, w3))


@triton.jit
def gumbel(words):
    """Standard Gumbel noise, float32, from uint32 words."""
    uniform = ((words >> 9).to(tl.float32) + 0.5) * (2.0**-23)
    return -tl.log(-tl.log(uniform))


@triton.jit
def _group_words(seed, index, step, groups):
    """The four words of the counters (group, step, index, 0) under the key (seed's low word, seed's high word)."""
    return tl.philox(seed, groups.to(tl.uint32), step.to(tl.uint32), index.to(tl.uint32), 0)
