"""The state of an app: its engine, the ids under which that is served, and whether it can be expected to answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, NotRequired, ParamSpec, TypeAlias, TypedDict, TypeVar, cast

import orjson
from starlette.requests import Request
from starlette.responses import Response

from d3engine.async_engine.client import Heartbeat
from d3engine.depth import FullDepth
from d3engine.engine.depth import Certification
from d3engine.errors import require
from d3engine.request.params import SamplingParams
from d3engine.server.errors import RequestError
from d3engine.server.metrics import Exposition, Meters
from d3engine.server.middleware.limits import AdmissionControl
from d3engine.server.requests.refused import IgnoredFields
from d3engine.server.requests.sampling import DepthPolicies
from d3engine.server.requests.tools import ChatStyles
from d3engine.server.settings import ServerSettings
from d3engine.server.tracing import require_tracing_packages
from d3engine.text.detokenizer import TokenTexts
from d3engine.text.infill import InfillFormat, infill_format
from d3engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from d3engine.async_engine.async_engine import AsyncEngine
    from d3engine.server.tracing_export import SpanWriter


class ModelExtra(TypedDict):
    """What is said of a model's depth."""

    num_layers: int
    depth: dict[str, object]
    calibrated: bool
    certified: bool
    certified_depth: dict[str, object] | None  # what was calibrated, be it the model's own depth or not


class ModelCard(TypedDict):
    """One entry of GET /v1/models."""

    id: str
    object: str
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    d3ext: NotRequired[ModelExtra]


class ModelList(TypedDict):
    """The answer to GET /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]


LATEST = ":latest"
"""What Ollama's clients put behind a name without a tag."""


class ModelIds:
    """Which ids there are, and the depth that each stands for."""

    def __init__(self, client: AsyncEngine, settings: ServerSettings, certification: Certification) -> None:
        self._client = client
        self.default = settings.model_names[0]
        self.aliases = dict(settings.depth_aliases)
        self._names = settings.model_names
        self._certification = certification
        self._created = int(time.time())
        for name in client.lora_adapters:
            require(not self.is_own(name), "lora_modules", name, "a name that is no id of the model")

    def __contains__(self, name: str) -> bool:
        return self.is_own(name) or name in self._client.lora_adapters

    def check(self, name: str | None) -> str:
        """The id of a request, which may leave it out or end it in ":latest".

        Raises `RequestError` for one that is not served.
        """
        if name is None:
            return self.default
        for known in (name, name.removesuffix(LATEST)):
            if known in self:
                return known
        raise no_such_model(name)

    def adapter(self, name: str) -> str | None:
        """The LoRA adapter that an id stands for, None for the model alone."""
        return name if name in self._client.lora_adapters else None

    def is_own(self, name: str) -> bool:
        """Whether an id is the model's, at one depth or another, so that no adapter may have it."""
        return name in self._names or name in self.aliases

    def cards(self) -> list[ModelCard]:
        return [self.card(name) for name in (*self._names, *self.aliases, *self._client.lora_adapters)]

    def card(self, name: str) -> ModelCard:
        """The entry of one id; raises `RequestError` for one that is not served."""
        name = self.check(name)
        policy = self.aliases.get(name, self._client.depth)
        # What was measured is the model alone: an adapter is certified for full depth, which needs no measurement.
        is_base = self.adapter(name) is None
        is_measured = is_base or isinstance(policy, FullDepth)
        known = self._certification.certified if is_base else None
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "d3engine",
            "root": self.default,
            "parent": None if name in self._names else self.default,
            "max_model_len": self._client.max_model_len,
            "d3ext": {
                "num_layers": self._client.config.num_layers,
                "depth": policy.describe(),
                "calibrated": is_measured and self._certification.is_calibrated(policy),
                "certified": is_measured and self._certification.covers(policy),
                "certified_depth": None if known is None else known.describe(),
            },
        }


def no_such_model(name: str) -> RequestError:
    shown = name if len(name) <= 256 else name[:253] + "..."
    message = f"The model {shown!r} does not exist here; GET /v1/models lists those that do."
    return RequestError(404, message, param="model", code="model_not_found")


Status: TypeAlias = Literal["ok", "dead", "hung", "draining", "full"]


@dataclass(frozen=True, slots=True)
class Health:
    """What is so now, and why."""

    status: Status
    reason: str | None = None

    @property
    def is_ok(self) -> bool:
        return self.status == "ok"


def health(heartbeat: Heartbeat, traffic: AdmissionControl, stall_seconds: float, now: float | None = None) -> Health:
    """Whether the server can be expected to answer; `now` is a time of `time.monotonic()`, without one it is now."""
    if heartbeat.error is not None:
        return Health("dead", "the engine has ended after a fault of its own")
    since = (time.monotonic() if now is None else now) - heartbeat.last_turn
    if heartbeat.is_working and since > stall_seconds:
        return Health("hung", f"requests wait, and no step has ended for {since:.0f} seconds")
    if traffic.is_draining:
        return Health("draining", "the server is shutting down, and finishes what it has begun")
    return Health("ok")


def readiness(healthy: Health, traffic: AdmissionControl) -> Health:
    if healthy.is_ok and traffic.is_full:
        return Health("full", "the queue is full")
    return healthy


def json_response(content: Any, headers: Mapping[str, str] | None = None) -> Response:
    """A 200 with this content as JSON."""
    return Response(orjson.dumps(content), headers=dict(headers or {}), media_type="application/json")


P = ParamSpec("P")
T = TypeVar("T")

TEXT_THREADS = 2
"""For /tokenize and its like, beside those that read requests for answers."""
QUEUE_PER_SEQUENCE = 4
"""Requests that may wait for each that may run, unless the settings say otherwise."""


class AppState:
    """One engine behind one app, which does not own it; `tracer` is to be closed when the app has ended."""

    def __init__(self, client: AsyncEngine, settings: ServerSettings) -> None:
        self.client = client
        self.settings = settings
        self.certification = Certification(client.settings.directory, client.config.num_layers)
        self.models = ModelIds(client, settings, self.certification)
        self.depths = DepthPolicies(settings, client.depth)
        self.ignored = IgnoredFields()
        self.chat_styles = ChatStyles(client, settings.tool_call_parser, settings.reasoning_parser)
        running, waiting = client.settings.max_num_seqs, settings.guards.max_queue
        self.traffic = AdmissionControl(running + (QUEUE_PER_SEQUENCE * running if waiting is None else waiting))
        self.meters = Meters(client.depth, client.config.num_layers)
        self.exposition = Exposition(settings.guards.metrics_prefix)
        endpoint = settings.otlp_traces_endpoint
        self.tracer = None if endpoint is None else _tracer(endpoint)

    async def in_thread(self, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """What a function of the tokenizer's makes of what may be long."""
        call = partial(function, *arguments, **named)
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(TEXT_THREADS, "d3engine-texts")

    @cached_property
    def texts(self) -> TokenTexts:
        return TokenTexts(self.tokenizer)

    @cached_property
    def infill(self) -> InfillFormat | None:
        """The model's tokens for filling in the middle of a text; None where it has none."""
        return infill_format(self.tokenizer)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's; a server without one could answer nothing."""
        assert self.client.tokenizer is not None
        return self.client.tokenizer

    def hidden_ids(self, params: SamplingParams) -> frozenset[int]:
        """Tokens that are in no text of a request."""
        return self.tokenizer.special_ids if params.skip_special_tokens else frozenset()


def served_by(request: Request) -> AppState:
    """The engine that this request is for: the app's own, unless its body names a further model."""
    found = request.scope.get("state", {}).get("served", request.app.state.served)
    return cast(AppState, found)


def _tracer(endpoint: str) -> SpanWriter:
    """What sends the spans of one app to `endpoint`. Raises `MissingExtraError` without the extra `otel`."""
    require_tracing_packages("otlp_traces_endpoint")
    from d3engine.server.tracing_export import SpanWriter

    return SpanWriter(endpoint)
