"""The work that one request asks for, counted from all its fields before any of it is done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request

from d3engine.errors import InvalidValueError
from d3engine.request.bounds import Integers
from d3engine.request.params import PRIORITIES
from d3engine.server.errors import invalid
from d3engine.server.served import AppState, served_by
from d3engine.server.settings import ServerSettings
from d3engine.server.shapes.requests import Common

PER_ANSWER = ("bad_words", "stop", "stop_token_ids", "allowed_token_ids", "logit_bias")
"""Fields that are heeded in every answer."""


def check_work(request: Request, asked: Common, prompts: Sequence[Any] | None = None, n: int | None = None) -> None:
    """Refuse a request of more than `max_request_work` characters and list entries; `prompts` None: those of a chat.

    What concerns each answer is counted for each of them. Raises `InvalidValueError` naming the field that asks most.
    """
    if prompts is None:
        read = {"messages": len(request.scope["state"]["body"])}
    else:
        read = {"prompt": sum(map(len, prompts))}
    answers = (1 if prompts is None else len(prompts)) * (n or asked.n or 1)
    most = most_work(served_by(request))
    sizes = {name: _size(getattr(asked, name)) for name in PER_ANSWER}
    work = read | {name: size * answers for name, size in sizes.items()}
    if sum(work.values()) <= most:
        return
    field = max(work, key=lambda name: work[name])
    given = f"{sizes[field]} for each of {answers} answers" if field in sizes else f"{work[field]} characters or ids"
    allowed = f"part of a request of at most {most} characters and list entries in all (max_request_work)"
    raise InvalidValueError(field, given, allowed)


def most_work(served: AppState) -> int:
    """Characters and list entries of a request at most."""
    guards = served.settings.guards
    return guards.max_body_bytes if guards.max_request_work is None else guards.max_request_work


def priority_bounds(settings: ServerSettings) -> Integers:
    """The priorities that a request may have."""
    return PRIORITIES if settings.allow_priority else Integers(0, 0)


def check_priority(served: AppState, priority: int | None) -> None:
    """Refuse a priority that a request may not choose. Raises `RequestError`."""
    if priority and not served.settings.allow_priority:
        message = f"priority must be absent or 0, since this server does not let requests choose it; got {priority}."
        raise invalid("priority", message, "priority_not_allowed")


def _size(value: Any) -> int:
    """Characters of texts, or entries of a list or a mapping."""
    if value is None:
        return 0
    is_texts = isinstance(value, list) and value and isinstance(value[0], str)
    return sum(map(len, value)) if is_texts else len(value)
