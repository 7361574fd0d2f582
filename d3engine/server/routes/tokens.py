"""POST /tokenize and /detokenize, and GET /tokenizer_info: the model's own tokenizer, for clients that count tokens."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from d3engine.errors import InvalidValueError, TokenizerError, must_be
from d3engine.server.answers import json_response
from d3engine.server.asking.bodies import read_body
from d3engine.server.asking.chat import chat_prompt, tool_use
from d3engine.server.errors import invalid
from d3engine.server.served import AppState, served_by
from d3engine.server.shapes.answers import Text, TokenizerInfo, Tokens
from d3engine.server.shapes.requests import ChatRequest, DetokenizeRequest, TokenizeRequest
from d3engine.text.tokenizer import Tokenizer


async def tokenize(request: Request) -> Response:
    """The token ids of a text, or of a conversation as the model's template writes it."""
    served = served_by(request)
    asked, headers = await read_body(request, TokenizeRequest)
    served.models.check(asked.model)
    ids, ignored = await _token_ids(served, asked)
    found: Tokens = {"count": len(ids), "max_model_len": served.client.max_model_len, "tokens": ids}
    if asked.return_token_strs:
        found["token_strs"] = await served.in_thread(_token_strs, served.tokenizer, ids)
    return json_response(found, served.ignored.header(ignored, headers))


async def detokenize(request: Request) -> Response:
    """The text of token ids, special tokens spelled out."""
    served = served_by(request)
    asked, headers = await read_body(request, DetokenizeRequest)
    served.models.check(asked.model)
    size = served.tokenizer.vocab_size
    for token in (min(asked.tokens, default=0), max(asked.tokens, default=0)):
        if not 0 <= token < size:
            raise invalid("tokens", must_be("tokens", token, f"ids from 0 to {size - 1}") + ".")
    text = await served.in_thread(served.tokenizer.decode, asked.tokens, skip_special_tokens=False)
    found: Text = {"prompt": text}
    return json_response(found, headers)


async def tokenizer_info(request: Request) -> Response:
    """The special tokens by name, and the chat template."""
    served = served_by(request)
    named = served.tokenizer.special_tokens
    found: TokenizerInfo = {
        "bos_token": named.get("bos_token"),
        "eos_token": named.get("eos_token"),
        "pad_token": named.get("pad_token"),
        "unk_token": named.get("unk_token"),
        "chat_template": await served.client.chat_template(),
    }
    return json_response(found)


def _token_strs(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    strings = {token: tokenizer.convert_id_to_token(token) or "" for token in set(ids)}
    return [strings[token] for token in ids]


async def _token_ids(served: AppState, asked: TokenizeRequest) -> tuple[list[int], Sequence[str]]:
    """The tokens, and the fields that change nothing of them."""
    if (asked.prompt is None) == (asked.messages is None):
        raise invalid("prompt", "prompt or messages must be given, and not both.")
    if asked.messages is not None and asked.add_special_tokens:
        raise invalid("add_special_tokens", "add_special_tokens must be absent or false with messages.")
    if asked.messages is not None:
        chat = ChatRequest(messages=asked.messages, tools=asked.tools, chat_template=asked.chat_template)
        tools = await tool_use(served, chat)
        prompt = await chat_prompt(served, asked, asked.messages, tools.shown)
        return prompt["prompt_token_ids"], tools.ignored if tools.shown is None else ()
    if asked.tools is not None:
        raise invalid("tools", "tools must be absent with prompt.")
    adds = asked.add_special_tokens is not False
    try:
        return await served.in_thread(served.tokenizer.encode, asked.prompt or "", add_special_tokens=adds), ()
    except (InvalidValueError, TokenizerError) as error:
        raise invalid("prompt", f"prompt must be a text that the model's tokenizer can encode ({error}).") from None
