"""The depth of a request: which policy it asks for, and whether it may.

The one idea: a request chooses among what the server's owner allows and never names code or files. What it brings is
read as `d3.json` is, after its name was found on the list.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec
from starlette.types import Scope

from d3engine.depth import DepthPolicy
from d3engine.depth.policy import policy_from_dict
from d3engine.errors import InvalidValueError, must_be
from d3engine.server.errors import RequestError, invalid
from d3engine.server.settings import ServerSettings

DEPTH_HEADER = "X-D3-Depth"
"""For clients that cannot add a field to the body: the same in a header, an object as JSON."""

_HEADER = DEPTH_HEADER.lower().encode()
LONGEST_HEADER = 1000
MOST_KNOWN = 64
"""Policies as requests spell them, of which it is remembered that they are allowed: most requests share a few."""
RETRY_SECONDS = 1
AUTO = "auto"

Asked = str | Mapping[str, Any] | None


class DepthPolicies:
    """Reads the depths of requests, and knows which policies are at work.

    Rows of one step are grouped by schedule, and each needs tables of its own: so there is a bound on how many
    different policies requests may have at work at once.
    """

    def __init__(self, settings: ServerSettings, own: DepthPolicy) -> None:
        self._settings = settings
        self._own = own
        self._at_work: Counter[DepthPolicy] = Counter()
        self._known: dict[str, DepthPolicy] = {}

    def read(self, model: str, field: Asked, header: str | None) -> DepthPolicy | None:
        """The policy of a request: by the id of its model, its field or its header; None is the engine's own.

        "auto" asks for nothing: it is what the model's id stands for. Raises `RequestError` for a depth that is
        unknown, malformed or not allowed, and where two of the three disagree.
        """
        asked: dict[str, DepthPolicy] = {}
        if model in self._settings.depth_aliases:
            asked["model"] = self._settings.depth_aliases[model]
        if field is not None and field != AUTO:
            asked["depth"] = self._policy(field)
        if header is not None and header != AUTO:
            asked[DEPTH_HEADER] = self._policy(_from_header(header))
        found = list(asked.values())
        if any(policy != found[0] for policy in found):
            raise invalid("depth", f"depth must be one; {' and '.join(asked)} ask for different ones.", "invalid_depth")
        return found[0] if found and found[0] != self._own else None

    @contextmanager
    def at_work(self, policy: DepthPolicy | None) -> Iterator[None]:
        """While a request of this policy is unfinished; raises `RequestError` (429) where there are too many others.

        The engine's own policy and those that its owner gave an id are always at work.
        """
        if policy is None or policy in self._settings.depth_aliases.values():
            yield
            return
        most = self._settings.max_depth_policies
        if policy not in self._at_work and len(self._at_work) >= most:
            message = f"{most} different depth policies are at work, which is the most; try again, or with one of them."
            headers = {"Retry-After": str(RETRY_SECONDS)}
            raise RequestError(429, message, param="depth", code="too_many_depths", headers=headers)
        self._at_work[policy] += 1
        try:
            yield
        finally:
            self._at_work[policy] -= 1
            if not self._at_work[policy]:
                del self._at_work[policy]

    def _policy(self, asked: str | Mapping[str, Any]) -> DepthPolicy:
        if isinstance(asked, str) and asked in self._settings.depth_aliases:
            return self._settings.depth_aliases[asked]
        words = repr(asked)  # tells true from 1 and 1 from 1.0, as options do
        policy = self._known.get(words)
        if policy is None:
            policy = self._described({"policy": asked} if isinstance(asked, str) else asked)
            if len(words) <= LONGEST_HEADER and len(self._known) < MOST_KNOWN:
                self._known[words] = policy
        return policy

    def _described(self, description: Mapping[str, Any]) -> DepthPolicy:
        if description == self._own.describe():
            return self._own
        if self._settings.lock_depth:
            raise invalid("depth", "depth must be absent, since this server's is fixed.", "depth_locked")
        self._check_allowed(description)
        try:
            return policy_from_dict(description)
        except InvalidValueError as error:
            raise invalid("depth", f"In depth, {error}.", "invalid_depth") from None

    def _check_allowed(self, description: Mapping[str, Any]) -> None:
        """Every policy that is named, those inside of others too, must be on the list: to look up any other name could
        load a package or a file."""
        name = description.get("policy")
        if name not in self._settings.allow_depth:
            ids = "".join(f', "{alias}"' for alias in self._settings.depth_aliases)
            names = " or ".join(self._settings.allow_depth) or "none"
            allowed = f'"auto"{ids}, or {{"policy": NAME}} with its options, where NAME is one of: {names}'
            raise invalid("depth", must_be("depth", description, allowed) + ".", "depth_not_allowed")
        for value in description.values():
            if isinstance(value, Mapping):
                self._check_allowed(value)


def depth_header(scope: Scope) -> str | None:
    """What a request says in that header, the first if there are several."""
    return next((value.decode("latin-1") for name, value in scope["headers"] if name == _HEADER), None)


def _from_header(header: str) -> str | Mapping[str, Any]:
    """A name, or an object as JSON."""
    if not header.lstrip().startswith("{"):
        return header
    try:
        return msgspec.json.decode(header[:LONGEST_HEADER], type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise invalid("depth", f"{DEPTH_HEADER} must be a name or a JSON object ({error}).", "invalid_depth") from None
