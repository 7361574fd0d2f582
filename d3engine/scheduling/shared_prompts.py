"""The prefix cache as sequences use it: whose prompt may begin with what others have computed, and what theirs adds."""

from __future__ import annotations

import numpy as np

from d3engine.cache.kv_cache import IntArray
from d3engine.cache.prefix_cache import PrefixCache
from d3engine.plan import Plan
from d3engine.request.sequence import Sequence


class SharedPrompts:
    """Finds and keeps the prompts' blocks of one prefix cache, each under its request's `cache_salt`."""

    def __init__(self, prefix_cache: PrefixCache, block_size: int) -> None:
        self._cache = prefix_cache
        self._size = block_size
        self._named: tuple[list[int], str | None, list[bytes]] = [], None, []

    def name(self, sequence: Sequence) -> None:
        """Give a sequence that may share its prompt the keys of its blocks."""
        if sequence.shares_prompt:
            prompt, salt = sequence.prompt_token_ids, sequence.params.cache_salt
            if self._named[0] is not prompt or self._named[1] != salt:  # the sequences of a request come together
                self._named = prompt, salt, self._cache.keys(_prompt(sequence), salt)
            sequence.prefix_keys = self._named[2]

    def match(self, sequence: Sequence) -> IntArray:
        """Blocks [n, L] that its prompt begins with; n is 0 for one without keys."""
        return self._cache.match(_prompt(sequence), sequence.prefix_keys, sequence.params.cache_salt)

    def keep(self, plan: Plan) -> None:
        """Offer the prompt blocks that a step has filled to later prompts."""
        for chunk in (plan.starts < plan.prompt_lengths).nonzero()[0].tolist():
            sequence = plan.sequences[chunk]
            if sequence.prefix_keys:
                first, last = int(plan.starts[chunk]) // self._size, int(plan.stops[chunk]) // self._size
                keys, salt = sequence.prefix_keys, sequence.params.cache_salt
                self._cache.insert(_prompt(sequence), keys, sequence.slot, first, last, salt)


def _prompt(sequence: Sequence) -> IntArray:
    return np.array(sequence.prompt_token_ids, dtype=np.int32)
