"""A request for a chat, from its body to a job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from starlette.requests import Request

from d3engine.errors import InvalidValueError
from d3engine.server.answering.job import Job
from d3engine.server.asking.bodies import read_body
from d3engine.server.asking.depth import depth_header
from d3engine.server.asking.prompts import prepare_all, take_places
from d3engine.server.asking.sampling import check_num_logprobs, check_stream_options, sampling_params
from d3engine.server.asking.structured import form_of, named
from d3engine.server.asking.tools import Calling, calling_of, with_arguments_read
from d3engine.server.asking.work import check_priority, check_work
from d3engine.server.errors import RequestError, invalid
from d3engine.server.served import Served, served_by
from d3engine.server.shapes.requests import ChatRequest, TokenizeRequest
from d3engine.server.tracing.tracer import trace_of


async def chat_job(request: Request) -> tuple[Job[ChatRequest], dict[str, str]]:
    """What to run, wholly checked, and headers for the answer. Raises `RequestError` and `InvalidValueError`."""
    asked, headers = await read_body(request, ChatRequest)
    return await job_of(request, asked, id_prefix="chatcmpl-"), headers


async def job_of(
    request: Request, asked: ChatRequest, *, id_prefix: str, ends_with_context: bool = False
) -> Job[ChatRequest]:
    """The same for a chat that was read already.

    With `ends_with_context` its length is a bound that may lie beyond the model's context; otherwise that is an error.
    """
    served = served_by(request)
    model = served.models.check(asked.model)
    depth = served.depths.read(model, asked.depth, depth_header(request.scope))
    check_stream_options(asked)
    check_priority(served, asked.priority)
    check_num_logprobs("prompt_logprobs", asked.prompt_logprobs, served.settings)
    calling = calling_of(asked, served.tokenizer)
    max_tokens = _max_tokens(asked)
    decided = {
        "max_tokens": max_tokens,
        "logprobs": _num_logprobs(asked, served),
        "structured_outputs": form_of(asked) if calling is None else calling.form,
    }
    with by_names(_chats_names(asked)), named(_source(asked, calling)):
        check_work(request, asked)
        params = sampling_params(asked, served.client.default_sampling_params, depth, **decided)
        take_places(request, 1, params.n)
        tools = None if calling is None else calling.tools
        prompt = await chat_prompt(served, asked, asked.messages, tools)
        needed = None if ends_with_context else max_tokens
        prepared = await prepare_all(request, [prompt], params, priority=asked.priority, max_tokens=needed)
    trace = trace_of(request.scope)
    return Job(served, asked, model, prepared, depth, id_prefix=id_prefix, calling=calling, trace=trace)


async def chat_prompt(
    served: Served,
    asked: ChatRequest | TokenizeRequest,
    messages: list[dict[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> Mapping[str, list[int]]:
    """The prompt of a conversation by the model's template. Raises `RequestError` and `InvalidValueError`."""
    if asked.chat_template is not None and not served.settings.trust_request_chat_template:
        message = "chat_template must be absent, since this server takes no templates of requests."
        raise invalid("chat_template", message, "unsupported_parameter")
    continues = bool(asked.continue_final_message)
    begins = not continues if asked.add_generation_prompt is None else asked.add_generation_prompt
    try:
        found: Mapping[str, list[int]] = await served.client.chat_prompt(
            with_arguments_read(messages),
            tools=tools,
            chat_template=asked.chat_template,
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


def _source(asked: ChatRequest, calling: Calling | None) -> str:
    """The field that the answer's form comes of, if it must have one."""
    if calling is not None:
        return "tools"
    return "response_format" if asked.structured_outputs is None else "structured_outputs"


def _max_tokens(asked: ChatRequest) -> int | None:
    """Under its new name or its old one; None: up to the end of the model's context."""
    new, old = asked.max_completion_tokens, asked.max_tokens
    if new is not None and old is not None and new != old:
        raise invalid("max_tokens", f"max_tokens must be absent or max_completion_tokens={new}; got {old}.")
    return old if new is None else new


def _num_logprobs(asked: ChatRequest, served: Served) -> int | None:
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
