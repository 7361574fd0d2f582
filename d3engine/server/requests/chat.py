"""What any conversation asks for, whichever interface has brought it, as requests of the engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from msgspec import Struct, structs
from starlette.requests import Request

from d3engine.errors import InvalidValueError, require
from d3engine.request.params import CHECKS, SamplingParams, StructuredOutputsParams
from d3engine.server.errors import invalid
from d3engine.server.requests import sampling
from d3engine.server.requests.bodies import check_work
from d3engine.server.requests.completions import begun, prepare_all, take_places
from d3engine.server.requests.tools import (
    ChatStyle,
    Thinking,
    ToolUse,
    fault_of_tools,
    thinking_of,
    thinking_variables,
    tool_use_of,
    with_arguments_read,
)
from d3engine.server.responses.context import RequestContext
from d3engine.server.schemas.requests import CHAT, ChatRequest, SamplingNames, TokenizeRequest
from d3engine.server.state import AppState


@dataclass(frozen=True)
class TurnForm:
    """How an interface writes turns.

    Attributes:
        field: of the request that holds them.
        roles: its roles -> those of chat templates.
        kinds: of parts that are texts.
        beside: of a turn, the fields that are taken beside its role and content, with the values that they may have;
            None: any.
        beside_text: of a part, those that are taken beside its type and text.
        others: kinds of parts that are no texts and that the caller reads -> the fields that such a part has.
    """

    field: str
    roles: Mapping[str, str]
    kinds: tuple[str, ...]
    beside: Mapping[str, tuple[object, ...] | None]
    beside_text: frozenset[str]
    others: Mapping[str, frozenset[str]] = dataclasses.field(default_factory=dict)


def read_turn(name: str, turn: Any, form: TurnForm) -> dict[str, Any]:
    role = read_role(name, turn, form)
    return {"role": role, "content": read_content(f"{name}.content", turn.get("content"), form)}


def read_role(name: str, turn: Any, form: TurnForm) -> str:
    """Whose turn it is, as a chat has it, where it is one."""
    require(isinstance(turn, dict), name, turn, "an object with role and content")
    for beside, values in form.beside.items():
        given = turn.get(beside)
        fits = values is None or given is None or given in values
        require(fits, f"{name}.{beside}", given, " or ".join(map(repr, values or ())))
    role = turn.get("role")
    require(isinstance(role, str) and role in form.roles, f"{name}.role", role, " or ".join(map(repr, form.roles)))
    return form.roles[role]


def read_content(name: str, content: Any, form: TurnForm) -> str | list[dict[str, str]]:
    """A text, or the text parts of a chat's message. Raises `InvalidValueError`."""
    if isinstance(content, str):
        return content
    require(isinstance(content, list) and content != [], name, content, "a string or a list of texts")
    return [read_text_part(f"{name}[{place}]", part, form) for place, part in enumerate(content)]


def read_text_part(name: str, part: Any, form: TurnForm) -> dict[str, str]:
    kinds = " or ".join(f'"{kind}"' for kind in form.kinds)
    is_text = isinstance(part, dict) and part.get("type") in form.kinds and isinstance(part.get("text"), str)
    require(is_text, name, part, f'{{"type": {kinds}, "text": a string}}, since the model reads nothing but text')
    return {"type": "text", "text": part["text"]}


def unknown_in_turns(turns: object, form: TurnForm) -> list[str]:
    """The names of unknown fields, in turns and their parts; each once."""
    found: dict[str, None] = {}
    known = {"role", "content", *form.beside}
    for turn in turns if isinstance(turns, list) else []:
        if isinstance(turn, dict):
            found |= dict.fromkeys(f"{form.field}.{name}" for name in turn if name not in known)
            found |= dict.fromkeys(unknown_in_parts(f"{form.field}.content", turn.get("content"), form))
    return list(found)


def unknown_in_parts(name: str, content: object, form: TurnForm) -> list[str]:
    texts = frozenset({"type", "text", *form.beside_text})
    parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    known = [form.others.get(str(part.get("type")), texts) for part in parts]
    return [f"{name}.{one}" for part, names in zip(parts, known, strict=True) for one in part if one not in names]


def merged(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The same conversation, in which no two turns of one role follow each other, but for calls and their results."""
    found: list[dict[str, Any]] = []
    for message in messages:
        is_plain = message["role"] != "tool" and "tool_calls" not in message
        if found and found[-1]["role"] == message["role"] and is_plain and "tool_calls" not in found[-1]:
            found[-1]["content"] = [*_parts(found[-1]["content"]), *_parts(message["content"])]
        else:
            found.append(dict(message))
    return found


def _parts(content: Any) -> list[dict[str, str]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def chat_fields(shape: type[Struct], sampling: SamplingNames, *others: str) -> dict[str, str]:
    """The fields of another interface -> a chat's that they are; `others` are those of the same name that are not."""
    shared = [name for name in shape.__struct_fields__ if name in ChatRequest.__struct_fields__ and name not in others]
    return {name: name for name in shared} | dict(sampling.others)


def function_tool(name: str, description: str | None, parameters: Any, strict: bool | None) -> dict[str, Any]:
    """A function of another interface as a chat has it."""
    function = {"name": name, "description": description or "", "parameters": parameters, "strict": strict}
    return {"type": "function", "function": function}


async def job_of(
    request: Request, asked: ChatRequest, headers: Mapping[str, str], *, id_prefix: str, ends_with_context: bool = False
) -> tuple[RequestContext[ChatRequest], dict[str, str]]:
    """What to run for a chat, wholly checked, and `headers` for the answer with the names of ignored fields.

    With `ends_with_context` its length is a bound that may lie beyond the model's context; otherwise that is an error.
    Raises `RequestError` and `InvalidValueError`.
    """
    served, model, depth = begun(request, asked)
    sampling.check_num_logprobs("prompt_logprobs", asked.prompt_logprobs, served.settings)
    style = await _style(served, asked)
    tools = tool_use_of(asked, style)
    calling, ignored = tools.calling, tools.ignored
    asked = _with_thinking(asked, style)
    max_tokens = _max_tokens(asked)
    form = sampling.form_of(asked) if calling is None else calling.form
    decided = {"max_tokens": max_tokens, "logprobs": _num_logprobs(asked, served), "structured_outputs": form}
    if calling is not None or style.has_special_marks:  # a form keeps out all special tokens but those of calls
        decided["skip_special_tokens"] = False
    names = {"prompt": "messages"} | (CHAT.by_own if asked.max_completion_tokens is not None else {})
    field = "response_format" if asked.structured_outputs is None else "structured_outputs"
    with sampling.by_names(names), sampling.named(field) if calling is None else fault_of_tools(calling.names):
        check_work(request, asked)
        params = sampling.sampling_params(asked, served.client.default_sampling_params, depth, **decided)
        take_places(request, 1, params.n)
        prompt = await chat_prompt(served, asked, asked.messages, tools.shown)
        thinking = None
        if style.reasoning is not None:
            end = served.tokenizer.decode(prompt["prompt_token_ids"][-_END_TOKENS:], skip_special_tokens=False)
            thinking = thinking_of(style.reasoning, end, bool(asked.continue_final_message))
            if style.has_special_marks and form is not None:
                thinking = None  # the form begins at once
        limits = {"priority": asked.priority, "max_tokens": None if ends_with_context else max_tokens}
        try:
            whole = _behind_reasoning(params, form, thinking, asked.thinking_token_budget)
            prepared = await prepare_all(request, [prompt], whole, model=model, **limits)
        except InvalidValueError as error:
            if error.field != "grammar" or calling is None or calling.best_effort is None:
                raise
            ignored = (*ignored, "tools.parameters")
            params = _behind_reasoning(params, calling.best_effort, thinking, asked.thinking_token_budget)
            prepared = await prepare_all(request, [prompt], params, model=model, **limits)
    trace = request.scope["state"].get("trace")
    job = RequestContext(
        served, asked, model, prepared, depth, id_prefix=id_prefix, calling=calling, thinking=thinking, trace=trace
    )
    return job, served.ignored.header(ignored, headers)


async def tool_use(served: AppState, asked: ChatRequest) -> tuple[ToolUse, ChatRequest]:
    """What the tools of a chat become by its template, and the chat with its variables. Raises as `job_of`."""
    style = await _style(served, asked)
    return tool_use_of(asked, style), _with_thinking(asked, style)


async def _style(served: AppState, asked: ChatRequest | TokenizeRequest) -> ChatStyle:
    return await served.chat_styles.of(_template(asked, served))


_END_TOKENS = 32
"""Of a prompt, in which the beginning of reasoning is looked for."""

_ANY_TEXT = StructuredOutputsParams(regex="(?s:.*)")


def _behind_reasoning(
    params: SamplingParams, form: StructuredOutputsParams | None, thinking: Thinking | None, budget: int | None
) -> SamplingParams:
    """The parameters with a form that begins behind the answer's reasoning, of which `budget` bounds the tokens."""
    if thinking is not None and budget is not None and form is None:
        form = _ANY_TEXT
    if form is not None and thinking is not None:
        form = replace(form, reasoning=thinking.frame, reasoning_tokens=budget)
    return params if form is params.structured_outputs else replace(params, structured_outputs=form)


def _with_thinking(asked: ChatRequest, style: ChatStyle) -> ChatRequest:
    """The chat with what it asks of reasoning as variables of the template. Raises `InvalidValueError`."""
    budget = asked.thinking_token_budget
    if budget is not None:
        CHECKS["max_tokens"].check("thinking_token_budget", budget)
        allowed = "absent, since the model does not think"
        require(style.reasoning is not None, "thinking_token_budget", budget, allowed)
        allowed = "absent, since special tokens mark the model's reasoning"
        require(not style.has_special_marks, "thinking_token_budget", budget, allowed)
    variables = thinking_variables(asked.enable_thinking, asked.reasoning_effort, style)
    if not variables:
        return asked
    return structs.replace(asked, chat_template_kwargs={**variables, **(asked.chat_template_kwargs or {})})


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
    has_calls = any(message.get("tool_calls") for message in messages)
    as_text = has_calls and (await _style(served, asked)).arguments_as_text
    try:
        found: Mapping[str, list[int]] = await served.client.chat_prompt(
            with_arguments_read(messages, as_text=as_text),
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


def _max_tokens(asked: ChatRequest) -> int | None:
    """Under its new name or its old one; None: up to the end of the model's context."""
    new, old = asked.max_completion_tokens, asked.max_tokens
    if new is not None and old is not None and new != old:
        raise invalid("max_tokens", f"max_tokens must be absent or max_completion_tokens={new}; got {old}.")
    return old if new is None else new


def _num_logprobs(asked: ChatRequest, served: AppState) -> int | None:
    sampling.check_num_logprobs("top_logprobs", asked.top_logprobs, served.settings)
    if asked.top_logprobs and not asked.logprobs:
        raise invalid("top_logprobs", "top_logprobs must be absent or 0 unless logprobs is true.")
    return asked.top_logprobs or 0 if asked.logprobs else None
