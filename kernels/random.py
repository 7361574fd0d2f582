"""Counter-based random numbers: what a sequence draws depends on (seed, index, step, token) alone.

Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) maps a key and a counter to four
words without any state, so a draw never depends on who shares the batch, on preemption or on chunking, and a GPU can
draw the same number in any thread.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF
_ROUNDS = 10


def philox(key: tuple[Tensor, Tensor], counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four words for each counter under each key; all are int64 tensors holding 32-bit words, and broadcast."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3


def _multiply(word: Tensor, constant: int) -> tuple[Tensor, Tensor]:
    """High and low words of a 32 x 32 bit product; int64 wraps around, and the masks undo what the sign did."""
    product = word * constant
    return (product >> 32) & _LOW, product & _LOW


def gumbel(seeds: Tensor, indices: Tensor, steps: Tensor, num_tokens: int, first_token: int = 0) -> Tensor:
    """Standard Gumbel noise, float32 [rows, num_tokens], from int64 `seeds`, `indices` and `steps`, each [rows].

    It is that of the tokens from `first_token` on. argmax(logits + noise) is a draw from softmax(logits). Token t uses
    word t % 4 of the counter (t // 4, step, index, 0) under the key (seed's low word, seed's high word).
    """
    skipped = first_token % 4
    groups = torch.arange(first_token // 4, -(-(first_token + num_tokens) // 4), device=seeds.device)
    counter = (groups[None, :], steps[:, None], indices[:, None], torch.zeros_like(steps)[:, None])
    key = (seeds[:, None] & _LOW, (seeds[:, None] >> 32) & _LOW)
    words = torch.stack(philox(key, counter), dim=-1).flatten(1)[:, skipped : skipped + num_tokens]
    # 23 bits and a half: the most that float32 keeps apart from both 0 and 1, where the logarithms end.
    uniform = ((words >> 9).float() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))
