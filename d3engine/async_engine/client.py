"""What a server asks of an engine, wherever it runs: `AsyncEngine` keeps this promise on a thread of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from d3engine.depth import DepthPolicy
from d3engine.loading.settings import EngineSettings
from d3engine.model.config import ModelConfig
from d3engine.request.engine_request import EngineRequest
from d3engine.request.outputs import RequestOutput
from d3engine.request.params import SamplingParams
from d3engine.stats import EngineStats
from d3engine.text.chat_prompts import Messages
from d3engine.text.prompts import Prompt
from d3engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Whether an engine still works; read without asking it, so a hung one is told too.

    Attributes:
        last_turn: when it last began a step or a wait, in seconds of `time.monotonic()`; never before the work came
            that it has now. While `is_working`, its age is how long the running step has taken.
        is_working: whether anybody waits for it.
        error: why it has ended, in words; None while it lives.
    """

    last_turn: float
    is_working: bool
    error: str | None


class EngineClient(Protocol):
    """An engine for many callers at once. Unless said otherwise, everything may be used from any event loop."""

    @property
    def settings(self) -> EngineSettings:
        """What its arguments came to."""

    @property
    def config(self) -> ModelConfig:
        """The model's sizes and constants."""

    @property
    def depth(self) -> DepthPolicy:
        """The policy of requests that bring none of their own."""

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and answer at most."""

    @property
    def default_sampling_params(self) -> SamplingParams:
        """What requests without parameters get."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None for an engine that works with token ids alone."""

    async def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> EngineRequest:
        """Read and check a request without side effects, a long one in a thread. Raises `InvalidValueError`."""

    async def chat_prompt(self, messages: Messages, **template_arguments: Any) -> Mapping[str, list[int]]:
        """The prompt of a conversation, written in a pool of threads; the arguments are those of `Engine.chat`."""

    async def chat_template(self) -> str | None:
        """The text of the model's own chat template, None without one; its files are read once."""

    def generate(
        self,
        prompt: Prompt | EngineRequest,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """The outputs of one request, as its `output_kind` says; those that wait for their reader are merged.

        Leaving it in whatever way (its end, `aclose()`, a cancelled task, forgetting it) ends the request.
        """

    async def abort(self, request_id: str) -> None:
        """End a request: its reader gets a last output with finish_reason "abort"."""

    async def stats(self) -> EngineStats:
        """What the engine holds now, and what it has done since it began."""

    def heartbeat(self) -> Heartbeat:
        """Whether it still works, without asking it."""

    async def drain(self, timeout: float | None = None) -> bool:
        """Take no more requests, and wait until all have ended; whether they did within `timeout` seconds."""

    async def close(self) -> None:
        """End it and everything that still waits for it. Idempotent."""
