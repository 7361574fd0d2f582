"""What every route needs: the engine, the settings, and what is known of the requests at work."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import ParamSpec, TypeVar, cast

from starlette.requests import Request

from d3engine.async_engine.client import EngineClient
from d3engine.loading.certification import Certification
from d3engine.request.params import SamplingParams
from d3engine.server.asking.depth import DepthPolicies
from d3engine.server.asking.ignored import IgnoredFields
from d3engine.server.asking.tool_styles import ToolStyles
from d3engine.server.guards.traffic import AdmissionControl
from d3engine.server.metrics.exposition import Exposition
from d3engine.server.metrics.meters import Meters
from d3engine.server.model_ids import ModelIds
from d3engine.server.settings import ServerSettings
from d3engine.server.tracing.tracer import Tracer
from d3engine.text.token_texts import TokenTexts
from d3engine.text.tokenizer import Tokenizer

P = ParamSpec("P")
T = TypeVar("T")

TEXT_THREADS = 2
"""For /tokenize and its like, beside those that read requests for answers."""
QUEUE_PER_SEQUENCE = 4
"""Requests that may wait for each that may run, unless the settings say otherwise."""


class AppState:
    """One engine behind one app.

    Attributes:
        client: the engine, which the app uses and does not own.
        settings: what the server's owner has decided.
        models: the ids of the model.
        certification: which depths are certified for the model.
        depths: reads the depths of requests, and knows which are at work.
        ignored: names the fields that nobody knows.
        tool_styles: how chat templates show functions and write calls.
        traffic: the requests that have a place, and whether new ones are taken.
        meters: what is counted of requests.
        exposition: writes that, and what the engine counts, for Prometheus.
        tracer: makes spans of requests, None where nobody wants them; to be closed when the app has ended.
    """

    def __init__(self, client: EngineClient, settings: ServerSettings) -> None:
        self.client = client
        self.settings = settings
        self.certification = Certification(client.settings.directory, client.config.num_layers)
        self.models = ModelIds(
            settings,
            own=client.depth,
            num_layers=client.config.num_layers,
            max_model_len=client.max_model_len,
            certification=self.certification,
            created=int(time.time()),
        )
        self.depths = DepthPolicies(settings, client.depth)
        self.ignored = IgnoredFields()
        self.tool_styles = ToolStyles(client)
        self.traffic = AdmissionControl(_places(client, settings))
        self.meters = Meters(client.depth, client.config.num_layers)
        self.exposition = Exposition(settings.guards.metrics_prefix)
        endpoint = settings.otlp_traces_endpoint
        self.tracer = None if endpoint is None else Tracer(endpoint)

    async def in_thread(self, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """What a function of the tokenizer's makes of what may be long."""
        call = partial(function, *arguments, **named)
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(TEXT_THREADS, "d3engine-texts")

    @cached_property
    def texts(self) -> TokenTexts:
        """What the model's tokens read as."""
        return TokenTexts(self.tokenizer)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's; a server without one could answer nothing."""
        assert self.client.tokenizer is not None
        return self.client.tokenizer

    def hidden_ids(self, params: SamplingParams) -> frozenset[int]:
        """Tokens that are in no text of a request."""
        return self.tokenizer.special_ids if params.skip_special_tokens else frozenset()


def served_by(request: Request) -> AppState:
    """The engine behind the app that took this request."""
    return cast(AppState, request.app.state.served)


def _places(client: EngineClient, settings: ServerSettings) -> int:
    """How many sequences may run or wait."""
    running = client.settings.max_num_seqs
    waiting = settings.guards.max_queue
    return running + (QUEUE_PER_SEQUENCE * running if waiting is None else waiting)
