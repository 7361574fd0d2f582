"""Every error that a client gets: in OpenAI's form, under /v1/messages in Anthropic's and under /api in Ollama's."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import orjson
from starlette.responses import Response

from d3engine.errors import EngineClosedError, EngineDeadError, InvalidValueError

_log = logging.getLogger(__name__)

LONGEST_MESSAGE = 1000
"""Characters of a message: what a client sent is shown to it again, cut to size."""

TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    421: "invalid_request_error",
    429: "rate_limit_error",
    499: "invalid_request_error",
    500: "server_error",
    501: "invalid_request_error",
    503: "server_error",
    504: "timeout_error",
}
"""Status -> OpenAI's `type` of errors."""


ANTHROPICS_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    501: "invalid_request_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Status -> Anthropic's `type` of errors; of all others below 500 it is "invalid_request_error"."""

ANTHROPICS_ROOT = "/v1/messages"
OLLAMAS_ROOT = "/api"


class RequestError(Exception):
    """Why a request is not answered: a status of HTTP, and what the body says.

    `param` is the field of the request that it is about; `code` is OpenAI's word for it, and `type` that for its kind,
    which follows from the status; `headers` are further ones of the response, such as Retry-After.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.type = TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
        self.headers = dict(headers or {})


def invalid(param: str | None, message: str, code: str | None = None) -> RequestError:
    """A 400 about one field."""
    return RequestError(400, message, param=param, code=code)


def shown_message(error: RequestError) -> str:
    message = error.message
    return message if len(message) <= LONGEST_MESSAGE else message[: LONGEST_MESSAGE - 3] + "..."


def error_body(error: RequestError) -> bytes:
    """`{"error": {message, type, param, code}}`, the body of every answer that is an error, and the event of a stream
    that fails after its first byte."""
    content = {"message": shown_message(error), "type": error.type, "param": error.param, "code": error.code}
    return orjson.dumps({"error": content})


DONE = b"data: [DONE]\n\n"
"""The last event of a stream of OpenAI's."""


def failed_events(error: RequestError) -> bytes:
    """The last events of a stream of OpenAI's that fails after its first byte."""
    return b"data: " + error_body(error) + b"\n\n" + DONE


def anthropics_error_body(error: RequestError) -> bytes:
    """The same as Anthropic has it: `{"type": "error", "error": {type, message}}`."""
    kind = ANTHROPICS_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return orjson.dumps({"type": "error", "error": {"type": kind, "message": shown_message(error)}})


def ollamas_error_body(error: RequestError) -> bytes:
    """The same as Ollama has it: `{"error": message}`."""
    return orjson.dumps({"error": shown_message(error)})


def error_response(error: RequestError, path: str) -> Response:
    if path == ANTHROPICS_ROOT or path.startswith(ANTHROPICS_ROOT + "/"):
        body = anthropics_error_body(error)
    elif path.startswith(OLLAMAS_ROOT + "/"):
        body = ollamas_error_body(error)
    else:
        body = error_body(error)
    return Response(body, error.status, error.headers, media_type="application/json")


def as_request_error(error: Exception) -> RequestError:
    """What a client gets of any error; a fault of the server's own is logged here, once, and shows no internals."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, InvalidValueError):
        return invalid(error.field, f"{error}.")
    if isinstance(error, EngineDeadError):
        return RequestError(503, "The engine has ended after a fault of its own.", code="engine_dead")
    if isinstance(error, EngineClosedError):
        return RequestError(503, "The server is about to end.", code="draining")
    _log.error("a request failed", exc_info=error)
    return RequestError(500, "The server failed on this request.", code="internal_error")
