"""Ollama's API, for programs that speak nothing else: Open WebUI, Continue, the `ollama` client, LangChain's Ollama."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from d3engine.engine.model_directory import model_files
from d3engine.errors import must_be, require
from d3engine.model.config import ModelConfig
from d3engine.model.gguf_file import open_gguf
from d3engine.model.source import CONFIG_FILE, files_of
from d3engine.request.outputs import RequestOutput
from d3engine.server.errors import invalid, ollamas_error_body
from d3engine.server.requests.bodies import known_names, read_as, read_body, whole
from d3engine.server.requests.chat import job_of
from d3engine.server.requests.completions import completion_job_of
from d3engine.server.requests.refused import check_refused
from d3engine.server.requests.sampling import by_names, check_penalty_window
from d3engine.server.responses.context import LogprobWords, RequestContext, UsageCounter
from d3engine.server.responses.running import whole_output
from d3engine.server.responses.streams import StreamForm
from d3engine.server.responses.writer import Delta, SingleAnswer, respond
from d3engine.server.routes.api import Route, further_models
from d3engine.server.routes.embeddings import embedded
from d3engine.server.schemas import answers, embeddings, ollama
from d3engine.server.schemas.requests import OLLAMA, PREDICTED, ChatRequest, Common, CompletionRequest
from d3engine.server.state import AppState, json_response, served_by

# -- requests --------------------------------------------------------------------------------------------------------

ROLES = ("system", "user", "assistant", "tool")

LOADING = frozenset(
    (
        *("numa", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "logits_all", "vocab_only", "use_mmap"),
        *("use_mlock", "embedding_only", "num_thread", "num_keep"),
    )
)
"""Options of how Ollama loads and computes a model, which change no answer: taken without effect."""


NO_OPTIONS = frozenset(ChatRequest.__struct_fields__) - frozenset(Common.__struct_fields__) | {
    *("model", "stream", "stream_options", "response_format", "structured_outputs"),
    *("prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids"),
}
"""Fields of a chat that are no way to sample, or that Ollama's answers have no place for."""


async def ollama_chat(request: Request) -> Response:
    """Answer a conversation, as Ollama has it."""
    asked, headers = await read_body(request, ollama.OllamaChatRequest)
    if not asked.messages:
        return _loaded(request, asked, headers)
    content, names, headers = _sampling_of(served_by(request), asked, headers)
    content["messages"] = [_message(place, turn) for place, turn in enumerate(asked.messages)]
    if asked.tools:
        content["tools"] = [{"type": "function", **tool} for tool in asked.tools]
    return await _chat(request, asked, content, headers, names)


async def ollama_generate(request: Request) -> Response:
    """Answer a prompt, as Ollama has it."""
    # The model's chat template writes a prompt as a message, unless it is raw, has a suffix or there is no template.
    served = served_by(request)
    asked, headers = await read_body(request, ollama.OllamaGenerateRequest)
    if not asked.prompt:
        return _loaded(request, asked, headers)
    content, names, headers = _sampling_of(served, asked, headers)
    if not asked.raw and not asked.suffix and await served.client.chat_template() is not None:
        system = [{"role": "system", "content": asked.system}] if asked.system else []
        content["messages"] = [*system, {"role": "user", "content": asked.prompt}]
        return await _chat(request, asked, content, headers, {**names, "messages": "prompt"})
    if asked.system:
        why = "the prompt is not written by a chat template (raw, suffix, or a model without one)"
        raise invalid("system", must_be("system", asked.system, f"absent, since {why}") + ".")
    if content.pop("enable_thinking", None) or content.pop("reasoning_effort", None):
        raise invalid("think", must_be("think", asked.think, "absent or false where no chat template is used") + ".")
    logprobs, top = content.pop("logprobs", None), content.pop("top_logprobs", None)
    content |= {"prompt": asked.prompt, "logprobs": (top or 0) if logprobs else None, "suffix": asked.suffix or None}
    with by_names(names):
        completion = read_as(content, CompletionRequest)
        job = await completion_job_of(request, completion, id_prefix="ollama-", ends_with_context=True)
    return await respond(job, OllamaAnswer(job, asked), headers)


def _loaded(request: Request, asked: ollama.OllamaGenerating, headers: Mapping[str, str]) -> Response:
    """The answer to a request without a prompt, which asks for the model to be loaded."""
    served_by(request).models.check(asked.model)
    line: dict[str, Any] = {"model": asked.model, "created_at": _now(), "done": True, "done_reason": "load"}
    is_chat = isinstance(asked, ollama.OllamaChatRequest)
    more = {"message": {"role": "assistant", "content": ""}} if is_chat else {"response": ""}
    return json_response(line | more, headers)


async def _chat(
    request: Request,
    asked: ollama.OllamaGenerating,
    content: dict[str, Any],
    headers: Mapping[str, str],
    names: Mapping[str, str],
) -> Response:
    with by_names(names):
        chat = read_as(content, ChatRequest)
        job, headers = await job_of(request, chat, headers, id_prefix="ollama-", ends_with_context=True)
    return await respond(job, OllamaAnswer(job, asked), headers)


def _sampling_of(
    served: AppState, asked: ollama.OllamaGenerating, headers: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, str], dict[str, str]]:
    """The fields of a chat that stand beside its messages, by which names the request has them, and the headers, which
    name the options that are ignored.
    """
    content: dict[str, Any] = {"model": served.models.check(asked.model), "stream": asked.stream is not False}
    if asked.logprobs or asked.top_logprobs:
        content |= {"logprobs": asked.logprobs, "top_logprobs": asked.top_logprobs}
    if asked.format not in (None, ""):
        content["response_format"] = _form(asked.format)
    if asked.think is not None:
        content["reasoning_effort" if isinstance(asked.think, str) else "enable_thinking"] = asked.think
    names = {"response_format": "format", "enable_thinking": "think", "reasoning_effort": "think"}
    ignored = []
    for name, value in (asked.options or {}).items():
        own, value = OLLAMA.others.get(name, name), whole(value)
        if name in LOADING or value is None:
            continue
        if name == "num_ctx":
            most = served.client.max_model_len  # which is what it is: a request that asks for no more has it
            is_there = isinstance(value, int) and not isinstance(value, bool) and 0 < value <= most
            allowed = f"an integer from 1 to {most}, the context of this server (--max-model-len)"
            require(is_there, "options.num_ctx", value, allowed)
        elif own in known_names(ChatRequest) - NO_OPTIONS:
            if own == "max_tokens":
                PREDICTED.check(f"options.{name}", value)
                value = value if value > 0 else None  # Ollama's words for no bound
            is_one = content.get(own, value) == value
            require(is_one, f"options.{name}", value, f"absent or what {names.get(own)} is")
            content[own], names[own] = value, f"options.{name}"
        else:
            ignored.append(f"options.{name}")
    check_penalty_window(content, "options.")
    content.pop("repeat_last_n", None)
    require(content.get("n") in (None, 1), "options.n", content.get("n"), "absent or 1")
    with by_names(names):
        check_refused(content, ChatRequest)  # a raw prompt would take more
    return content, names, served.ignored.header(ignored, headers)


def _form(given: str | dict[str, Any]) -> dict[str, Any]:
    if isinstance(given, dict):
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": given}}
    require(given == "json", "format", given, '"json" or a JSON schema')
    return {"type": "json_object"}


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


# -- answers --------------------------------------------------------------------------------------------------------

NANOSECONDS = 1_000_000_000


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


class OllamaAnswer:
    """The answer to one POST /api/chat or /api/generate, under the name that was asked for.

    A call comes as soon as its arguments are whole.
    """

    form = StreamForm(lambda error: ollamas_error_body(error) + b"\n", ping=b"", media_type=b"application/x-ndjson")

    def __init__(self, job: RequestContext[Any], asked: ollama.OllamaGenerating) -> None:
        self._job = job
        self._model = asked.model
        self._is_chat = isinstance(asked, ollama.OllamaChatRequest)
        self._chat = SingleAnswer(job) if isinstance(job.asked, ChatRequest) else None
        self._words = LogprobWords(job.asked.logprobs or 0, as_ids=False)
        self._usage = UsageCounter(job) if self._chat is None else self._chat.tally
        self._calls: dict[int, answers.FunctionCall] = {}

    async def whole(self) -> dict[str, Any]:
        output = await whole_output(self._job, self._usage)
        news = self._of_completion(output) if self._chat is None else self._chat.of_whole(output)
        return {**self._line(news), **self._end(output)}

    def told(self, number: int, output: RequestOutput) -> bytes:
        if self._chat is not None:
            news = self._chat.news(output)
        else:
            self._usage.add(number, output)
            news = self._of_completion(output)
        if news is None:
            return b""
        line, lines = self._line(news), []
        if news.text or news.reasoning or news.logprobs or "tool_calls" in line.get("message", {}):
            lines.append(line)
        if news.finish_reason is not None:
            lines.append({**self._line(_NOTHING), **self._end(output)})
        return b"".join(orjson.dumps(line) + b"\n" for line in lines)

    def _of_completion(self, output: RequestOutput) -> Delta:
        (answer,) = output.outputs
        logprobs: Sequence[answers.TokenLogprob] = ()
        if self._job.asked.logprobs is not None:
            logprobs = self._words.of_chat(answer.token_ids, answer.logprobs or [])["content"]
        return Delta(answer.text, answer.finish_reason, answer.stop_reason, {}, logprobs=logprobs)

    def _whole_calls(self, pieces: Sequence[answers.ToolCallDelta]) -> list[ollama.OllamaToolCall]:
        """The calls that are whole with these pieces; one that is cut off within its arguments never is."""
        found: list[ollama.OllamaToolCall] = []
        for piece in pieces:
            known = self._calls.setdefault(piece["index"], {"name": "", "arguments": ""})
            known["name"] += piece["function"].get("name", "")
            known["arguments"] += piece["function"]["arguments"]
            if not known["arguments"].endswith("}"):
                continue
            with suppress(ValueError):  # the end of an inner object
                json.loads(known["arguments"])
                # As the model wrote it, but on one line: orjson writes no integer beyond 64 bits.
                arguments: Any = orjson.Fragment(known["arguments"].translate(_ON_ONE_LINE))
                found.append({"function": {"name": known["name"], "arguments": arguments}})
        return found

    def _line(self, news: Delta) -> dict[str, Any]:
        line: dict[str, Any] = {"model": self._model, "created_at": _now(), "done": False}
        if self._is_chat:
            message: dict[str, Any] = {"role": "assistant", "content": news.text}
            line["message"] = message
        else:
            message = line
            line["response"] = news.text
        if news.reasoning:
            message["thinking"] = news.reasoning
        if calls := self._whole_calls(news.calls):
            message["tool_calls"] = calls
        if news.logprobs:
            line["logprobs"] = news.logprobs
        return line

    def _end(self, output: RequestOutput) -> dict[str, Any]:
        usage, times = self._usage.usage(), output.metrics
        return {
            "done": True,
            "done_reason": output.outputs[0].finish_reason,
            "total_duration": _nanoseconds((times.finished_time or time.monotonic()) - times.arrival_time),
            "load_duration": 0,
            "prompt_eval_count": usage["prompt_tokens"],
            "prompt_eval_duration": _nanoseconds(times.prefill_seconds),
            "eval_count": usage["completion_tokens"],
            "eval_duration": _nanoseconds(times.decode_seconds),
            **self._usage.depth(),
        }


_NOTHING = Delta("", None, None, {})
_ON_ONE_LINE = str.maketrans("\r\n", "  ")


def _nanoseconds(seconds: float | None) -> int:
    return round((seconds or 0.0) * NANOSECONDS)


# -- routes --------------------------------------------------------------------------------------------------------

API_VERSION = "0.12.11"
"""Of Ollama: the API that these routes follow, by which clients decide what they may ask for."""
NEVER = "9999-12-31T23:59:59Z"
"""When the model is unloaded."""


async def ollama_embed(request: Request) -> Response:
    """Embed texts, as Ollama has it."""
    began = time.monotonic()
    asked, headers = await read_body(request, ollama.OllamaEmbedRequest)
    model = served_by(request).models.check(asked.model)
    given = embeddings.EmbeddingRequest(input=asked.input, dimensions=asked.dimensions)
    vectors, num_tokens = await embedded(request, given, model, truncate=asked.truncate is not False)
    answer: ollama.OllamaEmbedAnswer = {
        "model": asked.model,
        "embeddings": [vector.tolist() for vector in vectors],
        "total_duration": round((time.monotonic() - began) * NANOSECONDS),
        "load_duration": 0,
        "prompt_eval_count": num_tokens,
    }
    return json_response(answer, headers)


async def ollama_embeddings(request: Request) -> Response:
    """Embed a text, as Ollama had it."""
    asked, headers = await read_body(request, ollama.OllamaEmbeddingsRequest)
    model = served_by(request).models.check(asked.model)
    require(bool(asked.prompt), "prompt", asked.prompt, "a text of at least one character")
    given = embeddings.EmbeddingRequest(input=asked.prompt or "", normalize=False)
    vectors, _ = await embedded(request, given, model, field="prompt", truncate=True)
    answer: ollama.OllamaEmbeddingsAnswer = {"embedding": vectors[0].tolist()}
    return json_response(answer, headers)


async def ollama_tags(request: Request) -> Response:
    """The ids of the model, as Ollama lists them."""
    served = served_by(request)
    facts = await _facts(served)
    cards = [facts.card(card["id"]) for card in served.models.cards()]
    for model in further_models(request).models:
        own = await served.in_thread(_facts_of, model.directory, model.config)
        cards.append(own.card(model.name))
    return json_response({"models": cards})


async def ollama_show(request: Request) -> Response:
    """What the model is, as Ollama says it."""
    served = served_by(request)
    asked, headers = await read_body(request, ollama.OllamaShowRequest)
    name = asked.model or asked.name
    if name is None:
        raise invalid("model", "model must be given.", "missing_required_parameter")
    served.models.check(name)
    facts, defaults = await _facts(served), served.client.default_sampling_params
    shown = OLLAMA.values(defaults, "temperature", "top_k", "top_p", "min_p", "repeat_penalty")
    parameters = [f"{option:<30} {value:g}" for option, value in shown.items()]
    template = await served.client.chat_template()
    answer: ollama.OllamaShow = {
        "modelfile": f"FROM {name}\n",
        "parameters": "\n".join(parameters),
        "template": "{{ .Prompt }}" if template is None else template,
        "details": facts.details,
        "model_info": facts.info(served),
        "capabilities": await _capabilities(served, has_template=template is not None),
        "modified_at": facts.modified_at,
    }
    return json_response(answer, headers)


async def ollama_ps(request: Request) -> Response:
    """The model that is loaded, as Ollama lists it."""
    first = served_by(request)
    states = [] if first.client.heartbeat().is_sleeping else [first]
    states += [state for _, state in further_models(request).loaded()]
    return json_response({"models": [await _running(state) for state in states]})


async def _running(served: AppState) -> dict[str, Any]:
    facts = await _facts(served)
    on_gpu = served.client.settings.device.type == "cuda"
    card = facts.card(served.models.default)
    return {key: value for key, value in card.items() if key != "modified_at"} | {
        "expires_at": NEVER,
        "size_vram": facts.size if on_gpu else 0,
        "context_length": served.client.max_model_len,
    }


async def ollama_version(request: Request) -> Response:
    """The version of Ollama's API."""
    return json_response({"version": API_VERSION})


async def _capabilities(served: AppState, *, has_template: bool) -> list[str]:
    found = ["completion"]
    style = await served.chat_styles.of(None)
    if has_template and style.shows_tools:
        found.append("tools")
    if has_template and style.reasoning is not None:
        found.append("thinking")
    if served.infill is not None:
        found.append("insert")
    return found


@dataclass(frozen=True)
class ModelFacts:
    """What is known of the files of a model."""

    size: int
    modified_at: str
    digest: str
    details: ollama.OllamaDetails
    num_parameters: int

    def card(self, name: str) -> ollama.OllamaModel:
        return {
            "name": name,
            "model": name,
            "modified_at": self.modified_at,
            "size": self.size,
            "digest": self.digest,
            "details": self.details,
        }

    def info(self, served: AppState) -> dict[str, Any]:
        """By the keys of a GGUF file's header."""
        config, family = served.client.config, self.details["family"]
        own = {
            "context_length": served.client.max_model_len,
            "embedding_length": config.hidden_size,
            "block_count": config.num_layers,
            "feed_forward_length": config.intermediate_size,
            "attention.head_count": config.num_heads,
            "attention.head_count_kv": config.num_kv_heads,
            "vocab_size": config.vocab_size,
        }
        general = {"general.architecture": family, "general.parameter_count": self.num_parameters}
        return general | {f"{family}.{name}": value for name, value in own.items()}


async def _facts(served: AppState) -> ModelFacts:
    settings = served.client.settings
    return await served.in_thread(_facts_of, settings.directory, served.client.config)


@cache
def _facts_of(directory: Path, config: ModelConfig) -> ModelFacts:
    """Read once: the files of a model that is served stay as they are."""
    stats = [(path.name, path.stat()) for path in model_files(directory)]
    family = str(files_of(directory).read_json_object(CONFIG_FILE).get("model_type", "llama"))
    stored = config.quantization or config.dtype or "unknown"
    if directory.is_file():
        from gguf import LlamaFileType

        kind = open_gguf(directory).metadata.get("general.file_type")
        stored = LlamaFileType(kind).name.removeprefix("MOSTLY_") if kind in set(LlamaFileType) else stored
    count = _num_parameters(config)
    shown = f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.0f}M"
    modified = datetime.fromtimestamp(max(stat.st_mtime for _, stat in stats), UTC)
    named = repr([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats])
    return ModelFacts(
        size=sum(stat.st_size for _, stat in stats),
        modified_at=modified.isoformat(timespec="seconds").replace("+00:00", "Z"),
        digest=hashlib.sha256(named.encode()).hexdigest(),
        details={
            "parent_model": "",
            "format": "safetensors" if directory.is_dir() else "gguf",
            "family": family,
            "families": [family],
            "parameter_size": shown,
            "quantization_level": stored,
        },
        num_parameters=count,
    )


def _num_parameters(config: ModelConfig) -> int:
    """Of matrices; norms and biases are some thousandths of them."""
    heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim * config.hidden_size
    layer = heads + 3 * config.hidden_size * config.intermediate_size
    tables = (1 if config.tie_word_embeddings else 2) * config.vocab_size * config.hidden_size
    return config.num_layers * layer + tables


ROUTES = (
    Route(
        "/api/chat", ollama_chat, ollama.OllamaChatRequest, ollama.OllamaChatAnswer, events=(ollama.OllamaChatAnswer,)
    ),
    Route(
        "/api/generate",
        ollama_generate,
        ollama.OllamaGenerateRequest,
        ollama.OllamaGenerateAnswer,
        events=(ollama.OllamaGenerateAnswer,),
    ),
    Route("/api/embed", ollama_embed, ollama.OllamaEmbedRequest, ollama.OllamaEmbedAnswer),
    Route("/api/embeddings", ollama_embeddings, ollama.OllamaEmbeddingsRequest, ollama.OllamaEmbeddingsAnswer),
    Route("/api/show", ollama_show, ollama.OllamaShowRequest, ollama.OllamaShow),
    Route("/api/tags", ollama_tags, answer=ollama.OllamaTags),
    Route("/api/ps", ollama_ps, answer=ollama.OllamaProcesses),
    Route("/api/version", ollama_version, answer=answers.Version),
)
