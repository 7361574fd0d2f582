"""Host check: under which names a server answers, so that a page of somebody else's domain cannot reach a local one.

A domain can be made to point at 127.0.0.1 after its page was loaded (DNS rebinding). What the page then asks is of one
origin to its browser, but carries that domain in `Host`.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from d3engine.server.errors import RequestError
from d3engine.server.guards.settings import GuardSettings

OWN_NAMES = ("localhost", "127.0.0.1", "::1")


def hosts_of(settings: GuardSettings) -> frozenset[str] | None:
    """The names that are answered to; None: all."""
    named = {_bare(name.lower()) for name in settings.allowed_hosts}
    if "*" in named or not (named or settings.is_local):
        return None
    return frozenset(named | ({*OWN_NAMES, _bare(settings.host.lower())} if settings.is_local else set()))


class HostGuard:
    """Refuses requests that call the server by a name that is not in `hosts`."""

    def __init__(self, app: ASGIApp, hosts: frozenset[str]) -> None:
        self.app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            given = [value for name, value in scope["headers"] if name == b"host"]
            if len(given) != 1 or name_of(given[0].decode("latin-1")) not in self._hosts:
                message = (
                    "This server does not answer to the host of this request; whoever runs it may name further hosts"
                    " by --allowed-hosts."
                )
                raise RequestError(421, message, code="host_not_allowed")
        await self.app(scope, receive, send)


def name_of(host: str) -> str:
    """The name in a Host header: without its port, without brackets, in small letters."""
    host = host.strip().lower()
    if host.startswith("["):
        return _bare(host.partition("]")[0] + "]")
    return host.partition(":")[0]


def _bare(name: str) -> str:
    return name.removeprefix("[").removesuffix("]")
