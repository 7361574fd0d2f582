"""RequestOutput, its sequences and their measurements, with vLLM's names. None is frozen:
a stream makes three a token, which takes three times as long with frozen ones."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

from d3engine.request.hidden_states import HiddenStates

STEP_SECONDS = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
STEP_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
REQUEST_SECONDS = (1e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 1000.0)


@dataclass(frozen=True, slots=True)
class Histogram:
    """How many values there were of each size, and their sum.

    `counts[i]` are those of at most `bounds[i]` that are above the bound before it; the last count, one more than there
    are bounds, is of all that are above every bound.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float

    @property
    def count(self) -> int:
        """How many values there were in all."""
        return sum(self.counts)


class HistogramCounter:
    """A histogram that grows."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def histogram(self) -> Histogram:
        return Histogram(self._bounds, tuple(self._counts), self._sum)


class Timings:
    """Of one engine, since it began. A run of several steps counts as steps of equal length."""

    def __init__(self) -> None:
        self.step_seconds = HistogramCounter(STEP_SECONDS)
        self.step_rows = HistogramCounter(STEP_ROWS)
        self.queue_seconds = HistogramCounter(REQUEST_SECONDS)
        self.prefill_seconds = HistogramCounter(REQUEST_SECONDS)
        self.decode_seconds = HistogramCounter(REQUEST_SECONDS)
        self.last_step_time: float | None = None
        self.last_step_seconds: float | None = None
        self.last_step_rows: int | None = None

    def count_steps(self, num_steps: int, num_rows: int, begun: float, ended: float) -> None:
        """Count `num_steps` steps of `num_rows` rows each, which began and ended then by the monotonic clock."""
        self.last_step_time = ended
        self.last_step_seconds = (ended - begun) / num_steps
        self.last_step_rows = num_rows
        self.step_seconds.add(self.last_step_seconds, num_steps)
        self.step_rows.add(num_rows, num_steps)

    def count_request(self, metrics: RequestMetrics) -> None:
        """Count a finished request, as far as it came."""
        for tally, seconds in (
            (self.queue_seconds, metrics.queue_seconds),
            (self.prefill_seconds, metrics.prefill_seconds),
            (self.decode_seconds, metrics.decode_seconds),
        ):
            if seconds is not None:
                tally.add(seconds)

    def now(self) -> dict[str, Any]:
        """All of these by name, as values that stay as they are."""
        return {name: one.histogram() if isinstance(one, HistogramCounter) else one for name, one in vars(self).items()}


Bytes: TypeAlias = bytes
"""The type by another name, for classes with a field called `bytes`."""


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(slots=True)
class Logprob:
    """One token's log-probability under the raw distribution, its rank (1 is the likeliest), and what it reads as.

    `bytes` are what the token contributes to the text in its place, a space in front of a word included: joined over
    the tokens that an answer shows they are the answer's. `decoded_token` is the same as text, with U+FFFD for what is
    no whole character. Special tokens read as they are spelled, also where the text leaves them out. Both are None
    where no text is made.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None
    bytes: Bytes | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One sequence of a request, as far as it has come.

    `text` goes on where the prompt ends: prompt and text, joined, are one text, and a space between them is the text's.
    `depths[i]` counts the layers that ran to compute token i. Where tokens are drafted and verified, it is the token's
    share of the layers run for the draft and for the verification that yielded it, summed over all their rows: the
    rejected ones' too, so it may exceed the layers of the model. `stop_reason` is the stop string or stop token id that
    ended the sequence, or for finish_reason "abort" what went wrong; None otherwise. `hidden_states` are those that
    `SamplingParams.capture` asked for, once the sequence has ended.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: str | int | None
    depths: list[int]
    hidden_states: HiddenStates | None = None


@dataclass(slots=True)
class RequestMetrics:
    """Times in seconds on the monotonic clock; None while the event has not come.

    Of several sequences the one that was scheduled first counts, and the token that came last. Tokens of steps that a
    device has run by itself all come when it has run them.

    Under a policy that drafts, the counts are over all verifications of all sequences; otherwise they stay 0. Discarded
    tokens are those that a verification yielded after the one that ended the answer; `num_discarded_layers` is their
    share of the layers run, which no token's depth contains.
    """

    arrival_time: float
    first_token_time: float | None
    finished_time: float | None
    num_preemptions: int
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_verifications: int = 0
    num_discarded_tokens: int = 0
    num_discarded_layers: int = 0
    first_scheduled_time: float | None = None
    last_token_time: float | None = None

    @property
    def queue_seconds(self) -> float | None:
        """From the request's arrival until it entered the batch."""
        return _between(self.arrival_time, self.first_scheduled_time)

    @property
    def prefill_seconds(self) -> float | None:
        """From there to its first token."""
        return _between(self.first_scheduled_time, self.first_token_time)

    @property
    def decode_seconds(self) -> float | None:
        """From its first token to the last so far."""
        return _between(self.first_token_time, self.last_token_time)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens; None where nothing was drafted."""
        return self.num_accepted_tokens / self.num_drafted_tokens if self.num_drafted_tokens else None

    @property
    def tokens_per_verification(self) -> float | None:
        """Tokens that a verification yields: the accepted ones and one of its own; None where there was none."""
        return 1 + self.num_accepted_tokens / self.num_verifications if self.num_verifications else None


def _between(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else end - begin


@dataclass(slots=True)
class RequestOutput:
    """A request as far as it has come; `outputs` holds its n sequences by index."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int = field(default=0)
    embedding: list[float] | None = None
