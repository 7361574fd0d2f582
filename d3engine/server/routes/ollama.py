"""Ollama's API, for programs that speak nothing else: Open WebUI, Continue, the `ollama` client, LangChain's Ollama."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from d3engine.engine.model_directory import model_files
from d3engine.errors import require
from d3engine.model.config import ModelConfig
from d3engine.model.gguf_file import open_gguf
from d3engine.model.source import CONFIG_FILE, files_of
from d3engine.server.errors import invalid
from d3engine.server.requests.bodies import read_body
from d3engine.server.requests.ollama import chat_job_of, generate_job_of, model_of
from d3engine.server.responses.context import RequestContext
from d3engine.server.responses.ollama import NANOSECONDS, OllamaAnswer, loaded
from d3engine.server.responses.running import while_connected
from d3engine.server.responses.streams import LINES
from d3engine.server.responses.writer import respond
from d3engine.server.routes.api import Route, further_models
from d3engine.server.routes.embeddings import embedded
from d3engine.server.schemas import answers, ollama
from d3engine.server.schemas.requests import OLLAMA
from d3engine.server.state import AppState, json_response, served_by

G = TypeVar("G", bound=ollama.OllamaGenerating)

API_VERSION = "0.12.11"
"""Of Ollama: the API that these routes follow, by which clients decide what they may ask for."""
NEVER = "9999-12-31T23:59:59Z"
"""When the model is unloaded."""


async def ollama_chat(request: Request) -> Response:
    """Answer a conversation, as Ollama has it."""
    return await _generated(request, ollama.OllamaChatRequest, "messages", chat_job_of)


async def ollama_generate(request: Request) -> Response:
    """Answer a prompt, as Ollama has it."""
    return await _generated(request, ollama.OllamaGenerateRequest, "prompt", generate_job_of)


async def _generated(
    request: Request,
    shape: type[G],
    field: str,
    job_of: Callable[[Request, G, Mapping[str, str]], Awaitable[tuple[RequestContext[Any], dict[str, str]]]],
) -> Response:
    """The answer to what stands in this field; without it, that the model is loaded."""
    asked, headers = await read_body(request, shape)
    is_chat = shape is ollama.OllamaChatRequest
    if not getattr(asked, field):
        model_of(served_by(request), asked.model)
        return json_response(loaded(asked.model, is_chat=is_chat), headers)
    job, headers = await while_connected(request, job_of(request, asked, headers))
    return await respond(request, job, OllamaAnswer(job, asked.model, is_chat=is_chat), headers, media_type=LINES)


async def ollama_embed(request: Request) -> Response:
    """Embed texts, as Ollama has it."""
    began = time.monotonic()
    asked, headers = await read_body(request, ollama.OllamaEmbedRequest)
    model = model_of(served_by(request), asked.model)
    cut = asked.truncate is not False
    work = embedded(request, asked.input, model, field="input", dimensions=asked.dimensions, truncate=cut)
    vectors, num_tokens = await while_connected(request, work)
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
    model = model_of(served_by(request), asked.model)
    require(bool(asked.prompt), "prompt", asked.prompt, "a text of at least one character")
    work = embedded(request, asked.prompt or "", model, field="prompt", normalize=False, truncate=True)
    vectors, _ = await while_connected(request, work)
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
    model_of(served, name)
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
