"""Shapes of requests, whose bounds are described from where they are checked, in `SamplingParams` most of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, cast

from msgspec import Meta, Struct, defstruct

from d3engine.request.params import (
    BIASES,
    CHECKS,
    MAX_CHARACTERS,
    MAX_CHOICES,
    MAX_TOKENS,
    PRIORITIES,
    TOKEN_IDS,
    WORD,
    Biases,
    SamplingParams,
    Several,
)
from d3engine.utils.arguments import Check, Integers, Numbers, documented

TEMPERATURES = Numbers(0.0, 2.0)
"""OpenAI's bound on the temperature, below the engine's own."""
PREDICTED = Integers(-2, MAX_TOKENS)
"""`max_tokens` of llama.cpp and Ollama."""
MAX_TOOLS = 128
FUNCTIONS_NAME = "[A-Za-z0-9_-]{1,64}"
REFERENCE = "#/components/schemas/{name}"
"""Where a shape stands in the description of all."""


def described(**words: Any) -> Meta:
    """What JSON Schema says of a field beyond its type."""
    return Meta(extra_json_schema=words)


def bounded(by: Check | str) -> Meta:
    """A value within these bounds, or within those of the parameter of this name."""
    return described(**(CHECKS[by] if isinstance(by, str) else by).schema)


def shaped_as(name: str) -> Meta:
    """An object that is read as this shape later, when it is clear what it is for."""
    return described(**{"$ref": REFERENCE.format(name=name)})


def one_of(*names: str) -> Meta:
    """An object of one of these shapes."""
    return described(anyOf=[{"$ref": REFERENCE.format(name=name)} for name in names])


Priority = Annotated[int, bounded(PRIORITIES)]
ThinkingBudget = Annotated[int, bounded("max_tokens")]
TokenId = Annotated[int, bounded(TOKEN_IDS)]
StopStrings = Annotated[list[Annotated[str, bounded(WORD)]], bounded("stop")]
FunctionsName = Annotated[str, described(pattern=f"^{FUNCTIONS_NAME}$")]
Depth = Annotated[
    str | dict[str, Any] | None,
    Meta(description='"auto", "full", a model id that stands for a depth, or a policy as d3.json has it'),
]

Prompt = str | list[str | int | list[int]]
"""A text, token ids, or a list of either."""
Messages = Annotated[list[Annotated[dict[str, Any], shaped_as("Turn")]], described(minItems=1)]
Tools = Annotated[list[Annotated[dict[str, Any], shaped_as("Tool")]], described(maxItems=MAX_TOOLS)]


class StreamOptions(Struct, kw_only=True):
    """What a stream tells beside the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


S = TypeVar("S", bound=Struct)


@dataclass(frozen=True)
class SamplingNames:
    """The sampling fields of an API, which decorates its shapes; types and bounds are those of `SamplingParams`.

    `same` have the names that they have there; `others` are the API's name -> the name there.
    """

    same: Sequence[str] = ()
    others: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, shape: type[S]) -> type[S]:
        """The shape with these fields; one that it declares stays as it is there."""
        names = {name: self.others.get(name, name) for name in (*self.same, *self.others)}
        texts = documented(SamplingParams)
        kinds = {name: _kind(API_BOUNDS.get(name, CHECKS[own]), description=texts[own]) for name, own in names.items()}
        added = [(name, kind | None, None) for name, kind in kinds.items() if name not in shape.__struct_fields__]
        about: Any = {"module": shape.__module__, "namespace": {"__doc__": shape.__doc__}}
        made: Any = defstruct(shape.__name__, added, bases=(shape,), kw_only=True, **about)
        return cast(type[S], made)

    @property
    def by_own(self) -> dict[str, str]:
        """The name in `SamplingParams` -> the API's, for errors."""
        return {own: name for name, own in self.others.items()}

    def values(self, params: SamplingParams, *names: str) -> dict[str, Any]:
        """What parameters are, by the API's names."""
        return {name: getattr(params, self.others.get(name, name)) for name in names}


API_BOUNDS: Mapping[str, Check] = {"temperature": TEMPERATURES, "n_predict": PREDICTED, "num_predict": PREDICTED}
"""Name of a field -> its bounds, where they are not the engine's."""
ALL = tuple(name for name in CHECKS if name not in ("detokenize", "logprobs"))
"""`SamplingParams`' fields, but for what a route has another way to say."""
CONVERSATION = ("temperature", "top_p", "top_k", "seed", "cache_salt")
"""Those of responses and messages."""

COMMON = SamplingNames(ALL)
CHAT = SamplingNames((), {"max_completion_tokens": "max_tokens"})
RESPONSES = SamplingNames(CONVERSATION, {"max_output_tokens": "max_tokens"})
MESSAGES = SamplingNames(CONVERSATION, {"stop_sequences": "stop"})
OLLAMA = SamplingNames(
    ("temperature", "top_p", "top_k", "min_p", "stop", "seed", "presence_penalty", "frequency_penalty"),
    {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"},
)
"""What is described; every field of a chat is taken."""
LLAMA_CPP = SamplingNames(
    tuple(name for name in ALL if name != "n"),  # its routes give one answer
    {"n_predict": "max_tokens", "n_probs": "logprobs", "repeat_penalty": "repetition_penalty"},
)
SYNONYMS = {
    "repeat_penalty": "repetition_penalty",
    "rep_pen": "repetition_penalty",
    "typical": "typical_p",
    "nsigma": "top_n_sigma",
}
"""Other servers' names of fields of completions and chats -> theirs; taken, and not described."""


def _kind(check: Check, **words: Any) -> Any:
    """What a field of a body may be; `words` are said of it beyond its bounds."""
    if isinstance(check, Several):
        item = _kind(check.item)
        several = Annotated[list[item], described(**check.schema, **words)]  # type: ignore[valid-type]
        return item | several if check.or_one else several
    kind = dict[str, _kind(BIASES)] if isinstance(check, Biases) else check.kind  # type: ignore[misc]
    return Annotated[kind, described(**check.schema, **words)]


@COMMON
class Common(Struct, kw_only=True):
    """What completions and chat have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Priority | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    response_format: Annotated[dict[str, Any], shaped_as("AnswerForm")] | None = None
    structured_outputs: Annotated[dict[str, Any], shaped_as("Constraint")] | None = None

    depth: Depth = None
    return_depths: bool | None = None
    return_progress: bool | None = None

    if TYPE_CHECKING:  # of sampling, what the server itself looks at
        n: int | None = None
        max_tokens: int | None = None
        temperature: float | None = None
        stop: str | list[str] | None = None
        prompt_logprobs: int | None = None
        truncate_prompt_tokens: int | None = None


NONE_OR_MORE = Integers(0, MAX_TOKENS)
"""A prompt that is echoed may be scored alone."""


class OtherFile(Struct, kw_only=True):
    """A file of the repository that the gap is in, as llama.cpp's `input_extra` has it."""

    filename: str
    text: str


class CompletionRequest(Common, kw_only=True):
    """POST /v1/completions; with `suffix` the answer stands between the two, and `input_extra` before them."""

    prompt: Prompt
    max_tokens: Annotated[int, bounded(NONE_OR_MORE)] | None = None
    echo: bool | None = None
    logprobs: int | None = None
    best_of: Annotated[int, bounded("n")] | None = None
    add_special_tokens: bool | None = None
    suffix: str | None = None
    input_extra: list[OtherFile] | None = None


@CHAT
class ChatRequest(Common, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Messages
    if TYPE_CHECKING:
        max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None
    tool_choice: (
        Annotated[str, described(enum=["none", "auto", "required"])]
        | Annotated[dict[str, Any], shaped_as("NamedTool")]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None
    thinking_token_budget: ThinkingBudget | None = None


class TextPart(Struct, kw_only=True):
    """A piece of a message's content."""

    type: Literal["text"]
    text: str


class CalledFunction(Struct, kw_only=True):
    """What an earlier answer called, with its arguments as JSON."""

    name: str
    arguments: str | dict[str, Any]


class EarlierCall(Struct, kw_only=True):
    """A call of an earlier answer."""

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] | None = None


class Turn(Struct, kw_only=True):
    """One of a chat's `messages`; the model's template may name further roles, and read further fields."""

    role: str
    content: str | list[TextPart] | None = None
    tool_calls: list[EarlierCall] | None = None
    tool_call_id: str | None = None


class NamedSchema(Struct, kw_only=True, forbid_unknown_fields=True):
    """A JSON schema with a name; `strict` makes no difference, since every answer satisfies it."""

    name: str
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class AnswerForm(Struct, kw_only=True, forbid_unknown_fields=True):
    """A `response_format`; the schema is there where the type says so, and only there."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


Text = Annotated[str, described(minLength=1, maxLength=MAX_CHARACTERS)]


class Constraint(Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's `structured_outputs`: exactly one of the first five."""

    json: Text | dict[str, Any] | None = None
    regex: Text | None = None
    choice: Annotated[list[Text], described(minItems=1, maxItems=MAX_CHOICES, uniqueItems=True)] | None = None
    grammar: Text | None = None
    json_object: bool | None = None
    whitespace_pattern: Text | None = None
    disable_any_whitespace: bool | None = None
    reasoning: Annotated[list[str], described(minItems=2, maxItems=2)] | None = None
    reasoning_tokens: Annotated[int, described(minimum=1)] | None = None


class Function(Struct, kw_only=True, forbid_unknown_fields=True):
    """A function that the model may call; `strict` makes no difference where a call must come."""

    name: FunctionsName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, kw_only=True, forbid_unknown_fields=True):
    """One of a chat's `tools`."""

    type: Literal["function"]
    function: Function


class FunctionName(Struct, kw_only=True, forbid_unknown_fields=True):
    """Which function."""

    name: FunctionsName


class NamedTool(Struct, kw_only=True, forbid_unknown_fields=True):
    """A `tool_choice` that names a function."""

    type: Literal["function"]
    function: FunctionName


class TokenizeRequest(Struct, kw_only=True):
    """POST /tokenize: a text or a conversation; the text as `content`, with llama.cpp's fields, for clients of that."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class LoadAdapterRequest(Struct, kw_only=True):
    """POST /v1/load_lora_adapter."""

    lora_name: str
    lora_path: str


class UnloadAdapterRequest(Struct, kw_only=True):
    """POST /v1/unload_lora_adapter."""

    lora_name: str


class DetokenizeRequest(Struct, kw_only=True):
    """POST /detokenize."""

    tokens: list[TokenId]
    model: str | None = None
