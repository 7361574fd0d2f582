"""A request for a message of Anthropic's, from its body to the job of a chat."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from d3engine.server.answering.job import Job
from d3engine.server.asking.bodies import read_body
from d3engine.server.asking.chat import by_names, chat_prompt, job_of
from d3engine.server.asking.turns import (
    TurnForm,
    merged,
    read_content,
    read_turns,
    unknown_in_parts,
    unknown_in_turns,
)
from d3engine.server.served import served_by
from d3engine.server.shapes.messages import CountTokensRequest, MessagesRequest
from d3engine.server.shapes.requests import ChatRequest

TURNS = TurnForm(
    field="messages",
    roles={"user": "user", "assistant": "assistant", "system": "system"},
    kinds=("text",),
    beside={},
    beside_text=frozenset({"cache_control", "citations"}),
)
SAME_NAMES = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream", "seed", "priority", "cache_salt")
DEPTH_NAMES = ("depth", "return_depths")


async def message_job(request: Request) -> tuple[Job[ChatRequest], dict[str, str]]:
    """What to run, wholly checked, and headers for the answer. Raises `RequestError` and `InvalidValueError`."""
    asked, headers = await read_body(request, MessagesRequest, _unknown_in)
    same = {name: getattr(asked, name) for name in (*SAME_NAMES, *DEPTH_NAMES)}
    chat = _chat_of(asked, stop=asked.stop_sequences or None, **same)
    with by_names({"stop": "stop_sequences"}):
        return await job_of(request, chat, id_prefix="msg_", ends_with_context=True), headers


async def count_tokens(request: Request) -> tuple[int, dict[str, str]]:
    """The length of a conversation's prompt, and headers for the answer. Raises as `message_job` does."""
    served = served_by(request)
    asked, headers = await read_body(request, CountTokensRequest, _unknown_in)
    served.models.check(asked.model)
    chat = _chat_of(asked)
    prompt = await chat_prompt(served, chat, chat.messages)
    return len(prompt["prompt_token_ids"]), headers


def _chat_of(asked: CountTokensRequest, **fields: Any) -> ChatRequest:
    """The same as a chat. An answer goes on where the last turn ends if that is the assistant's."""
    messages = merged(read_turns(asked.messages, TURNS))
    continues = messages[-1]["role"] == "assistant"
    if asked.system is not None and asked.system != []:
        messages.insert(0, {"role": "system", "content": read_content("system", asked.system, TURNS)})
    return ChatRequest(messages=messages, continue_final_message=continues, **fields)


def _unknown_in(asked: CountTokensRequest) -> list[str]:
    return [*unknown_in_parts("system", asked.system, TURNS), *unknown_in_turns(asked.messages, TURNS)]
