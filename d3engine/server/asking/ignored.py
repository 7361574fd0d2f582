"""Fields of requests that nobody here knows: taken, and named to whoever sent them."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence

_log = logging.getLogger(__name__)

IGNORED_FIELDS = "X-D3-Ignored-Fields"
"""The header of an answer that names them."""

MOST_NAMED = 16
"""In one header."""
MOST_LOGGED = 256
"""Distinct ones that the log names, ever."""
PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class IgnoredFields:
    """Tells clients, and once the log, which fields of their requests nobody here knows."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def header(self, unknown: Sequence[str], before: Mapping[str, str] | None = None) -> dict[str, str]:
        """What the answer's headers get for these fields of its request, added to the headers `before`."""
        if not unknown:
            return dict(before or {})
        # A name is the client's own text: what could end a header or fill it is not repeated.
        names = [name if PLAIN_NAME.fullmatch(name) else "(unprintable)" for name in unknown[:MOST_LOGGED]]
        fresh = sorted(set(names) - self._logged)[: MOST_LOGGED - len(self._logged)]
        if fresh:
            self._logged.update(fresh)
            _log.warning("fields of requests are ignored: %s", ", ".join(fresh))
        more = len(unknown) - MOST_NAMED
        shown = names[:MOST_NAMED] + ([f"and {more} more"] if more > 0 else [])
        named = [before[IGNORED_FIELDS]] if before and IGNORED_FIELDS in before else []
        return {**(before or {}), IGNORED_FIELDS: ", ".join([*named, *shown])}
