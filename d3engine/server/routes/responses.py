"""POST /v1/responses."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from d3engine.server.answering.responses import ResponseAnswer
from d3engine.server.answering.running import while_connected
from d3engine.server.answering.writer import respond
from d3engine.server.asking.responses import response_job


async def create_response(request: Request) -> Response:
    job, asked, headers = await while_connected(request.scope, request.receive, response_job(request))
    return await respond(request, job, ResponseAnswer(job, asked), headers)
