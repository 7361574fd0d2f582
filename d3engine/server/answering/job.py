"""A request over HTTP that has been checked wholly: nothing in it can be refused any more."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from d3engine.depth import DepthPolicy
from d3engine.depth.words import policy_in_words
from d3engine.request.prepared import EngineRequest
from d3engine.server.asking.tools import Calling
from d3engine.server.served import AppState
from d3engine.server.shapes.requests import Common
from d3engine.server.tracing.request_trace import RequestTrace

C = TypeVar("C", bound=Common)


@dataclass(frozen=True)
class RequestContext(Generic[C]):
    """One request over HTTP, with its prompts as the engine takes them.

    `depth` is the request's own policy, None where it has the engine's. `calling` says how its answers call functions.
    `trace` is told what comes of it. `id` is for the answer alone: no client can choose it.
    """

    served: AppState
    asked: C
    model: str
    prepared: Sequence[EngineRequest]
    depth: DepthPolicy | None
    id_prefix: str
    calling: Calling | None = None
    trace: RequestTrace | None = None
    id: str = field(init=False)
    created: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "id", f"{self.id_prefix}{os.urandom(16).hex()}")
        object.__setattr__(self, "created", int(time.time()))
        if self.trace is not None:
            num_layers = self.served.client.config.num_layers
            self.trace.asked(self.id, self.model, policy_in_words(self.policy), num_layers, self.prepared)

    @property
    def policy(self) -> DepthPolicy:
        """The policy that it runs under."""
        return self.depth or self.served.client.depth
