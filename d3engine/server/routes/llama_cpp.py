"""The routes of llama.cpp's server that OpenAI's API lacks, for editors and scripts written for it."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from d3engine.engine.model_directory import chat_defaults
from d3engine.request.params import BOUNDS
from d3engine.server.errors import RequestError
from d3engine.server.requests.bodies import read_body
from d3engine.server.requests.chat import chat_prompt
from d3engine.server.requests.llama_cpp import infill_job, llama_completion_job
from d3engine.server.responses.llama_cpp import LlamaAnswer
from d3engine.server.responses.running import while_connected
from d3engine.server.responses.writer import respond
from d3engine.server.routes.api import Route
from d3engine.server.schemas.llama_cpp import (
    LlamaCompletion,
    LlamaCompletionRequest,
    LlamaInfillRequest,
    LlamaPrompt,
    LlamaProps,
    LlamaSlot,
    LlamaTemplateRequest,
)
from d3engine.server.schemas.requests import LLAMA_CPP, TokenizeRequest
from d3engine.server.state import json_response, served_by
from d3engine.utils.version import __version__


async def llama_completion(request: Request) -> Response:
    """Go on from a prompt, as llama.cpp has it."""
    job, headers = await while_connected(request, llama_completion_job(request))
    return await respond(request, job, LlamaAnswer(job), headers)


async def llama_infill(request: Request) -> Response:
    """Write the text between two others, as llama.cpp has it."""
    job, headers = await while_connected(request, infill_job(request))
    return await respond(request, job, LlamaAnswer(job), headers)


async def llama_props(request: Request) -> Response:
    """What the server does by default, as llama.cpp says it."""
    served = served_by(request)
    client, defaults, named = served.client, served.client.default_sampling_params, served.tokenizer.special_tokens
    known = LLAMA_CPP.values(defaults, *(LLAMA_CPP.by_own.get(name, name) for name in BOUNDS))
    params = {name: value for name, value in known.items() if value is not None} | {"n_predict": -1}
    found: LlamaProps = {
        "default_generation_settings": {"n_ctx": client.max_model_len, "params": params},
        "total_slots": client.settings.max_num_seqs,
        "model_alias": served.models.default,
        "model_path": served.models.default,
        "modalities": {"vision": False, "audio": False},
        "chat_template": await client.chat_template() or "",
        "bos_token": named.get("bos_token", ""),
        "eos_token": named.get("eos_token", ""),
        "build_info": f"d3engine {__version__}",
        "d3ext": {"chat_defaults": await served.in_thread(chat_defaults, client.settings.directory)},
    }
    return json_response(found)


async def llama_slots(request: Request) -> Response:
    """The sequences that may run at once."""
    served = served_by(request)
    running, most = (await served.client.stats()).num_running, served.client.settings.max_num_seqs
    if running >= most and request.query_params.get("fail_on_no_slot") not in (None, "", "0"):
        raise RequestError(503, "All slots are in use.", code="no_slot_available")
    found: list[LlamaSlot] = [
        {"id": number, "n_ctx": served.client.max_model_len, "speculative": False, "is_processing": number < running}
        for number in range(most)
    ]
    return json_response(found)


async def llama_apply_template(request: Request) -> Response:
    """The text of a conversation by the model's template."""
    served = served_by(request)
    asked, headers = await read_body(request, LlamaTemplateRequest)
    served.models.check(asked.model)
    begins = True if asked.add_generation_prompt is None else asked.add_generation_prompt
    as_tokens = TokenizeRequest(
        messages=asked.messages, add_generation_prompt=begins, chat_template_kwargs=asked.chat_template_kwargs
    )
    prompt = await chat_prompt(served, as_tokens, asked.messages, asked.tools)
    text = await served.in_thread(served.tokenizer.decode, prompt["prompt_token_ids"], skip_special_tokens=False)
    found: LlamaPrompt = {"prompt": text}
    return json_response(found, headers)


_GENERATES: dict[str, Any] = {"answer": LlamaCompletion, "events": (LlamaCompletion,)}

ROUTES = (
    Route("/completion", llama_completion, LlamaCompletionRequest, **_GENERATES),
    Route("/completions", llama_completion, LlamaCompletionRequest, **_GENERATES),
    Route("/infill", llama_infill, LlamaInfillRequest, **_GENERATES),
    Route("/apply-template", llama_apply_template, LlamaTemplateRequest, LlamaPrompt),
    Route("/props", llama_props, answer=LlamaProps),
    Route("/slots", llama_slots, answer=list[LlamaSlot]),
)
