"""What ends a stream whose writer is gone, in the form of its route; for proxies before several servers."""

from __future__ import annotations

from d3engine.server.errors import ANTHROPICS_ROOT, RequestError, shown_message
from d3engine.server.responses.messages import MessageForm
from d3engine.server.responses.streams import OpenAIForm, named_event

RESPONSES = "/v1/responses"


def num_events(content: bytes) -> int:
    """How many named events it holds; JSON has no line breaks, so none is mistaken for one."""
    return (b"\n" + content).count(b"\nevent: ")


def end_of_broken_stream(error: RequestError, path: str, seen: int) -> bytes:
    """The last event, after `seen` named ones."""
    if path == ANTHROPICS_ROOT:
        return MessageForm().failed(error)
    if path == RESPONSES:
        said = {"code": error.code, "message": shown_message(error), "param": None}
        return named_event({"type": "error", **said, "sequence_number": seen})
    return OpenAIForm().failed(error)
