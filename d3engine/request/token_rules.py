"""Which tokens a request allows and how it shifts their logits, in arrays that all of its sequences share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from d3engine.request.params import SamplingParams

Integers: TypeAlias = npt.NDArray[np.int64]


class BadWords:
    """Finds the tokens that would complete a word, in a time that does not grow with the number of words.

    Args:
        words: token sequences, none of them empty.

    Attributes:
        words: the same.
        longest: tokens of the longest word but its last: as many of an answer are looked at.
        edges: [N] the token of each edge; edge e leads to node e + 1, node 0 is the root.
        first_edges: [N + 2] edges first_edges[n] to first_edges[n + 1] leave node n, sorted by token.
        bans: [W] the last tokens of words; first_bans: [N + 2] those of node n, as for edges.
    """

    def __init__(self, words: Iterable[Sequence[int]]) -> None:
        self.words = tuple(map(tuple, words))
        lengths = np.array([len(word) - 1 for word in self.words], np.int64)
        self.longest = int(lengths.max(initial=0))
        nodes, parents, tokens = np.zeros(len(self.words), np.int64), [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        num_edges = 0
        for depth in range(self.longest):
            longer = (lengths > depth).nonzero()[0]
            here = np.array([self.words[word][-2 - depth] for word in longer.tolist()], np.int64)
            found, places = np.unique(nodes[longer] << 32 | here, return_inverse=True)
            parents.append(found >> 32)
            tokens.append(found & 0xFFFFFFFF)
            nodes[longer] = num_edges + 1 + places.ravel()
            num_edges += found.size
        bounds = np.arange(num_edges + 2)
        self.edges: Integers = np.concatenate(tokens)
        self.first_edges: Integers = np.searchsorted(np.concatenate(parents), bounds)
        order = nodes.argsort(kind="stable")
        self.bans: Integers = np.array([self.words[word][-1] for word in order.tolist()], np.int64)
        self.first_bans: Integers = np.searchsorted(nodes[order], bounds)

    def __bool__(self) -> bool:
        return bool(self.words)

    def banned(self, generated: Sequence[int]) -> list[int]:
        """The tokens that would complete a word behind `generated`."""
        node, found = 0, list[int]()
        for back in range(len(generated) + 1):
            found += self.bans[self.first_bans[node] : self.first_bans[node + 1]].tolist()
            low, high = self.first_edges[node], self.first_edges[node + 1]
            if low == high or back == len(generated):
                break
            edge = low + np.searchsorted(self.edges[low:high], generated[-1 - back])
            if edge == high or self.edges[edge] != generated[-1 - back]:
                break
            node = int(edge) + 1
        return found


class TokenRules:
    """Of one request: `params.logit_bias`, `params.allowed_token_ids` and, spelled as tokens, its bad words and what
    breaks repetitions."""

    def __init__(
        self, params: SamplingParams, bad_words: BadWords | None = None, breakers: frozenset[int] = frozenset()
    ) -> None:
        self.params = params
        self.bad_words = bad_words or BadWords(())
        self.breakers = breakers
        self.fault: str | None = None
        """What a function of the request's has raised."""
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
    named = params.logit_bias or params.allowed_token_ids or params.bad_words
    return bool(named or params.dry_multiplier or params.logits_processors)
