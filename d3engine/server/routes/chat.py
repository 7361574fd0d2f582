"""POST /v1/chat/completions."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from d3engine.server.answering.chat import ChatWriter
from d3engine.server.answering.running import while_connected
from d3engine.server.answering.writer import answer
from d3engine.server.asking.chat import chat_job


async def create_chat_completion(request: Request) -> Response:
    job, headers = await while_connected(request.scope, request.receive, chat_job(request))
    return await answer(request, job, ChatWriter(job), headers)
