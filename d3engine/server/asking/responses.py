"""A request for a response of OpenAI's, from its body to the job of a chat."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from d3engine.server.answering.job import Job
from d3engine.server.asking.bodies import read_body
from d3engine.server.asking.chat import by_names, job_of
from d3engine.server.asking.turns import TurnForm, read_turns, unknown_in_turns
from d3engine.server.shapes.requests import ChatRequest
from d3engine.server.shapes.responses import ResponsesRequest

TURNS = TurnForm(
    field="input",
    roles={"user": "user", "assistant": "assistant", "system": "system", "developer": "system"},
    kinds=("input_text", "output_text"),
    beside={"type": ("message",), "id": None, "status": None, "phase": None},
    beside_text=frozenset({"annotations", "logprobs"}),
)
SAME_NAMES = (
    "model",
    "temperature",
    "top_p",
    "top_k",
    "stream",
    "seed",
    "priority",
    "cache_salt",
    "depth",
    "return_depths",
)


async def response_job(request: Request) -> tuple[Job[ChatRequest], ResponsesRequest, dict[str, str]]:
    """What to run, wholly checked, what was asked for, and headers for the answer.

    Raises `RequestError` and `InvalidValueError`.
    """
    asked, headers = await read_body(request, ResponsesRequest, lambda asked: unknown_in_turns(asked.input, TURNS))
    same = {name: getattr(asked, name) for name in SAME_NAMES}
    chat = ChatRequest(messages=_messages(asked), max_tokens=asked.max_output_tokens, **same)
    with by_names({"messages": "input", "max_tokens": "max_output_tokens"}):
        return await job_of(request, chat, id_prefix="resp_"), asked, headers


def _messages(asked: ResponsesRequest) -> list[dict[str, Any]]:
    given = asked.input
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else read_turns(given, TURNS)
    before = [] if asked.instructions is None else [{"role": "system", "content": asked.instructions}]
    return [*before, *messages]
