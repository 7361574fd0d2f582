"""Requests for an executor that decodes by itself, and what it decodes in one run."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from batches import Request

from d3engine import D3, Engine, FullDepth, SamplingParams
from d3engine.depth import DepthPolicy
from d3engine.request.outputs import RequestOutput
from d3engine.request.params import RequestOutputKind

# Their rows can share a run as soon as none has a layer awake above one that sleeps for a deeper row.
NESTED: list[DepthPolicy] = [FullDepth(), D3(0.9, 0.5), D3(0.8, 0.3), D3(0.7, 0.2), D3(0.9, 0.2)]
PLAIN: dict[str, Any] = {"n": 1, "temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
PLAIN |= {"frequency_penalty": 0.0, "presence_penalty": 0.0}
Solo = Callable[[Request], RequestOutput]


def greedy(policy: DepthPolicy, max_tokens: int = 20, **changes: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, depth=policy, **changes)


def unread(params: SamplingParams) -> SamplingParams:
    """The same for a request that nobody reads along, as in generate()."""
    return replace(params, output_kind=RequestOutputKind.FINAL_ONLY)


def steps_by_itself(engine: Engine) -> int:
    """Steps that a graph or the native library has taken."""
    stats = engine.stats()
    return stats.graph_steps + stats.native_steps


@contextmanager
def not_finite(engine: Engine, token: int) -> Iterator[None]:
    """Meanwhile the embedding of a token is not a number: what computes it meets a fault."""
    embedding = engine.executor.model.weights.embedding
    before = embedding[token].clone()
    embedding[token] = math.nan
    try:
        yield
    finally:
        embedding[token] = before
