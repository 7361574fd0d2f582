"""Which tokens a request allows and how it shifts their logits, in arrays that all of its sequences share."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from d3engine.request.bad_words import BadWords
from d3engine.request.params import SamplingParams


class TokenRules:
    """Of one request: `params.logit_bias`, `params.allowed_token_ids` and, spelled as tokens, its bad words."""

    def __init__(self, params: SamplingParams, bad_words: BadWords | None = None) -> None:
        self.params = params
        self.bad_words = bad_words or BadWords(())
        self._masks: dict[int, npt.NDArray[np.uint8]] = {}
        self._excluded: dict[tuple[torch.device, int], Tensor] = {}
        self._bias_on: dict[torch.device, tuple[Tensor, Tensor]] = {}

    @cached_property
    def biased(self) -> npt.NDArray[np.int64]:
        """The tokens whose logits are shifted."""
        return np.array(list(self.params.logit_bias or ()), np.int64)

    @cached_property
    def biases(self) -> npt.NDArray[np.float32]:
        """By how much each is."""
        return np.array(list((self.params.logit_bias or {}).values()), np.float32)

    def mask(self, vocab_size: int) -> npt.NDArray[np.uint8] | None:
        """One bit for each token, the lowest of the first byte for token 0: whether it is allowed; None: all are."""
        if self.params.allowed_token_ids is None:
            return None
        if vocab_size not in self._masks:
            self._masks[vocab_size] = np.packbits(self._allowed(vocab_size), bitorder="little")
        return self._masks[vocab_size]

    def excluded(self, device: torch.device, vocab_size: int) -> Tensor | None:
        """Bool [V]: the tokens that are not allowed; None: all are."""
        if self.params.allowed_token_ids is None:
            return None
        place = (device, vocab_size)
        if place not in self._excluded:
            self._excluded[place] = torch.from_numpy(~self._allowed(vocab_size)).to(device)
        return self._excluded[place]

    def bias_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """`biased` and `biases` there."""
        if device not in self._bias_on:
            self._bias_on[device] = torch.from_numpy(self.biased).to(device), torch.from_numpy(self.biases).to(device)
        return self._bias_on[device]

    def _allowed(self, vocab_size: int) -> npt.NDArray[np.bool_]:
        allowed = np.zeros(vocab_size, np.bool_)
        allowed[np.array(self.params.allowed_token_ids, np.int64)] = True
        return allowed


def names_tokens(params: SamplingParams) -> bool:
    """Whether there are rules for a request of these parameters."""
    return bool(params.logit_bias or params.allowed_token_ids or params.bad_words)
