"""Ollama's requests as chats and completions, whose sampling fields `options` take by Ollama's names or by ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from starlette.requests import Request

from d3engine.errors import must_be, require
from d3engine.server.errors import invalid
from d3engine.server.models import LATEST
from d3engine.server.requests.bodies import known_names, read_as
from d3engine.server.requests.chat import by_names, job_of
from d3engine.server.requests.completions import completion_job_of
from d3engine.server.responses.context import RequestContext
from d3engine.server.schemas.ollama import OllamaChatRequest, OllamaGenerateRequest, OllamaGenerating
from d3engine.server.schemas.requests import OLLAMA, PREDICTED, ChatRequest, Common, CompletionRequest
from d3engine.server.state import AppState, served_by

ROLES = ("system", "user", "assistant", "tool")

LOADING = frozenset(
    (
        *("numa", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "logits_all", "vocab_only", "use_mmap"),
        *("use_mlock", "embedding_only", "num_thread", "num_keep"),
    )
)
"""Options of how Ollama loads and computes a model, which change no answer: taken without effect."""


NO_OPTIONS = frozenset(ChatRequest.__struct_fields__) - frozenset(Common.__struct_fields__) | {
    *("model", "stream", "stream_options", "response_format", "structured_outputs")
}
"""Fields of a chat that are no way to sample."""


def model_of(served: AppState, name: str) -> str:
    """The id of a request's model, with or without ":latest". Raises `RequestError` for one that is not served."""
    bare = name.removesuffix(LATEST)
    return served.models.check(bare if bare in served.models else name)


async def chat_job_of(
    request: Request, asked: OllamaChatRequest, headers: Mapping[str, str]
) -> tuple[RequestContext[ChatRequest], dict[str, str]]:
    """What to run for POST /api/chat. Raises `RequestError` and `InvalidValueError` by the fields' names there."""
    served = served_by(request)
    content, ignored = _sampling_of(served, asked)
    content["messages"] = [_message(place, turn) for place, turn in enumerate(asked.messages or ())]
    if asked.tools:
        content["tools"] = [{"type": "function", **tool} for tool in asked.tools]
    with _ollamas_names():
        chat = read_as(content, ChatRequest)
        return await job_of(
            request, chat, served.ignored.header(ignored, headers), id_prefix="ollama-", ends_with_context=True
        )


async def generate_job_of(
    request: Request, asked: OllamaGenerateRequest, headers: Mapping[str, str]
) -> tuple[RequestContext[Any], dict[str, str]]:
    """The same for POST /api/generate.

    A prompt is a message that the model's chat template writes, unless it is `raw`, has a `suffix` or the model has no
    template.
    """
    served = served_by(request)
    content, ignored = _sampling_of(served, asked)
    headers = served.ignored.header(ignored, headers)
    is_chat = not asked.raw and not asked.suffix and await served.client.chat_template() is not None
    if is_chat:
        system = [{"role": "system", "content": asked.system}] if asked.system else []
        content["messages"] = [*system, {"role": "user", "content": asked.prompt}]
        with _ollamas_names(messages="prompt"):
            chat = read_as(content, ChatRequest)
            return await job_of(request, chat, headers, id_prefix="ollama-", ends_with_context=True)
    if asked.system:
        why = "the prompt is not written by a chat template (raw, suffix, or a model without one)"
        raise invalid("system", must_be("system", asked.system, f"absent, since {why}") + ".")
    if content.pop("enable_thinking", None) or content.pop("reasoning_effort", None):
        raise invalid("think", must_be("think", asked.think, "absent or false where no chat template is used") + ".")
    logprobs, top = content.pop("logprobs", None), content.pop("top_logprobs", None)
    content |= {"prompt": asked.prompt, "logprobs": (top or 0) if logprobs else None, "suffix": asked.suffix or None}
    with _ollamas_names():
        completion = read_as(content, CompletionRequest)
        job = await completion_job_of(request, completion, id_prefix="ollama-", ends_with_context=True)
        return job, dict(headers)


def _ollamas_names(**more: str) -> AbstractContextManager[None]:
    names = {ours: f"options.{theirs}" for theirs, ours in OLLAMA.others.items()}
    names |= {"response_format": "format", "enable_thinking": "think", "reasoning_effort": "think"}
    return by_names(names | more)


def _sampling_of(served: AppState, asked: OllamaGenerating) -> tuple[dict[str, Any], list[str]]:
    """The fields of a chat that stand beside its messages, and the options that are ignored."""
    content: dict[str, Any] = {"model": model_of(served, asked.model), "stream": asked.stream is not False}
    if asked.logprobs or asked.top_logprobs:
        content |= {"logprobs": asked.logprobs, "top_logprobs": asked.top_logprobs}
    if asked.format not in (None, ""):
        content["response_format"] = _form(asked.format)
    if asked.think is not None:
        content["reasoning_effort" if isinstance(asked.think, str) else "enable_thinking"] = asked.think
    ignored = []
    for name, value in (asked.options or {}).items():
        if name in LOADING or value is None:
            continue
        if name == "num_ctx":
            _check_context(served, value)
        elif name == "num_predict":
            PREDICTED.check("options.num_predict", value)
            content["max_tokens"] = value if value > 0 else None  # Ollama's words for no bound
        elif (own := OLLAMA.others.get(name, name)) in known_names(ChatRequest) - NO_OPTIONS:
            content[own] = value
        else:
            ignored.append(f"options.{name}")
    check_penalty_window(content, "options.")
    content.pop("repeat_last_n", None)
    return content, ignored


def check_penalty_window(sampling: Mapping[str, Any], prefix: str = "") -> None:
    """Refuse a `repeat_last_n` other than the whole text, where there are penalties. Raises `InvalidValueError`."""
    names = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
    window = sampling.get("repeat_last_n")
    has_penalty = any(sampling.get(name) not in (None, off) for name, off in names.items())
    allowed = "absent or -1 beside a penalty, since penalties are of the whole text here"
    require(window in (None, -1) or not has_penalty, f"{prefix}repeat_last_n", window, allowed)


def _form(given: str | dict[str, Any]) -> dict[str, Any]:
    if isinstance(given, dict):
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": given}}
    require(given == "json", "format", given, '"json" or a JSON schema')
    return {"type": "json_object"}


def _check_context(served: AppState, given: Any) -> None:
    """The server's context is what it is; a request that asks for no more has it."""
    most = served.client.max_model_len
    is_there = isinstance(given, int) and not isinstance(given, bool) and 0 < given <= most
    allowed = f"an integer from 1 to {most}, the context of this server (--max-model-len)"
    require(is_there, "options.num_ctx", given, allowed)


def _message(place: int, turn: Mapping[str, Any]) -> dict[str, Any]:
    """A message as a chat has it."""
    where = f"messages[{place}]"
    role = turn.get("role")
    require(role in ROLES, f"{where}.role", role, " or ".join(map(repr, ROLES)))
    if turn.get("images"):
        raise invalid("images", f"{where}.images must be absent, since the model reads nothing but text.")
    content = turn.get("content")
    require(content is None or isinstance(content, str), f"{where}.content", content, "a string")
    found: dict[str, Any] = {"role": role, "content": content or ""}
    if turn.get("thinking"):
        found["reasoning_content"] = turn["thinking"]
    if turn.get("tool_calls"):
        found["tool_calls"] = _calls(where, turn["tool_calls"])
    if role == "tool":
        name = turn.get("tool_name") or turn.get("name")
        found |= {} if name is None else {"name": name}
        found |= {"tool_call_id": turn["tool_call_id"]} if turn.get("tool_call_id") else {}
    return found


def _calls(where: str, given: Any) -> list[dict[str, Any]]:
    require(isinstance(given, Sequence) and not isinstance(given, str), f"{where}.tool_calls", given, "a list of calls")
    found = []
    for number, call in enumerate(given):
        function = call.get("function") if isinstance(call, dict) else None
        is_call = isinstance(function, dict) and isinstance(function.get("name"), str)
        allowed = '{"function": {"name": a string, "arguments": an object}}'
        require(is_call, f"{where}.tool_calls[{number}]", call, allowed)
        assert isinstance(function, dict)
        arguments = function.get("arguments") or {}
        require(isinstance(arguments, dict), f"{where}.tool_calls[{number}].function.arguments", arguments, "an object")
        known = {"name": function["name"], "arguments": arguments}
        found.append({"id": str(call.get("id") or f"call_{number}"), "type": "function", "function": known})
    return found
