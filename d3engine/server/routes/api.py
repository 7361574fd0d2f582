"""The routes that answer, and the files of the page; `Route` says of each what /openapi.json does."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from msgspec import structs
from starlette import routing
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from d3engine.errors import InvalidValueError, TokenizerError, must_be, require
from d3engine.server.errors import RequestError, invalid
from d3engine.server.models import FurtherModels
from d3engine.server.requests.bodies import read_body
from d3engine.server.requests.chat import chat_prompt, job_of, tool_use
from d3engine.server.requests.completions import completion_job_of
from d3engine.server.responses.chat import ChatWriter
from d3engine.server.responses.completions import CompletionWriter
from d3engine.server.responses.running import while_connected
from d3engine.server.responses.writer import answer
from d3engine.server.routes.messages import count_message_tokens, create_message
from d3engine.server.routes.responses import create_response
from d3engine.server.schemas import answers, messages, requests, responses
from d3engine.server.schemas.requests import ChatRequest, TokenizeRequest
from d3engine.server.state import AppState, ModelCard, ModelList, json_response, no_such_model, served_by
from d3engine.text.tokenizer import Tokenizer


class Route(routing.Route):
    """A path, what answers there, whose docstring says it in a few words, and what that takes and gives.

    Args:
        body: the shape of its requests.
        answer: of a whole answer: a shape, or a list of one.
        method: POST where there is a body, and GET otherwise, unless it is given.
        media: the type of an answer that is no JSON.
        events: the shapes that a streamed answer is made of.
        has_error_events: whether an error may be one more of them.
        ends_with_done: whether "[DONE]" comes after them.
        unwell: the body of a 503 where that is no error but the answer.
        loads: whether it is forbidden unless the server's owner allows it; it goes on where its client leaves.
        queries: name of a query parameter -> what its schema says beyond being a text.
    """

    def __init__(
        self,
        path: str,
        endpoint: Callable[[Request], Awaitable[Response]],
        body: Any = None,
        answer: Any = None,
        *,
        method: str | None = None,
        name: str | None = None,
        media: str = "application/json",
        events: tuple[Any, ...] = (),
        has_error_events: bool = True,
        ends_with_done: bool = False,
        unwell: Any = None,
        loads: bool = False,
        queries: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    ) -> None:
        super().__init__(path, endpoint, methods=[method or ("GET" if body is None else "POST")], name=name)
        self.body, self.answer, self.media = body, answer, media
        self.events, self.has_error_events, self.ends_with_done = events, has_error_events, ends_with_done
        self.unwell, self.loads, self.queries = unwell, loads, queries

        async def respond(scope: Scope, receive: Receive, send: Send) -> None:
            request = Request(scope, receive, send)
            # What changes the server is not ended half way; what has no body is not worth watching.
            work = endpoint(request)
            response = await (work if body is None or loads else while_connected(request, work))
            await response(scope, receive, send)

        self.app = respond


DEFAULT_MAX_TOKENS = 16
"""Of completions: OpenAI's."""


async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    asked, headers = await read_body(request, ChatRequest)
    job, headers = await job_of(request, asked, headers, id_prefix="chatcmpl-")
    return await answer(job, ChatWriter(job), headers)


async def create_completion(request: Request) -> Response:
    """Go on from prompts."""
    asked, headers = await read_body(request, requests.CompletionRequest)
    if asked.max_tokens is None:
        asked.max_tokens = DEFAULT_MAX_TOKENS
    if asked.max_tokens == 0 and not asked.echo:
        raise invalid("max_tokens", must_be("max_tokens", 0, "at least 1, unless echo is true") + ".")
    job = await completion_job_of(request, asked, id_prefix="cmpl-")
    return await answer(job, CompletionWriter(job), headers)


async def list_models(request: Request) -> Response:
    """The ids of the model."""
    data = served_by(request).models.cards() + further_models(request).cards()
    return json_response({"object": "list", "data": data})


async def show_model(request: Request) -> Response:
    """One id of the model."""
    name, further = request.path_params["name"], further_models(request)
    if further.name_of(name) == name:
        return json_response(further.card(name))
    return json_response(served_by(request).models.card(name))


def further_models(request: Request) -> FurtherModels:
    """The models of the app beside its first."""
    found: FurtherModels = request.app.state.further
    return found


async def load_lora_adapter(request: Request) -> Response:
    """Load a LoRA adapter, where the server allows it."""
    served = served_by(request)
    _check_may_load(served)
    asked, headers = await read_body(request, requests.LoadAdapterRequest)
    is_free = not served.models.is_own(asked.lora_name) and further_models(request).name_of(asked.lora_name) is None
    require(is_free, "lora_name", asked.lora_name, "a name that is no id of a model")
    await served.client.load_lora_adapter(asked.lora_name, asked.lora_path)
    return json_response(served.models.card(asked.lora_name), headers)


async def unload_lora_adapter(request: Request) -> Response:
    """Unload a LoRA adapter, where the server allows it."""
    served = served_by(request)
    _check_may_load(served)
    asked, headers = await read_body(request, requests.UnloadAdapterRequest)
    if served.models.adapter(asked.lora_name) is None:
        raise no_such_model(asked.lora_name)
    await served.client.unload_lora_adapter(asked.lora_name)
    found: answers.Unloaded = {"id": asked.lora_name, "object": "model", "deleted": True}
    return json_response(found, headers)


def _check_may_load(served: AppState) -> None:
    if not served.settings.allow_lora_loading:
        message = "Adapters are loaded and unloaded only where the server was started with --allow-lora-loading."
        raise RequestError(403, message, code="lora_loading_not_allowed")


async def tokenize(request: Request) -> Response:
    """The token ids of a text or a conversation."""
    served = served_by(request)
    asked, headers = await read_body(request, TokenizeRequest)
    served.models.check(asked.model)
    if asked.content is not None:
        asked = _as_prompt(asked, asked.content)
    ids, ignored = await _token_ids(served, asked)
    found: answers.Tokens = {"count": len(ids), "max_model_len": served.client.max_model_len, "tokens": [*ids]}
    if asked.with_pieces:
        texts = await served.in_thread(_token_strs, served.tokenizer, ids)
        found["tokens"] = [{"id": token, "piece": text} for token, text in zip(ids, texts, strict=True)]
    if asked.return_token_strs:
        found["token_strs"] = await served.in_thread(_token_strs, served.tokenizer, ids)
    return json_response(found, served.ignored.header(ignored, headers))


async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    served = served_by(request)
    asked, headers = await read_body(request, requests.DetokenizeRequest)
    served.models.check(asked.model)
    size = served.tokenizer.vocab_size
    for token in (min(asked.tokens, default=0), max(asked.tokens, default=0)):
        require(0 <= token < size, "tokens", token, f"ids from 0 to {size - 1}")
    text = await served.in_thread(served.tokenizer.decode, asked.tokens, skip_special_tokens=False)
    found: answers.Text = {"prompt": text, "content": text}
    return json_response(found, headers)


async def tokenizer_info(request: Request) -> Response:
    """Special tokens and chat template."""
    served = served_by(request)
    named = served.tokenizer.special_tokens
    found: answers.TokenizerInfo = {
        "bos_token": named.get("bos_token"),
        "eos_token": named.get("eos_token"),
        "pad_token": named.get("pad_token"),
        "unk_token": named.get("unk_token"),
        "chat_template": await served.client.chat_template(),
    }
    return json_response(found)


def _as_prompt(asked: TokenizeRequest, content: str) -> TokenizeRequest:
    """llama.cpp's fields by our names: without special tokens unless `add_special`."""
    allowed = "absent or true, since special tokens that are written out are always read as such"
    require(asked.parse_special is not False, "parse_special", False, allowed)
    for name in ("prompt", "messages", "tools"):
        require(getattr(asked, name) is None, name, getattr(asked, name), "absent beside content")
    return structs.replace(asked, prompt=content, add_special_tokens=bool(asked.add_special))


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
        tools, _ = await tool_use(served, chat)
        prompt = await chat_prompt(served, asked, asked.messages, tools.shown)
        return prompt["prompt_token_ids"], tools.ignored if tools.shown is None else ()
    if asked.tools is not None:
        raise invalid("tools", "tools must be absent with prompt.")
    adds = asked.add_special_tokens is not False
    try:
        return await served.in_thread(served.tokenizer.encode, asked.prompt or "", add_special_tokens=adds), ()
    except (InvalidValueError, TokenizerError) as error:
        raise invalid("prompt", f"prompt must be a text that the model's tokenizer can encode ({error}).") from None


ROUTES = (
    Route(
        "/v1/completions",
        create_completion,
        requests.CompletionRequest,
        answers.Completion,
        events=(answers.Completion,),
        ends_with_done=True,
    ),
    Route(
        "/v1/chat/completions",
        create_chat_completion,
        ChatRequest,
        answers.ChatCompletion,
        events=(answers.ChatChunk,),
        ends_with_done=True,
    ),
    Route(
        "/v1/responses",
        create_response,
        responses.ResponsesRequest,
        responses.ModelResponse,
        events=responses.RESPONSE_EVENTS,
        has_error_events=False,
    ),
    Route("/v1/messages", create_message, messages.MessagesRequest, messages.Message, events=messages.MESSAGE_EVENTS),
    Route("/v1/messages/count_tokens", count_message_tokens, messages.CountTokensRequest, messages.TokenCount),
    Route("/v1/models", list_models, answer=ModelList),
    Route("/v1/models/{name:path}", show_model, answer=ModelCard),
    Route("/v1/load_lora_adapter", load_lora_adapter, requests.LoadAdapterRequest, ModelCard, loads=True),
    Route("/v1/unload_lora_adapter", unload_lora_adapter, requests.UnloadAdapterRequest, answers.Unloaded, loads=True),
    Route("/tokenize", tokenize, TokenizeRequest, answers.Tokens),
    Route("/detokenize", detokenize, requests.DetokenizeRequest, answers.Text),
    Route("/tokenizer_info", tokenizer_info, answer=answers.TokenizerInfo),
)

FOLDER = Path(__file__).parent.parent / "page"
PAGES = {"index.html": "/", "compare.html": "/compare"}
TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}
POLICY = (
    "default-src 'self'",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
    "require-trusted-types-for 'script'",  # no markup is made of text but by DOMPurify
    "trusted-types dompurify",
)
PREVIEW = "preview.html"
PREVIEW_POLICY = (  # a model's own markup is shown there: styles within it, and nothing from anywhere
    "default-src 'none'",
    "script-src 'self'",
    "style-src 'unsafe-inline'",
    "img-src data:",
    "font-src data:",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'self'",
    "sandbox allow-scripts",
)
HEADERS = {
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # kept, and asked for by its ETag before each use
}


def _files() -> dict[str, Path]:
    """Path of a URL -> the file there. The chat is at /, the page of depths at /compare, their files under /page/."""
    loaded = sorted(file for file in FOLDER.rglob("*") if file.suffix in TYPES and file.name not in PAGES)
    pages = {path: FOLDER / name for name, path in PAGES.items()}
    return pages | {f"/page/{file.relative_to(FOLDER).as_posix()}": file for file in loaded}


def _endpoint(file: Path) -> Callable[[Request], Awaitable[Response]]:
    content = file.read_bytes()
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    policy = "; ".join(PREVIEW_POLICY if file.name == PREVIEW else POLICY)
    headers = HEADERS | {"Content-Security-Policy": policy, "ETag": tag}

    async def show(request: Request) -> Response:
        """A file of the page."""
        known = [each.strip().removeprefix("W/") for each in request.headers.get("if-none-match", "").split(",")]
        if tag in known or known == ["*"]:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=TYPES[file.suffix])

    return show


PAGE_ROUTES = tuple(
    Route(path, _endpoint(file), media=TYPES[file.suffix], name=f"show{path.replace('/', '_')}")
    for path, file in _files().items()
)
PAGE_PATHS = frozenset(route.path for route in PAGE_ROUTES)
"""What answers without a key."""
