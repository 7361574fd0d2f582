"""Routing where routes raise: the guards alone handle errors, so no layer of Starlette's lies around a route."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from starlette import routing
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from d3engine.server.errors import RequestError


class Route(routing.Route):
    """A path and what answers there."""

    def __init__(
        self, path: str, endpoint: Callable[[Request], Awaitable[Response]], *, methods: Iterable[str]
    ) -> None:
        super().__init__(path, endpoint, methods=list(methods))

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            response = await endpoint(Request(scope, receive, send))
            await response(scope, receive, send)

        self.app = answer


def errors_raised(router: ASGIApp) -> ASGIApp:
    """The router, which raises `RequestError` for a path or a method that is not there."""

    async def route(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await router(scope, receive, send)
        except HTTPException as error:
            raise _no_route(error, scope) from None

    return route


def _no_route(error: HTTPException, scope: Scope) -> RequestError:
    path = scope["path"][:256]  # not of the URL, in which Host has a say
    if error.status_code == 404:
        message, code = f"There is nothing at {path!r}.", "not_found"
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "other methods")
        message, code = f"{path!r} takes {allowed}, not {scope['method']}.", "method_not_allowed"
    else:
        message, code = str(error.detail), "invalid_request"
    return RequestError(error.status_code, message, code=code, headers=error.headers)
