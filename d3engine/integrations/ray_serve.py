"""Ray Serve: OpenAI's routes over several replicas of an engine (extra `ray`)."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from d3engine.errors import MissingExtraError, require, require_integer, require_number
from d3engine.integrations.proxy import ROUTINGS, Proxy, Replica, ReplicaDiedError, beginning, least_loaded
from d3engine.server.errors import RequestError
from d3engine.server.middleware.limits import RETRY_AFTER
from d3engine.server.settings import ServerSettings

try:
    from ray import serve
    from ray.exceptions import RayActorError
    from ray.serve.config import RequestRouterConfig
    from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
    from ray.serve.handle import DeploymentHandle
    from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
except ImportError:
    raise MissingExtraError("ray[serve]", "ray", "d3engine.integrations.ray_serve") from None

PROXY_REQUESTS = 10_000
"""Concurrent requests of a proxy: it only forwards them, so the replicas set the limit."""

ASK_ALL_SECONDS = 10.0


def app(
    model: str | os.PathLike[str],
    *,
    num_replicas: int | tuple[int, int] = 1,
    num_doors: int = 1,
    max_ongoing_requests: int = 64,
    max_queue: int = 256,
    drain_timeout: float = 30.0,
    routing: str | None = None,
    cohort_seconds: float = 0.2,
    settings: ServerSettings | None = None,
    autoscaling: Mapping[str, Any] | None = None,
    actor_options: Mapping[str, Any] | None = None,
    **engine_arguments: Any,
) -> serve.Application:
    """An application for `ray.serve.run`, or for `serve run MODULE:NAME`.

        from ray import serve
        from d3engine.integrations.ray_serve import app

        serve.run(app("demo", num_replicas=2))

    It has two deployments: replicas, each an engine behind the app of `d3engine serve`, and proxies without a model,
    which outlive them and report a replica's death.

    Args:
        model: as for `Engine`; a path must be valid on every machine of the cluster.
        num_replicas: engines; with a pair Ray scales between the two numbers, by the requests that wait.
        num_doors: proxy processes.
        max_ongoing_requests: concurrent requests of a replica; further ones wait in the proxy for any replica.
        max_queue: requests that may wait in a proxy; further ones get a 429.
        drain_timeout: seconds for the running requests of a replica that is removed.
        routing: the rule of `d3engine.integrations.proxy.ROUTINGS` that selects a replica, such as "by prefix"; None:
            Ray's own, of two replicas at random the one with fewer requests. Each proxy applies it independently.
        cohort_seconds: window of "by depth cohort", in which requests go to one replica.
        settings: of the server before each engine, as of `d3engine serve`: hosts, names and keys. Ray binds the port.
            By default only this machine may call.
        autoscaling: further fields of Ray's `AutoscalingConfig`, where `num_replicas` is a pair.
        actor_options: Ray's options of a replica's process, such as `{"num_cpus": 4, "num_gpus": 1}`.
        engine_arguments: as for `Engine`.

    Raises:
        InvalidValueError: for a value that is not allowed.
        MissingExtraError: by the import of this module, without Ray.
    """
    name = os.path.basename(os.path.normpath(model))
    settings = settings or ServerSettings(model_names=(name,))
    require_integer("num_doors", num_doors, 1)
    require_integer("max_ongoing_requests", max_ongoing_requests, 1)
    require_integer("max_queue", max_queue, 0)
    require_number("drain_timeout", drain_timeout, 0, 86400)
    require(routing is None or routing in ROUTINGS, "routing", routing, f"None, {', '.join(ROUTINGS)}")
    require_number("cohort_seconds", cohort_seconds, 0, 86400)
    replicas = serve.deployment(_RayReplica, name="Replica").options(
        **_scaling(num_replicas, max_ongoing_requests, autoscaling),
        max_ongoing_requests=max_ongoing_requests,
        max_queued_requests=max_queue,
        graceful_shutdown_timeout_s=drain_timeout,
        **_router(routing, cohort_seconds),
        ray_actor_options={"num_cpus": 1, **(actor_options or {})},
    )
    proxies = serve.deployment(_RayProxy, name="Proxy").options(
        num_replicas=num_doors,
        max_ongoing_requests=PROXY_REQUESTS,
        graceful_shutdown_timeout_s=drain_timeout,
        ray_actor_options={"num_cpus": 0},
    )
    guards = settings.guards
    return proxies.bind(
        replicas.bind(os.fspath(model), settings, engine_arguments),
        guards.max_body_bytes,
        guards.api_keys,
        guards.metrics_keys,
    )


def _scaling(
    num_replicas: int | tuple[int, int], at_once: int, autoscaling: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Ray's options of the number of replicas; one is added as soon as requests wait."""
    if isinstance(num_replicas, int):
        require(autoscaling is None, "autoscaling", autoscaling, "None where num_replicas is one number")
        return {"num_replicas": require_integer("num_replicas", num_replicas, 1)}
    fits = isinstance(num_replicas, tuple) and len(num_replicas) == 2
    require(fits, "num_replicas", num_replicas, "a number, or a pair of the least and the most")
    least, most = num_replicas
    require_integer("num_replicas", least, 1)
    require_integer("num_replicas", most, least)
    bounds = {"min_replicas": least, "max_replicas": most, "target_ongoing_requests": at_once}
    return {"autoscaling_config": {**bounds, **(autoscaling or {})}}


def _router(routing: str | None, cohort_seconds: float) -> dict[str, Any]:
    if routing is None:
        return {}
    rule = {"routing": routing, "cohort_seconds": cohort_seconds}
    path = "d3engine.integrations.ray_serve:RuleRouter"
    return {"request_router_config": RequestRouterConfig(request_router_class=path, request_router_kwargs=rule)}


class _RayReplica(Replica):
    """A replica as a deployment; Ray calls `check_health`."""

    def __init__(self, model: str, settings: ServerSettings, engine_arguments: Mapping[str, Any]) -> None:
        name = serve.get_replica_context().replica_id.unique_id
        super().__init__(name, model, settings, engine_arguments)


class _RayProxy:
    """The ingress of the application."""

    def __init__(
        self, replicas: DeploymentHandle, max_body_bytes: int, api_keys: tuple[str, ...], metrics_keys: tuple[str, ...]
    ) -> None:
        self._replicas = replicas
        self._proxy = Proxy(self._ask, self._ask_all, max_body_bytes, api_keys, metrics_keys)

    async def __call__(self, request: Request) -> Response:
        """Called by Ray; the response writes itself."""
        return _ProxyResponse(self._proxy)

    async def _ask(self, scope: Scope, body: bytes) -> AsyncGenerator[list[Message], None]:
        answer: Any = self._replicas.options(stream=True).answer.remote(scope, body)
        try:
            async for messages in answer:
                yield messages
        except (GeneratorExit, asyncio.CancelledError):
            with suppress(Exception):  # it has ended already
                answer.cancel()
            raise
        except RayActorError as error:
            raise ReplicaDiedError(type(error).__name__) from None
        except BackPressureError:
            message = "The replicas have as many requests as they take; try again later."
            raise RequestError(429, message, code="queue_full", headers={"Retry-After": RETRY_AFTER}) from None
        except DeploymentUnavailableError:
            raise _no_replica() from None

    async def _ask_all(self, scope: Scope, body: bytes) -> list[tuple[str, list[Message]]]:
        answers = self._replicas.broadcast("whole_answer", scope, body)
        found = await answers.results_async(timeout_s=ASK_ALL_SECONDS, return_exceptions=True)
        sound = [answer for answer in found if not isinstance(answer, BaseException)]
        if not sound:
            raise _no_replica()
        return sound


def _no_replica() -> RequestError:
    headers = {"Retry-After": RETRY_AFTER}
    return RequestError(503, "No replica can be reached.", code="no_replica", headers=headers)


class _ProxyResponse(Response):
    """A response that the proxy writes."""

    def __init__(self, proxy: Proxy) -> None:
        super().__init__()
        self._proxy = proxy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_once(message: Message) -> None:
            if message["type"] == "http.response.start":  # Ray adds the request's id
                headers = [header for header in message["headers"] if header[0] != b"x-request-id"]
                message = {**message, "headers": headers}
            await send(message)

        await self._proxy(scope, receive, send_once)


class RuleRouter(RequestRouter):  # type: ignore[misc]  # untyped
    """Selects the replica that the rule names, and any other where that one is full."""

    def initialize_state(self, *, routing: str, cohort_seconds: float) -> None:
        """Called by Ray with the deployment's `request_router_kwargs`."""
        self._rule = ROUTINGS[routing](cohort_seconds)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks of replicas: Ray takes the first rank with room, and in it the replica with fewest requests."""
        if pending_request is None or not candidate_replicas:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # between two rounds, where all are full
        busy = {name_of(one): self.replica_queue_len_cache.get(one.replica_id) or 0 for one in candidate_replicas}
        chosen = self._chosen(pending_request, busy)
        first = [one for one in candidate_replicas if name_of(one) == chosen]
        return [first, [one for one in candidate_replicas if one not in first]]

    def _chosen(self, request: PendingRequest, busy: dict[str, int]) -> str:
        _scope, body = request.args
        if not body:  # no generation, so no cohort
            return least_loaded(busy)
        return self._rule.choose(time.monotonic(), beginning(body), busy)


def name_of(replica: Any) -> str:
    """A replica's name, as in the metrics."""
    return str(replica.replica_id.unique_id)
