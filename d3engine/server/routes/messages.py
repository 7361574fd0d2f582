"""POST /v1/messages and /v1/messages/count_tokens, as Anthropic has them."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from d3engine.server.answering.messages import MessageAnswer
from d3engine.server.answering.running import while_connected
from d3engine.server.answering.writer import respond
from d3engine.server.answers import json_response
from d3engine.server.asking.messages import count_tokens, message_job
from d3engine.server.shapes.messages import TokenCount


async def create_message(request: Request) -> Response:
    job, headers = await while_connected(request.scope, request.receive, message_job(request))
    return await respond(request, job, MessageAnswer(job), headers)


async def count_message_tokens(request: Request) -> Response:
    number, headers = await while_connected(request.scope, request.receive, count_tokens(request))
    found: TokenCount = {"input_tokens": number}
    return json_response(found, headers)
