"""What each route takes and gives, as shapes: the table that /openapi.json is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from d3engine.server.model_ids import ModelCard
from d3engine.server.shapes.answers import (
    ChatChunk,
    ChatCompletion,
    Completion,
    Text,
    TokenizerInfo,
    Tokens,
)
from d3engine.server.shapes.message_events import MESSAGE_EVENTS
from d3engine.server.shapes.messages import (
    CountTokensRequest,
    Message,
    MessagesRequest,
    MessageTurn,
    TextBlock,
    TokenCount,
    ToolUseBlock,
)
from d3engine.server.shapes.operation import AnthropicsError, Error, HealthAnswer, ModelList, Version
from d3engine.server.shapes.requests import (
    AnswerForm,
    ChatRequest,
    CompletionRequest,
    Constraint,
    DetokenizeRequest,
    NamedTool,
    TokenizeRequest,
    Tool,
    Turn,
)
from d3engine.server.shapes.response_events import RESPONSE_EVENTS
from d3engine.server.shapes.responses import ModelResponse, OutputCall, OutputMessage, ResponsesRequest

REFERRED = (
    AnswerForm,
    Constraint,
    MessageTurn,
    NamedTool,
    OutputCall,
    OutputMessage,
    TextBlock,
    Tool,
    ToolUseBlock,
    Turn,
)
"""Shapes that fields of others refer to by name."""


@dataclass(frozen=True)
class Described:
    """What a route takes and gives.

    Attributes:
        says: in a few words.
        body: of its requests.
        answer: a whole one.
        media: the type of an answer that is no JSON.
        events: those that an answer is made of where it may be a stream.
        ends_with_done: whether "[DONE]" comes after them.
        takes_depth: whether the header names a depth.
        error: the body of every error.
        unwell: the body of a 503 where that is no error but the answer.
    """

    says: str
    body: Any = None
    answer: Any = None
    media: str = "application/json"
    events: tuple[Any, ...] = ()
    ends_with_done: bool = False
    takes_depth: bool = False
    error: Any = Error
    unwell: Any = None


DESCRIBED = {
    "/v1/completions": Described(
        "Go on from prompts.",
        CompletionRequest,
        Completion,
        events=(Completion, Error),
        ends_with_done=True,
        takes_depth=True,
    ),
    "/v1/chat/completions": Described(
        "Answer a conversation.",
        ChatRequest,
        ChatCompletion,
        events=(ChatChunk, Error),
        ends_with_done=True,
        takes_depth=True,
    ),
    "/v1/responses": Described(
        "Answer a conversation, as OpenAI's responses.",
        ResponsesRequest,
        ModelResponse,
        events=RESPONSE_EVENTS,
        takes_depth=True,
    ),
    "/v1/messages": Described(
        "Answer a conversation, as Anthropic has it.",
        MessagesRequest,
        Message,
        events=(*MESSAGE_EVENTS, AnthropicsError),
        takes_depth=True,
        error=AnthropicsError,
    ),
    "/v1/messages/count_tokens": Described(
        "Count a conversation's tokens.", CountTokensRequest, TokenCount, error=AnthropicsError
    ),
    "/v1/models": Described("The ids of the model.", answer=ModelList),
    "/v1/models/{name}": Described("One id of the model.", answer=ModelCard),
    "/tokenize": Described("The token ids of a text or a conversation.", TokenizeRequest, Tokens),
    "/detokenize": Described("The text of token ids.", DetokenizeRequest, Text),
    "/tokenizer_info": Described("Special tokens and chat template.", answer=TokenizerInfo),
    "/health": Described(
        "200 while the server can be expected to answer; 503 with the reason once it cannot.",
        answer=HealthAnswer,
        unwell=HealthAnswer,
    ),
    "/ready": Described(
        "As /health, and 503 while it would refuse a request because of its queue.",
        answer=HealthAnswer,
        unwell=HealthAnswer,
    ),
    "/version": Described("Which d3engine this is.", answer=Version),
    "/metrics": Described("All metrics, in the text format of Prometheus.", media="text/plain"),
    "/openapi.json": Described("This description.", answer=dict[str, Any]),
}
"""Path -> what is known of it."""
