"""POST /v1/completions."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from d3engine.server.answering.completion import CompletionWriter
from d3engine.server.answering.running import while_connected
from d3engine.server.answering.writer import answer
from d3engine.server.asking.completion import completion_job


async def create_completion(request: Request) -> Response:
    job, headers = await while_connected(request.scope, request.receive, completion_job(request))
    return await answer(request, job, CompletionWriter(job), headers)
