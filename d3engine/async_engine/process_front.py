"""What an engine in another process leaves to this one: its facts, and reading prompts.

The one idea: nothing here touches weights or a device. Requests are checked against a scheduler like the engine's own,
which plans nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from d3engine.async_engine import wire
from d3engine.calls.chats import WritesChatPrompts
from d3engine.calls.new_requests import NewRequests
from d3engine.loading.bridges import NOWHERE, bridge_store
from d3engine.loading.certification import Certification
from d3engine.loading.defaults import default_sampling_params
from d3engine.loading.facts import EngineProperties
from d3engine.loading.parts import new_cache
from d3engine.loading.settings import settings_of_plain
from d3engine.request.engine_request import EngineRequest
from d3engine.request.params import SamplingParams
from d3engine.scheduling.scheduler import Scheduler
from d3engine.scheduling.waiting import Immediate
from d3engine.text.chat_prompts import ChatPrompts
from d3engine.text.prompts import Prompt
from d3engine.text.tokenizer import load_tokenizer


class ProcessFront(EngineProperties, WritesChatPrompts):
    """Of the engine that `ready` describes, made with `arguments`."""

    def __init__(self, ready: wire.Ready, arguments: Mapping[str, Any]) -> None:
        self.settings = settings_of_plain(ready.settings, arguments.get("admission") or Immediate())
        self.default_sampling_params = default_sampling_params(self.settings.directory)
        tokenizer = Path(arguments.get("tokenizer") or self.settings.directory)
        self.tokenizer = None if arguments.get("skip_tokenizer_init") else load_tokenizer(tokenizer)
        self.bridges = bridge_store(self.settings, device=NOWHERE)
        self._requests = NewRequests(
            self.config,
            self.tokenizer,
            self.depth,
            self.max_model_len,
            seed=0,
            bridges=self.bridges,
            log=Certification(self.directory, self.config.num_layers).log,
        )
        cache = new_cache(self.settings, self.config, ready.num_blocks)
        self._scheduler = Scheduler(self.settings.scheduler_config, cache)
        self._chat_prompts = ChatPrompts(self.directory, self.tokenizer)

    def prepare(
        self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None, priority: int = 0
    ) -> EngineRequest:
        """As `Engine.prepare`."""
        given = self.default_sampling_params if params is None else params
        prepared = self._requests.prepare(prompt, given, request_id, priority)
        self._scheduler.fit(self._requests.probe(prepared))
        wire.plain_params(given)
        return prepared

    def owns(self, prepared: EngineRequest) -> bool:
        """Whether a request was checked against this engine's limits."""
        return prepared.owner is self._requests
