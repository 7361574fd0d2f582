"""A request for a response of OpenAI's, from its body to the job of a chat."""

from __future__ import annotations

from typing import Any

from msgspec import to_builtins
from starlette.requests import Request

from d3engine.errors import must_be
from d3engine.server.answering.job import RequestContext
from d3engine.server.asking.bodies import read_body
from d3engine.server.asking.chat import by_names, job_of
from d3engine.server.asking.response_items import read_items, unknown_in_items
from d3engine.server.errors import invalid
from d3engine.server.shapes.requests import ChatRequest
from d3engine.server.shapes.responses import NamedResponseTool, ResponsesRequest, TextFormat

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
    "parallel_tool_calls",
)


async def response_job(request: Request) -> tuple[RequestContext[ChatRequest], ResponsesRequest, dict[str, str]]:
    """What to run, wholly checked, what was asked for, and headers for the answer.

    Raises `RequestError` and `InvalidValueError`.
    """
    asked, headers = await read_body(request, ResponsesRequest, lambda asked: unknown_in_items(asked.input))
    same = {name: getattr(asked, name) for name in SAME_NAMES}
    chat = ChatRequest(
        messages=_messages(asked),
        max_tokens=asked.max_output_tokens,
        response_format=_form_of(asked),
        tools=_tools_of(asked),
        tool_choice=_choice_of(asked),
        **same,
    )
    with by_names({"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text"}):
        job, headers = await job_of(request, chat, headers, id_prefix="resp_")
        return job, asked, headers


def _messages(asked: ResponsesRequest) -> list[dict[str, Any]]:
    given = asked.input
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else read_items(given)
    before = [] if asked.instructions is None else [{"role": "system", "content": asked.instructions}]
    return [*before, *messages]


def _form_of(asked: ResponsesRequest) -> dict[str, Any] | None:
    """`text.format` as a chat's response_format."""
    form = None if asked.text is None else asked.text.format
    if form is None:
        return None
    is_schema = form.type == "json_schema"
    fits = (form.name is not None and form.schema is not None) if is_schema else form == TextFormat(type=form.type)
    if not fits:
        allowed = 'with name and schema where its type is "json_schema", and with its type alone elsewhere'
        raise invalid("text", must_be("text.format", to_builtins(form), allowed) + ".")
    if not is_schema:
        return {"type": form.type}
    return {"type": "json_schema", "json_schema": {"name": form.name, "schema": form.schema}}


def _tools_of(asked: ResponsesRequest) -> list[dict[str, Any]] | None:
    """`tools` as a chat has them; an empty list is none."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description or "",
                "parameters": tool.parameters,
                "strict": tool.strict,
            },
        }
        for tool in asked.tools or ()
    ] or None


def _choice_of(asked: ResponsesRequest) -> str | dict[str, Any] | None:
    """`tool_choice` as a chat has it; "auto" without tools asks for nothing."""
    choice = asked.tool_choice
    if isinstance(choice, NamedResponseTool):
        if choice.name not in [tool.name for tool in asked.tools or ()]:
            allowed = "the name of one of the tools"
            raise invalid("tool_choice", must_be("tool_choice.name", choice.name, allowed) + ".")
        return {"type": "function", "function": {"name": choice.name}}
    return None if choice == "auto" and not asked.tools else choice
