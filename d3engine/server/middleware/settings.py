"""Who may call a server, how much they may send, and how long anything may take, as its operator says."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field

from d3engine.errors import NOTHING, InvalidValueError, require
from d3engine.utils.arguments import Integers, Numbers, argument, check_arguments

MIB = 2**20
PREFIX = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
ORIGIN = re.compile(r"https?://[^/\s?#]+")
HOST_NAME = re.compile(r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]")
LONGEST = 86_400.0
"""Seconds that any limit of time may be."""
SECONDS = Numbers(0, LONGEST, open_low=True)


@dataclass(frozen=True, kw_only=True)
class GuardSettings:
    """All of it; raises `InvalidValueError` for a value that is not allowed. Times are in seconds.

    Args:
        host: the address that the server binds.
        port: its port; 0: any that is free.
        api_keys: any of them opens every route; none: no key is asked for.
        metrics_keys: any of them opens /metrics, and nothing else.
        allow_no_key: bind an address that others reach although there is no key.
        allowed_hosts: names by which clients may call it; none: this machine's on a loopback address, elsewhere any.
        allowed_origins: origins whose pages may call it; none: no page of another origin.
        max_body_bytes: of a request.
        max_request_work: characters and list entries of a request in all, those that concern each answer counted for
            each; None: as many as `max_body_bytes`.
        max_connections: that are open at once, though no more than half of the files that the process may open.
        max_queue: sequences that wait for a place in the batch; None: four times max_num_seqs.
        header_timeout: until the head of a request is there.
        body_timeout: until its body is there.
        request_timeout: until the answer is complete; None: no limit.
        write_timeout: for a client to take what was sent before its request is ended.
        keep_alive_timeout: that an idle connection is kept.
        drain_timeout: after SIGTERM, for requests to be answered.
        health_stall_seconds: without a step while requests are unfinished; after them /health says that it hangs.
        metrics_prefix: of the names of all metrics.
    """

    host: str = "127.0.0.1"
    port: int = argument(8000, Integers(0, 65535))
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    metrics_keys: tuple[str, ...] = field(default=(), repr=False)
    allow_no_key: bool = False
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()

    max_body_bytes: int = argument(8 * MIB, Integers(1024, 1024 * MIB))
    max_request_work: int | None = argument(None, Integers(1024))
    max_connections: int = argument(1024, Integers(1, 1_000_000))
    max_queue: int | None = argument(None, Integers(0, 1_000_000))
    header_timeout: float = argument(10.0, SECONDS)
    body_timeout: float = argument(60.0, SECONDS)
    request_timeout: float | None = argument(None, SECONDS)
    write_timeout: float = argument(60.0, SECONDS)
    keep_alive_timeout: float = argument(5.0, SECONDS)
    drain_timeout: float = argument(30.0, Numbers(0, LONGEST))
    health_stall_seconds: float = argument(60.0, SECONDS)

    metrics_prefix: str = "d3engine"

    def __post_init__(self) -> None:
        check_arguments(self)
        is_prefix = PREFIX.fullmatch(self.metrics_prefix) is not None
        require(is_prefix, "metrics_prefix", self.metrics_prefix, "letters, digits and _, not beginning with a digit")
        self._check_who_may_call()

    def _check_who_may_call(self) -> None:
        for name in ("api_keys", "metrics_keys"):
            for key in getattr(self, name):
                is_key = len(key) >= 8 and key.isascii() and key.isprintable() and " " not in key
                if not is_key:  # never shown: it may be a real one with a letter too many
                    raise InvalidValueError(name, NOTHING, "keys of at least 8 ASCII characters without spaces")
        for origin in self.allowed_origins:
            is_origin = origin == "*" or ORIGIN.fullmatch(origin) is not None
            require(is_origin, "allowed_origins", origin, 'origins like "https://example.org:8443", or "*"')
        for host in self.allowed_hosts:
            is_host = host == "*" or HOST_NAME.fullmatch(host) is not None
            require(is_host, "allowed_hosts", host, 'names or addresses without a port, or "*"')
        if not (self.is_local or self.api_keys or self.allow_no_key):
            allowed = (
                "an address of this machine alone (127.0.0.1) as long as there is no API key: give one, or say by"
                " allow_no_key that everybody who reaches the port may use the model"
            )
            raise InvalidValueError("host", self.host, allowed)

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False
