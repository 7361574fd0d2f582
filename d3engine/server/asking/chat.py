"""A request for a chat, from its body to a job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

from starlette.requests import Request

from d3engine.errors import InvalidValueError
from d3engine.server.answering.job import RequestContext
from d3engine.server.asking.bodies import read_body
from d3engine.server.asking.depth import depth_header
from d3engine.server.asking.prompts import prepare_all, take_places
from d3engine.server.asking.sampling import check_num_logprobs, check_stream_options, sampling_params
from d3engine.server.asking.structured import form_of, named
from d3engine.server.asking.tool_styles import ToolStyle
from d3engine.server.asking.tools import Calling, ToolUse, fault_of_tools, tool_use_of, with_arguments_read
from d3engine.server.asking.work import check_priority, check_work
from d3engine.server.errors import RequestError, invalid
from d3engine.server.served import AppState, served_by
from d3engine.server.shapes.requests import ChatRequest, TokenizeRequest
from d3engine.server.tracing.tracer import trace_of


async def chat_job(request: Request) -> tuple[RequestContext[ChatRequest], dict[str, str]]:
    """What to run, wholly checked, and headers for the answer. Raises `RequestError` and `InvalidValueError`."""
    asked, headers = await read_body(request, ChatRequest)
    return await job_of(request, asked, headers, id_prefix="chatcmpl-")


async def job_of(
    request: Request,
    asked: ChatRequest,
    headers: Mapping[str, str],
    *,
    id_prefix: str,
    ends_with_context: bool = False,
) -> tuple[RequestContext[ChatRequest], dict[str, str]]:
    """The same for a chat that was read already, with the headers that this has given.

    With `ends_with_context` its length is a bound that may lie beyond the model's context; otherwise that is an error.
    """
    served = served_by(request)
    model = served.models.check(asked.model)
    depth = served.depths.read(model, asked.depth, depth_header(request.scope))
    check_stream_options(asked)
    check_priority(served, asked.priority)
    check_num_logprobs("prompt_logprobs", asked.prompt_logprobs, served.settings)
    tools = await tool_use(served, asked)
    calling, ignored = tools.calling, tools.ignored
    max_tokens = _max_tokens(asked)
    decided = {
        "max_tokens": max_tokens,
        "logprobs": _num_logprobs(asked, served),
        "structured_outputs": form_of(asked) if calling is None else calling.form,
    }
    with by_names(_chats_names(asked)), _fault_of_form(asked, calling):
        check_work(request, asked)
        params = sampling_params(asked, served.client.default_sampling_params, depth, **decided)
        take_places(request, 1, params.n)
        prompt = await chat_prompt(served, asked, asked.messages, tools.shown)
        limits = {"priority": asked.priority, "max_tokens": None if ends_with_context else max_tokens}
        try:
            prepared = await prepare_all(request, [prompt], params, **limits)
        except InvalidValueError as error:
            if error.field != "grammar" or calling is None or calling.best_effort is None:
                raise
            ignored = (*ignored, "tools.parameters")
            params = replace(params, structured_outputs=calling.best_effort)
            prepared = await prepare_all(request, [prompt], params, **limits)
    trace = trace_of(request.scope)
    job = RequestContext(served, asked, model, prepared, depth, id_prefix=id_prefix, calling=calling, trace=trace)
    return job, served.ignored.header(ignored, headers)


async def tool_use(served: AppState, asked: ChatRequest) -> ToolUse:
    """What the tools of a chat come to by the template that writes it. Raises `RequestError`."""
    if asked.tools is None:
        return tool_use_of(asked, ToolStyle(False, None))
    return tool_use_of(asked, await served.tool_styles.of(_template(asked, served)))


async def chat_prompt(
    served: AppState,
    asked: ChatRequest | TokenizeRequest,
    messages: list[dict[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> Mapping[str, list[int]]:
    """The prompt of a conversation by the model's template. Raises `RequestError` and `InvalidValueError`."""
    template = _template(asked, served)
    continues = bool(asked.continue_final_message)
    begins = not continues if asked.add_generation_prompt is None else asked.add_generation_prompt
    try:
        found: Mapping[str, list[int]] = await served.client.chat_prompt(
            with_arguments_read(messages),
            tools=tools,
            chat_template=template,
            add_generation_prompt=begins,
            continue_final_message=continues,
            chat_template_kwargs=asked.chat_template_kwargs,
        )
        return found
    except InvalidValueError as error:
        if error.field == "chat_template" and asked.chat_template is None:  # its message names a directory
            message = "The model has no chat template; POST /v1/completions takes prompts as they are."
            raise invalid("messages", message, "no_chat_template") from None
        raise


def _template(asked: ChatRequest | TokenizeRequest, served: AppState) -> str | None:
    """The request's own template, None for the model's. Raises `RequestError` where requests may bring none."""
    if asked.chat_template is not None and not served.settings.trust_request_chat_template:
        message = "chat_template must be absent, since this server takes no templates of requests."
        raise invalid("chat_template", message, "unsupported_parameter")
    return asked.chat_template


def _fault_of_form(asked: ChatRequest, calling: Calling | None) -> AbstractContextManager[None]:
    """Errors about the answer's form name the field that it comes of."""
    if calling is not None:
        return fault_of_tools(calling.names)
    return named("response_format" if asked.structured_outputs is None else "structured_outputs")


def _max_tokens(asked: ChatRequest) -> int | None:
    """Under its new name or its old one; None: up to the end of the model's context."""
    new, old = asked.max_completion_tokens, asked.max_tokens
    if new is not None and old is not None and new != old:
        raise invalid("max_tokens", f"max_tokens must be absent or max_completion_tokens={new}; got {old}.")
    return old if new is None else new


def _num_logprobs(asked: ChatRequest, served: AppState) -> int | None:
    check_num_logprobs("top_logprobs", asked.top_logprobs, served.settings)
    if asked.top_logprobs and not asked.logprobs:
        raise invalid("top_logprobs", "top_logprobs must be absent or 0 unless logprobs is true.")
    return asked.top_logprobs or 0 if asked.logprobs else None


def _chats_names(asked: ChatRequest) -> dict[str, str]:
    names = {"prompt": "messages"}
    if asked.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    return names


@contextmanager
def by_names(names: Mapping[str, str]) -> Iterator[None]:
    """Errors from inside of here name fields as the request does: engine's name -> the request's."""
    try:
        yield
    except InvalidValueError as error:
        raise InvalidValueError(names.get(error.field, error.field), error.value, error.allowed) from None
    except RequestError as error:
        error.param = names.get(error.param or "", error.param)
        raise
