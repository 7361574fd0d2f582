"""Who may call: the names under which a server answers, which DNS rebinding (a page's own domain made to point at
127.0.0.1) cannot forge in `Host`, and API keys."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from hmac import compare_digest

from starlette.types import ASGIApp, Receive, Scope, Send

from d3engine.server.errors import RequestError
from d3engine.server.middleware.settings import GuardSettings

OWN_NAMES = ("localhost", "127.0.0.1", "::1")


def hosts_of(settings: GuardSettings) -> frozenset[str] | None:
    """The names that are answered to; None: all."""
    named = {_bare(name.lower()) for name in settings.allowed_hosts}
    if "*" in named or not (named or settings.is_local):
        return None
    return frozenset(named | ({*OWN_NAMES, _bare(settings.host.lower())} if settings.is_local else set()))


def name_of(host: str) -> str:
    """The name in a Host header: without its port, without brackets, in small letters."""
    host = host.strip().lower()
    if host.startswith("["):
        return _bare(host.partition("]")[0] + "]")
    return host.partition(":")[0]


def _bare(name: str) -> str:
    return name.removeprefix("[").removesuffix("]")


OPEN_PATHS = frozenset({"/health", "/ready"})
"""What answers without a key: nothing of a model, of a user or of the settings."""
METRICS_PATH = "/metrics"


def digests(keys: Iterable[bytes]) -> list[bytes]:
    return [hashlib.sha256(key).digest() for key in keys]


def known_key(known: Sequence[bytes], given: Iterable[bytes]) -> str | None:
    """A name for a key of these digests among `given`, None without one, in a time that says nothing of how much of a
    key was right, nor of which."""
    hashed = digests(given)
    matches = [one for one in known for other in hashed if compare_digest(other, one)]
    return matches[0].hex() if matches else None


class AccessGuard:
    """Lets requests through that call the server by one of its names and bring a key where the path asks for one, as
    `Authorization: Bearer KEY` or `x-api-key: KEY`; `hosts` None: any name."""

    def __init__(
        self,
        app: ASGIApp,
        api_keys: Iterable[str],
        metrics_keys: Iterable[str],
        open_paths: frozenset[str] = OPEN_PATHS,
        hosts: frozenset[str] | None = None,
    ) -> None:
        self.app = app
        self._api, self._metrics = (digests(key.encode() for key in keys) for keys in (api_keys, metrics_keys))
        self._open_paths = open_paths
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            self.check(scope)
        await self.app(scope, receive, send)

    def check(self, scope: Scope) -> None:
        """Raise `RequestError`: 421 for another name of the server, 401 for a path that asks for a key without one."""
        if self._hosts is not None:
            given = [value for name, value in scope["headers"] if name == b"host"]
            if len(given) != 1 or name_of(given[0].decode("latin-1")) not in self._hosts:
                message = (
                    "This server does not answer to the host of this request; its operator may name further hosts by"
                    " --allowed-hosts."
                )
                raise RequestError(421, message, code="host_not_allowed")
        if scope["path"] in self._open_paths:
            return
        is_for_metrics = scope["path"] == METRICS_PATH and bool(self._metrics)
        if not self._api and not is_for_metrics:
            return
        given = list(_keys_of(scope))
        key = known_key(self._api, given)
        is_known = key is not None
        if is_for_metrics:
            is_known |= known_key(self._metrics, given) is not None
        if is_known:
            scope.setdefault("state", {})["api_key"] = key or ""  # by which requests take turns
            return
        message = (
            "This API key is not one of the server's."
            if given
            else "An API key is missing: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`."
        )
        headers = {"WWW-Authenticate": "Bearer"}
        raise RequestError(401, message, code="invalid_api_key", headers=headers)


def _keys_of(scope: Scope) -> Iterable[bytes]:
    for name, value in scope["headers"]:
        if name == b"x-api-key":
            yield value.strip()
        elif name == b"authorization":
            scheme, _, key = value.strip().partition(b" ")
            if scheme.lower() == b"bearer":
                yield key.strip()
