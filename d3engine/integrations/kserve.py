"""A model of KServe: its open inference protocol (v2), and OpenAI's routes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Any

import msgspec

from d3engine.async_engine.async_engine import AsyncEngine
from d3engine.errors import MissingExtraError
from d3engine.integrations.asgi import AtRoot, embedded_settings
from d3engine.server.app import create_app
from d3engine.server.in_process import post
from d3engine.server.schemas.requests import CompletionRequest
from d3engine.server.settings import ServerSettings
from d3engine.server.state import health

try:
    from kserve import InferOutput, InferRequest, InferResponse, Model, ModelServer
    from kserve import model_server as kserve_server
    from kserve.errors import InferenceError, InvalidInput
except ImportError as error:
    raise MissingExtraError(error.name or "kserve", "kserve", "d3engine.integrations.kserve") from error

TEXT_INPUT, TOKEN_INPUT = "text_input", "input_ids"
OPENAI_PREFIX = "/openai"
"""KServe's prefix of OpenAI's routes."""

_TAKE_TEXT = frozenset({"stop", "cache_salt", "depth"})
"""Fields that take a plain text as well as JSON."""


class D3Model(Model):  # type: ignore[misc, unused-ignore]
    """One engine as a KServe model. The server's route answers a v2 request, which is a completion in other fields.

    Inputs: `text_input` (BYTES, any number of texts) or `input_ids` (INT64 [tokens] or [prompts, tokens]). Parameters:
    the fields of POST /v1/completions, those that are no text, number or switch as JSON in a text, "depth" as a name or
    JSON. Outputs, an entry for each choice: `text_output`, `finish_reason` (BYTES), and with `return_depths` or
    `return_token_ids` the layers of each token and the token ids (BYTES, JSON).

    Args:
        name: the model's name.
        model: as for `Engine`.
        settings: limits of requests; None: those of `d3engine serve`.
        engine_arguments: as for `AsyncEngine`.
    """

    def __init__(
        self,
        name: str,
        model: str | os.PathLike[str],
        *,
        settings: ServerSettings | None = None,
        **engine_arguments: Any,
    ) -> None:
        super().__init__(name)
        self._model = model
        self._settings = settings or embedded_settings(model, model_names=(name,))
        self._arguments = engine_arguments

    def load(self) -> bool:
        """Load the engine; the model is ready then. Raises as `Engine` does."""
        self.engine = AsyncEngine(self._model, **self._arguments)
        self.app = create_app(self.engine, self._settings)
        self.ready = True
        return self.ready

    def start(self) -> None:
        """Do nothing before the first request; KServe calls it."""

    def stop(self) -> None:
        """Let running requests end, then the engine; KServe calls it from its event loop when it ends."""
        self.ready = False
        self._ending = asyncio.ensure_future(self._end())

    async def _end(self) -> None:
        await self.engine.drain(self._settings.guards.drain_timeout)
        await self.engine.close()

    async def healthy(self) -> bool:
        """Whether the engine is alive and makes steps."""
        found = health(self.engine.heartbeat(), self.app.state.traffic, self._settings.guards.health_stall_seconds)
        return bool(self.ready and found.is_ok)

    async def predict(
        self, payload: Any, headers: Mapping[str, str] | None = None, response_headers: Any = None
    ) -> InferResponse:
        """Answer a v2 request. A gRPC call that is cancelled ends its request in the engine."""
        if not isinstance(payload, InferRequest):
            raise InvalidInput("the request must be of the open inference protocol (v2); /openai/v1 has OpenAI's")
        body = msgspec.json.encode({"prompt": _prompts(payload), **_fields(payload.parameters)})
        answered = await post(self.app, "/v1/completions", body)
        content = msgspec.json.decode(answered.body)
        if answered.status >= 500:
            raise InferenceError(content["error"]["message"])
        if answered.status != 200:
            raise InvalidInput(content["error"]["message"])
        choices = content["choices"]
        outputs = [
            _output("text_output", [choice["text"] for choice in choices]),
            _output("finish_reason", [choice["finish_reason"] for choice in choices]),
        ]
        for name, found in (("depths", "d3ext"), ("token_ids", "token_ids")):
            if found in choices[0]:
                values = [choice[found]["depths"] if found == "d3ext" else choice[found] for choice in choices]
                outputs.append(_output(name, [msgspec.json.encode(one).decode() for one in values]))
        return InferResponse(payload.id or answered.request_id, self.name, outputs)


def serve(*models: D3Model, **server_arguments: Any) -> None:
    """Run KServe's server with these models until a signal comes; OpenAI's routes of the first are under /openai.

    `server_arguments` are those of KServe's `ModelServer`, such as `http_port` and `grpc_port`.
    """
    for model in models:
        model.load()
    kserve_server.app.mount(OPENAI_PREFIX, AtRoot(models[0].app))
    ModelServer(workers=1, **server_arguments).start(list(models))


def _prompts(request: InferRequest) -> Any:
    inputs = {given.name: given for given in request.inputs}
    if set(inputs) not in ({TEXT_INPUT}, {TOKEN_INPUT}):
        raise InvalidInput(f"the inputs must be {TEXT_INPUT} or {TOKEN_INPUT}; got {', '.join(inputs) or 'none'}")
    if TOKEN_INPUT in inputs:
        return inputs[TOKEN_INPUT].as_numpy().tolist()
    texts = inputs[TEXT_INPUT].as_numpy().reshape(-1).tolist()
    try:
        return [text.decode() if isinstance(text, bytes) else str(text) for text in texts]
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{TEXT_INPUT} must be UTF-8 ({error})") from None


def _fields(parameters: Any) -> dict[str, Any]:
    """The fields of a completion, from a request's parameters."""
    found = {name: _value(name, _plain(value)) for name, value in dict(parameters or {}).items()}
    for name in found:
        if name not in CompletionRequest.__struct_fields__ or name in ("prompt", "stream", "stream_options"):
            raise InvalidInput(f"{name} must be absent: parameters are the fields of a completion that is not streamed")
    return found


def _plain(value: Any) -> Any:
    """A parameter's value; in gRPC it is a message with one of several kinds."""
    kind = value.WhichOneof("parameter_choice") if hasattr(value, "WhichOneof") else None
    return value if kind is None else getattr(value, kind)


def _value(name: str, value: Any) -> Any:
    if not isinstance(value, str) or (name in _TAKE_TEXT and not value.startswith(("{", '["'))):
        return value
    try:
        return msgspec.json.decode(value)
    except msgspec.DecodeError:
        return value  # which the route refuses by its name, if the field takes no text


def _output(name: str, texts: list[str]) -> InferOutput:
    return InferOutput(name, [len(texts)], "BYTES", texts)
