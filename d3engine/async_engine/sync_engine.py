"""The engine of an AsyncEngine for threads: the same answers, but whoever wants one blocks for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from d3engine.async_engine.answers import Answer, check_alone
from d3engine.async_engine.dispatcher import Dispatcher
from d3engine.async_engine.wakers import ThreadWaker
from d3engine.calls.vllm_arguments import refuse_others
from d3engine.request.engine_request import EngineRequest
from d3engine.request.params import SamplingParams
from d3engine.stats import EngineStats
from d3engine.text.chat_prompts import Messages
from d3engine.text.prompts import Prompt


class SyncEngine:
    """Made by `AsyncEngine.sync()`. Any number of threads may use it; each reads its prompts itself."""

    def __init__(
        self,
        owner: object,
        dispatcher: Dispatcher,
        prepare: Callable[..., EngineRequest],
        chat_prompt: Callable[..., dict[str, list[int]]],
    ) -> None:
        self._owner = owner  # which ends its engine when nobody holds it
        self._dispatcher = dispatcher
        self._prepare = prepare
        self.chat_prompt = chat_prompt

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> EngineRequest:
        """Read and check a request for `generate`, without side effects. Raises `InvalidValueError`."""
        return self._prepare(prompt, params, request_id, priority)

    def generate(
        self,
        prompt: Prompt | EngineRequest,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        **of_vllm: Any,
    ) -> Answer:
        """The outputs of one request, to be read with `for`; everything else as `AsyncEngine.generate` says."""
        refuse_others(of_vllm, "generate")
        if not isinstance(prompt, EngineRequest):
            return Answer(self._dispatcher, partial(self._prepare, prompt, params, request_id, priority))
        check_alone(params, request_id, priority)
        return Answer(self._dispatcher, lambda: prompt)

    def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        **template_arguments: Any,
    ) -> Answer:
        """The outputs that answer a conversation, as `generate` gives them; further arguments are `Engine.chat`'s."""

        def read() -> EngineRequest:
            return self._prepare(self.chat_prompt(messages, **template_arguments), params, request_id, priority)

        return Answer(self._dispatcher, read)

    def abort(self, request_id: str) -> None:
        """End a request: its reader gets a last output with finish_reason "abort". Unknown ids are passed over."""
        self._dispatcher.abort(request_id)

    def stats(self) -> EngineStats:
        """What the engine holds now, and what it has done since it began; asked between two steps."""
        notifier = ThreadWaker()
        slot = self._dispatcher.ask("stats", notifier)
        try:
            stats: EngineStats = notifier.take(slot)[0]
        finally:
            self._dispatcher.leave(slot.key)
        return stats
