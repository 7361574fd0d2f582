"""What a scheduler hands out for each token, and what it counts from the engine's beginning on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from d3engine.request.outputs import Logprob
from d3engine.request.sequence import Sequence


@dataclass(slots=True)
class Counters:
    """What has happened since the engine began."""

    steps: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generated_tokens: int = 0
    generated_layers: int = 0  # layers run, summed over generated tokens, and over the rows of drafts and verifications
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    verifications: int = 0
    token_layers: list[int] = field(default_factory=list)  # [L + 1] tokens by the layers they took; the last: or more
    blocks_saved: int = 0  # at the end of each finished sequence, against full depth


class NewTokens(NamedTuple):
    """Tokens by which a step has made a sequence longer, the layers that each took, and their log-probabilities if they
    were asked for.

    A sequence that ends by a fault has a last one without tokens.
    """

    sequence: Sequence
    token_ids: list[int]
    depths: list[int]
    logprobs: list[dict[int, Logprob]] | None
