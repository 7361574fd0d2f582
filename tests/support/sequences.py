"""Sequences as a scheduler gets them, of which a test names what matters to it."""

from typing import Any

from d3engine import FullDepth, SamplingParams
from d3engine.depth import Schedule
from d3engine.scheduling.sequence import Sequence


def new_sequence(
    prompt: list[int], params: SamplingParams, *, arrival: int = 0, schedule: Schedule | None = None, **fields: Any
) -> Sequence:
    """Of two layers that all run unless a schedule is given; `fields` are Sequence's."""
    given: dict[str, Any] = {"request_id": f"r{arrival}", "index": 0, "eos_token_ids": frozenset(), "seed": 0}
    given |= {"priority": 0, "max_length": len(prompt) + (params.max_tokens or 0)} | fields
    layers = schedule or FullDepth().schedule(2)
    return Sequence(prompt_token_ids=prompt, params=params, schedule=layers, arrival=arrival, **given)
