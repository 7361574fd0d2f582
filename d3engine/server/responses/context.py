"""A request on its way to an answer, and what it has come to: tokens and their places, layers, log-probabilities."""

from __future__ import annotations

import codecs
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar

from d3engine.depth import DepthPolicy, FullDepth
from d3engine.depth.labels import policy_in_words
from d3engine.request.engine_request import EngineRequest
from d3engine.request.outputs import Logprob, RequestOutput
from d3engine.server.requests.tools import Calling, Thinking
from d3engine.server.schemas import answers
from d3engine.server.schemas.requests import Common
from d3engine.server.state import AppState
from d3engine.server.tracing import RequestTrace
from d3engine.text.detokenizer import PlacedTexts, TokenTexts

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


class Writer(ABC):
    """What an interface makes of outputs in choices; it calls an answer `kind`, and a chunk of one `chunk_kind`."""

    kind: str
    chunk_kind: str

    def taken(self, output: RequestOutput) -> RequestOutput:
        """What of an output counts."""
        return output

    def extras(self, outputs: Sequence[RequestOutput]) -> dict[str, object]:
        """Further fields of a whole answer, or, of no outputs yet, of a stream's first chunk."""
        return {}

    @abstractmethod
    def choices(self, outputs: Sequence[RequestOutput]) -> Sequence[Mapping[str, Any]]:
        """The choices of a whole answer, from the whole output of each prompt."""

    @abstractmethod
    def chunks(self, number: int, output: RequestOutput) -> Sequence[Mapping[str, Any]]:
        """What is new of the choices of one prompt, one entry for each chunk."""


class UsageCounter:
    """Counts over outputs, deltas or whole ones."""

    def __init__(self, job: RequestContext[Any]) -> None:
        self._prompt_tokens = sum(len(prepared.prompt_token_ids) for prepared in job.prepared)
        self._completion_tokens = 0
        self._cached = [0] * len(job.prepared)
        self._drafts = any(prepared.draft_rule is not None for prepared in job.prepared)
        self._drafted, self._accepted = [0] * len(job.prepared), [0] * len(job.prepared)
        self._unfinished = len(job.prepared)
        self._depth = DepthCount(job) if job.asked.return_depths else None

    def add(self, number: int, output: RequestOutput) -> None:
        self._cached[number] = output.num_cached_tokens
        self._drafted[number] = output.metrics.num_drafted_tokens
        self._accepted[number] = output.metrics.num_accepted_tokens
        self._unfinished -= output.finished
        for answer in output.outputs:
            self._completion_tokens += len(answer.token_ids)
        if self._depth is not None:
            self._depth.add(number, output)

    @property
    def is_finished(self) -> bool:
        return not self._unfinished

    def usage(self) -> answers.Usage:
        found: answers.Usage = {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self._prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached)},
        }
        if self._drafts:
            drafted, accepted = sum(self._drafted), sum(self._accepted)
            found["completion_tokens_details"] = {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafted - accepted,
            }
        return found

    def depth(self) -> dict[str, answers.DepthSummary]:
        """`d3ext` of the whole answer or the last chunk; nothing where it was not asked for."""
        return {} if self._depth is None else {"d3ext": self._depth.summary()}


class DepthCount:
    """The layers that the tokens of one request ran."""

    def __init__(self, job: RequestContext[Any]) -> None:
        self._job = job
        self._layers = 0
        self._tokens: dict[tuple[int, int], int] = {}
        self._first: float | None = None
        self._last: float | None = None

    def add(self, number: int, output: RequestOutput) -> None:
        for answer in output.outputs:
            self._layers += sum(answer.depths)
            key = number, answer.index
            self._tokens[key] = self._tokens.get(key, 0) + len(answer.depths)
        first, last = output.metrics.first_token_time, output.metrics.last_token_time
        if first is not None and last is not None:
            self._first = first if self._first is None else min(self._first, first)
            self._last = last if self._last is None else max(self._last, last)

    def summary(self) -> answers.DepthSummary:
        num_layers = self._job.served.client.config.num_layers
        tokens = sum(self._tokens.values())
        # As /v1/models has it: what was measured is the model without adapters.
        is_measured = self._job.prepared[0].adapter is None or isinstance(self._job.policy, FullDepth)
        saved = [self._blocks_saved(self._job.prepared[number], length) for (number, _), length in self._tokens.items()]
        return {
            "policy": self._job.policy.describe(),
            "certified": is_measured and self._job.served.certification.covers(self._job.policy),
            "num_layers": num_layers,
            "mean_layers": self._layers / tokens if tokens else None,
            "layers_run": self._layers,
            "layers_saved": num_layers * tokens - self._layers,
            "kv_bytes_saved": sum(saved) * self._job.served.client.settings.block_bytes,
            "decode_seconds": None if self._first is None or self._last is None else self._last - self._first,
        }

    def _blocks_saved(self, prepared: EngineRequest, length: int) -> int:
        """Blocks that a sequence did not hold at its end although full depth would, of `length` generated tokens."""
        schedule = prepared.schedule
        if prepared.draft_rule is not None or length == 0 or schedule.on_skip != "none":  # else something fills them
            return 0
        size = self._job.served.client.settings.block_size
        entries = len(prepared.prompt_token_ids) + length - 1  # the last token is never fed
        return (schedule.num_layers - schedule.depth_at(length)) * -(-entries // size)


Row: TypeAlias = Mapping[int, Logprob]
"""What is known of one place: the token that stands there, and the likeliest ones."""

LOWEST = -9999.0
"""In place of minus infinity, which JSON lacks; vLLM's number."""


@dataclass(frozen=True)
class LogprobWords:
    """How a request wants them: how many of the likeliest, tokens as their text or as "token_id:N"."""

    num_top: int
    as_ids: bool

    def of_completion(
        self, token_ids: Sequence[int], rows: Sequence[Row | None], places: Sequence[int], first: str = ""
    ) -> answers.CompletionLogprobs:
        """Of these tokens; a row is None where nothing is known, which is at the first token of a prompt, whose text
        is `first`."""
        known: list[tuple[int, Row | None]] = list(zip(token_ids, rows, strict=True))
        return {
            "text_offset": list(places),
            "token_logprobs": [None if row is None else _number(row[token]) for token, row in known],
            "tokens": [
                self._spelled(token, first) if row is None else self._word(token, row[token]) for token, row in known
            ],
            "top_logprobs": [None if row is None else self._top(token, row) for token, row in known],
        }

    def of_chat(self, token_ids: Sequence[int], rows: Sequence[Row]) -> answers.ChatLogprobs:
        content: list[answers.TokenLogprob] = [
            {
                **self._entry(token, row[token]),
                "top_logprobs": [self._entry(*pair) for pair in likeliest(row)[: self.num_top]],
            }
            for token, row in zip(token_ids, rows, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _top(self, token: int, row: Row) -> dict[str, float]:
        """Text -> log-probability, of the likeliest tokens and of the one that stands there; of two tokens with one
        text the likelier counts."""
        found: dict[str, float] = {}
        for candidate, logprob in [*likeliest(row)[: self.num_top], (token, row[token])]:
            found.setdefault(self._word(candidate, logprob), _number(logprob))
        return found

    def _entry(self, token: int, logprob: Logprob) -> answers.TopLogprob:
        return {
            "token": self._word(token, logprob),
            "logprob": _number(logprob),
            "bytes": None if logprob.bytes is None else list(logprob.bytes),
        }

    def _word(self, token: int, logprob: Logprob) -> str:
        return self._spelled(token, logprob.decoded_token or "")

    def _spelled(self, token: int, text: str) -> str:
        return f"token_id:{token}" if self.as_ids else text


def likeliest(row: Row) -> list[tuple[int, Logprob]]:
    return sorted(row.items(), key=lambda pair: pair[1].rank)


def _number(logprob: Logprob) -> float:
    return max(logprob.logprob, LOWEST)


def of_prompt(rows: Iterable[Row | None]) -> answers.PromptLogprobs:
    """vLLM's `prompt_logprobs`."""
    return [
        None
        if row is None
        else {
            str(token): {"logprob": _number(one), "rank": one.rank, "decoded_token": one.decoded_token}
            for token, one in row.items()
        }
        for row in rows
    ]


class TextPlaces:
    """Follows one choice from the first token whose place is asked for.

    Both halves of a character that is cut begin in the same place, where it becomes whole. Ids that are `hidden` are in
    no text, `start` characters stand before the first token, and with `drops_space` the text has lost a space there.
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
