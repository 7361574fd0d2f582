"""Fields of OpenAI's and of other servers' that ask for something which is not done here: refused by name.

Ignoring them would give another answer than the one asked for. Fields that ask nothing of the model are taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Struct

from d3engine.errors import must_be
from d3engine.server.errors import invalid
from d3engine.server.shapes.messages import CountTokensRequest, MessagesRequest
from d3engine.server.shapes.requests import ChatRequest, CompletionRequest
from d3engine.server.shapes.responses import ResponsesRequest


@dataclass(frozen=True)
class Only:
    """The values that a field may have all the same, since they ask for what happens anyway; null is always one."""

    allowed: tuple[Any, ...] = ()
    why: str = ""


ASK_NOTHING = (
    "user",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prompt_cache_options",
    "service_tier",
)
"""Who asks, for whom, and at what price: nothing that changes an answer."""

ANTHROPICS_ASK_NOTHING = ("cache_control", "user_profile_id", "workspace_id")
"""Of Anthropic's alone."""

_CONSTRAINTS = {
    name: Only(why="structured_outputs and response_format are the fields for that")
    for name in (
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "guided_decoding_backend",
        "grammar",
        "json_schema",
        "regex",
        "ebnf",
    )
}
"""Of vLLM, SGLang and llama.cpp, old and new: whoever sends one relies on it."""

_EMBEDDED = {"prompt_embeds": Only(why="prompts are texts or token ids")}
"""Tensors of a stranger are never loaded."""

_ANTHROPICS = {
    **_EMBEDDED,
    "thinking": Only(({"type": "disabled"},), "the model has no such setting"),
    "output_format": Only(why="output_config.format is the field for it"),
    "mcp_servers": Only(([],), "nothing but the model is asked"),
    "container": Only(why="no code is run"),
    "context_management": Only(why="a conversation is read as it comes"),
    "inference_geo": Only(why="the server computes where it is"),
    "speed": Only(("standard",), "there is one speed"),
}

REFUSED: Mapping[type[Struct], Mapping[str, Only]] = {
    CompletionRequest: {
        "suffix": Only(why="a text before a given end is nothing that this model was trained to write"),
        **_CONSTRAINTS,
        **_EMBEDDED,
    },
    CountTokensRequest: _ANTHROPICS,
    ResponsesRequest: {
        **_CONSTRAINTS,
        **_EMBEDDED,
        "store": Only((False,), "nothing is stored"),
        "previous_response_id": Only(why="nothing is stored: send the conversation whole"),
        "conversation": Only(why="nothing is stored: send the conversation whole"),
        "prompt": Only(why="nothing is stored: send the prompt itself"),
        "background": Only((False,), "an answer is not kept for later"),
        "background_options": Only(why="an answer is not kept for later"),
        "max_tool_calls": Only(why="there are no tools of the server's own"),
        "include": Only(([],), "a response has nothing more to tell"),
        "top_logprobs": Only((0,), "POST /v1/chat/completions tells log-probabilities"),
        "reasoning": Only(({},), "the model has no such setting"),
        "truncation": Only(("disabled",), "a conversation is read whole"),
        "context_management": Only(why="a conversation is read as it comes"),
        "stream_options": Only(({}, {"include_obfuscation": False}), "events are not padded"),
        "moderation": Only(why="nothing is moderated"),
        "image": Only(why="responses are text"),
    },
    MessagesRequest: _ANTHROPICS,
    ChatRequest: {
        **_CONSTRAINTS,
        **_EMBEDDED,
        "functions": Only(why="tools is the field for them"),
        "function_call": Only(("none",), "tool_choice is the field for it"),
        "modalities": Only((["text"],), "answers are text"),
        "audio": Only(why="answers are text"),
        "prediction": Only(why="predicted outputs are not served"),
        "reasoning_effort": Only(why="the model has no such setting (chat_template_kwargs reaches the template)"),
        "verbosity": Only(why="the model has no such setting"),
        "web_search_options": Only(why="nothing is searched"),
        "moderation": Only(why="nothing is moderated"),
        "store": Only((False,), "nothing is stored"),
    },
}
"""For each shape: the fields that are refused, and the values that they may have."""


def check_refused(content: Mapping[str, Any], shape: type[Struct]) -> None:
    """Raise `RequestError` for the first field that asks for something which is not done here."""
    for name, only in REFUSED.get(shape, {}).items():
        value = content.get(name)
        if value is None or any(value == allowed and type(value) is type(allowed) for allowed in only.allowed):
            continue
        words = " or ".join(["absent", *(json_text(allowed) for allowed in only.allowed)])
        raise invalid(name, must_be(name, value, f"{words}, since {only.why}") + ".", "unsupported_parameter")


def taken_names(shape: type[Struct]) -> frozenset[str]:
    """Fields that the shape lacks and that are no surprise."""
    own = ANTHROPICS_ASK_NOTHING if issubclass(shape, CountTokensRequest) else ()
    return frozenset(REFUSED.get(shape, {})).union(ASK_NOTHING, own)


def json_text(value: Any) -> str:
    return msgspec.json.encode(value).decode()
