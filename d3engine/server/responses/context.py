"""A request on its way to an answer, and where in a text each of its tokens begins, in characters."""

from __future__ import annotations

import codecs
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from d3engine.depth import DepthPolicy
from d3engine.depth.labels import policy_in_words
from d3engine.request.engine_request import EngineRequest
from d3engine.server.requests.tools import Calling, Thinking
from d3engine.server.schemas.requests import Common
from d3engine.server.state import AppState
from d3engine.server.tracing import RequestTrace
from d3engine.text.detokenizer import PlacedTexts, TokenTexts


class TextPlaces:
    """Follows one choice from the first token whose place is asked for.

    Both halves of a character that is cut begin in the same place, where it becomes whole.

    Args:
        texts: of the model's tokens.
        prompt_token_ids: what the answer goes on from.
        hidden: ids that are in no text.
        start: characters that stand before the first token.
        drops_space: whether the text has lost the space at its very beginning, if there was one.
    """

    def __init__(
        self,
        texts: TokenTexts,
        prompt_token_ids: Sequence[int],
        hidden: frozenset[int],
        *,
        start: int = 0,
        drops_space: bool = False,
    ) -> None:
        self._placed = PlacedTexts(texts, prompt_token_ids, hidden)
        self._hidden = hidden
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._length = start
        self._drops_space = drops_space
        self._index = len(prompt_token_ids)

    def of_answer(self, token_ids: Sequence[int]) -> list[int]:
        return [self._next(token_id) for token_id in token_ids]

    def _next(self, token_id: int) -> int:
        place = self._length
        if token_id not in self._hidden:
            _, content = self._placed.at(self._index, token_id)
            text = self._decoder.decode(content)
            if text and self._drops_space:
                text, self._drops_space = text.removeprefix(" "), False
            self._length += len(text)
        self._placed.grow(token_id, self._index)
        self._index += 1
        return place


C = TypeVar("C", bound=Common)


@dataclass(frozen=True)
class RequestContext(Generic[C]):
    """One request over HTTP, with its prompts as the engine takes them.

    `depth` is the request's own policy, None where it has the engine's. `calling` says how its answers call functions,
    and `thinking` how they mark reasoning.
    `trace` records its end. `id` is for the answer alone: no client can choose it.
    """

    served: AppState
    asked: C
    model: str
    prepared: Sequence[EngineRequest]
    depth: DepthPolicy | None
    id_prefix: str
    calling: Calling | None = None
    thinking: Thinking | None = None
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
    def is_text_alone(self) -> bool:
        return self.calling is None and self.thinking is None

    @property
    def policy(self) -> DepthPolicy:
        return self.depth or self.served.client.depth
