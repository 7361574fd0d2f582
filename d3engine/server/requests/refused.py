"""Fields of requests that are refused by name; unknown ones, which an answer names."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
from msgspec import Struct

from d3engine.errors import must_be
from d3engine.request.params import CHECKS, SamplingParams, Several
from d3engine.server.errors import invalid
from d3engine.server.schemas.messages import CountTokensRequest, MessagesRequest
from d3engine.server.schemas.ollama import OllamaChatRequest, OllamaGenerateRequest
from d3engine.server.schemas.requests import (
    SYNONYMS,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from d3engine.server.schemas.responses import ResponsesRequest
from d3engine.utils.arguments import Check

_log = logging.getLogger(__name__)

IGNORED_FIELDS = "X-D3-Ignored-Fields"
"""The header of an answer that names them."""

MOST_NAMED = 16
"""In one header."""
MOST_LOGGED = 256
"""Distinct ones that the log names, ever."""
PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class IgnoredFields:
    """Tells clients, and once the log, which fields of their requests are unknown."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def header(self, unknown: Sequence[str], before: Mapping[str, str] | None = None) -> dict[str, str]:
        """What the answer's headers get for these fields of its request, added to the headers `before`."""
        if not unknown:
            return dict(before or {})
        # A name is the client's own text: what could end a header or fill it is not repeated.
        names = [name if PLAIN_NAME.fullmatch(name) else "(unprintable)" for name in unknown[:MOST_LOGGED]]
        fresh = sorted(set(names) - self._logged)[: MOST_LOGGED - len(self._logged)]
        if fresh:
            self._logged.update(fresh)
            _log.warning("fields of requests are ignored: %s", ", ".join(fresh))
        more = len(unknown) - MOST_NAMED
        shown = names[:MOST_NAMED] + ([f"and {more} more"] if more > 0 else [])
        named = [before[IGNORED_FIELDS]] if before and IGNORED_FIELDS in before else []
        return {**(before or {}), IGNORED_FIELDS: ", ".join([*named, *shown])}


ASK_NOTHING = (
    # OpenAI's: who asks, for whom, and at what price.
    *("user", "metadata", "safety_identifier", "service_tier", "access_programs"),
    *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
    # Of vLLM, SGLang, llama.cpp and Ollama: names of requests, and how their servers keep and compute them.
    *("request_id", "rid", "keep_alive", "cache_prompt", "id_slot", "n_keep", "num_keep", "n_discard", "n_cache_reuse"),
    *("num_gpu", "num_thread", "num_batch", "timings_per_token", "return_progress", "spaces_between_special_tokens"),
    # What only changes something with a field that is refused.
    *("mirostat_tau", "mirostat_eta", "dynatemp_exponent", "smoothing_curve"),
)
"""Fields that cannot change an answer."""

ANTHROPICS_ASK_NOTHING = ("cache_control", "user_profile_id", "workspace_id", "diagnostics")
"""Of Anthropic's alone."""


def with_own_names(content: dict[str, Any], shape: type[Struct]) -> dict[str, Any]:
    """The body with its fields under the names that the shape has. Raises `RequestError` for two that differ."""
    for other, name in SYNONYMS.items():
        if other in content and name in shape.__struct_fields__:
            value, own = content[other], content.get(name)
            if own is not None and value is not None and own != value:
                raise invalid(other, must_be(other, value, f"absent or equal to {name}={own}") + ".")
            content = {**content, name: own if value is None else value}
            del content[other]
    return content


@dataclass(frozen=True)
class Refused:
    """Fields, separated by spaces, that `routes` refuse unless they ask for what happens anyway, and the reason.

    null, and each of the values in `allowed`, ask for that.
    """

    fields: str
    why: str
    allowed: tuple[Any, ...] = ()
    routes: tuple[type[Struct], ...] = (CompletionRequest, ChatRequest, ResponsesRequest, MessagesRequest)


_CHAT, _COMPLETION, _RESPONSE = (ChatRequest,), (CompletionRequest,), (ResponsesRequest,)
_OPENAI = (CompletionRequest, ChatRequest, ResponsesRequest)
_ANTHROPIC = (MessagesRequest, CountTokensRequest)
_TOKENIZE = (TokenizeRequest, DetokenizeRequest)
_OLLAMA = (OllamaChatRequest, OllamaGenerateRequest)
_SAMPLER, _SERVER = "the sampler has no such setting", "the server has no such setting"
_MODEL, _STATELESS = "the model has no such setting", "nothing is stored"

REFUSED = (
    # Of vLLM, SGLang, llama.cpp, Ollama, TGI and others: how tokens are drawn.
    Refused("mirostat dynatemp_range smoothing_factor", _SAMPLER, (0,)),
    Refused("top_a epsilon_cutoff eta_cutoff penalty_alpha no_repeat_ngram_size", _SAMPLER, (0,)),
    Refused("tfs tfs_z guidance_scale num_beams beam_width", _SAMPLER, (1,)),
    Refused("encoder_repetition_penalty frequency_decay", _SAMPLER, (1,)),
    Refused("length_penalty", _SAMPLER, (1, 0)),
    Refused("min_keep", _SAMPLER, (0, -1)),
    Refused("adaptive_target", _SAMPLER, (-1,)),
    Refused("repeat_last_n", "penalties count the whole prompt and answer", (-1,)),
    Refused("dry_range", "dry_penalty_last_n is the field for it"),
    Refused("use_beam_search early_stopping watermark dynamic_temperature", _SAMPLER, (False,)),
    Refused("temperature_last grammar_lazy no_stop_trim penalize_nl", _SAMPLER, (False,)),
    Refused("samplers sampler_order sampler_priority logits_processors grammar_triggers", _SAMPLER, ([],)),
    Refused("custom_params vllm_xargs kv_transfer_params", _SAMPLER, ({},)),
    Refused("custom_logit_processor negative_prompt exponential_decay_length_penalty stop_regex", _SAMPLER),
    # What the model reads, or what is shown of its answer.
    Refused("truncate truncation_side", _SERVER),
    Refused("n_indent t_max_predict_ms t_max_prompt_ms", _SERVER, (0,)),
    Refused("image_data images lora transforms plugins", _SERVER, ([],)),
    Refused("num_ctx template system_prompt context input_prefix input_suffix", _SERVER),
    Refused("lora_path lora_request adapter adapter_id session_params", _SERVER),
    Refused("capture steer", "hidden states are the Python library's alone"),
    Refused("return_hidden_states output_hidden_states", "hidden states are the Python library's alone", (False,)),
    Refused("tool_prompt guideline input_embeds input_ids inputs", _SERVER),
    Refused("mm_processor_kwargs media_io_kwargs parameters options sampling_params", _SERVER, ({},)),
    Refused("raw return_full_text thinking_forced_open", _SERVER, (False,)),
    Refused("include_reasoning parse_tool_calls separate_reasoning", _SERVER, (True,)),
    Refused("think", "enable_thinking is the field for it", routes=_OPENAI),
    Refused("thinking_budget thinking_budget_tokens reasoning_budget", "thinking_token_budget is the field for it"),
    Refused("reasoning_format", _SERVER),
    Refused("models provider route", _SERVER),
    Refused("documents", _SERVER, ([],), (*_OPENAI, MessagesRequest, *_TOKENIZE)),
    Refused("truncate_prompt_tokens", _SERVER, (), (ResponsesRequest, MessagesRequest, *_TOKENIZE)),
    # Other names of fields that are honoured here.
    Refused("n_predict num_predict max_new_tokens max_length", "max_tokens is the field for it"),
    Refused("min_new_tokens", "min_tokens is the field for it", (0,)),
    Refused("min_length", "min_tokens is the field for it"),
    Refused("repeat_penalty rep_pen", "this route has no penalties", (1,), (ResponsesRequest, MessagesRequest)),
    Refused("typical", "this route does not have it", (1,), (ResponsesRequest, MessagesRequest)),
    Refused("nsigma", "this route does not have it", (0, -1), (ResponsesRequest, MessagesRequest)),
    Refused("num_return_sequences", "n is the field for it", (1,)),
    Refused("do_sample", "temperature is the field for it"),
    Refused("stop_sequences stopping_strings", "stop is the field for it"),
    Refused("banned_tokens banned_strings", "bad_words is the field for it"),
    Refused("format structural_tag", "structured_outputs is the field for it"),
    # Constraints of vLLM, SGLang and llama.cpp, old and new: a client that sends one relies on it.
    Refused(
        "guided_json guided_regex guided_choice guided_grammar guided_decoding_backend guided_whitespace_pattern"
        " grammar json_schema regex ebnf",
        "structured_outputs and response_format are the fields for that",
        routes=_OPENAI,
    ),
    # Tensors of a stranger are never loaded.
    Refused("prompt_embeds", "prompts are texts or token ids", routes=(*_OPENAI, *_ANTHROPIC)),
    # Of one interface.
    Refused("images", "the model reads nothing but text", ([],), _OLLAMA),
    Refused("template", "the model's own chat template writes prompts (raw takes them as they are)", ("",), _OLLAMA),
    Refused("context", "a conversation is the messages of POST /api/chat", ([],), _OLLAMA),
    Refused("width height steps", "no images are made", (), _OLLAMA),
    Refused("functions", "tools is the field for them", routes=_CHAT),
    Refused("function_call", "tool_choice is the field for it", ("none",), _CHAT),
    Refused("modalities", "answers are text", (["text"],), _CHAT),
    Refused("audio", "answers are text", routes=_CHAT),
    Refused("prediction", "predicted outputs are not served", routes=_CHAT),
    Refused("verbosity", _MODEL, routes=_CHAT),
    Refused("web_search_options", "nothing is searched", routes=_CHAT),
    Refused("moderation", "nothing is moderated", routes=(*_CHAT, *_RESPONSE)),
    Refused("store", _STATELESS, (False,), (*_CHAT, *_RESPONSE)),
    Refused("previous_response_id conversation", f"{_STATELESS}: send the conversation whole", routes=_RESPONSE),
    Refused("prompt", f"{_STATELESS}: send the prompt itself", routes=_RESPONSE),
    Refused("background", "an answer is not kept for later", (False,), _RESPONSE),
    Refused("background_options", "an answer is not kept for later", routes=_RESPONSE),
    Refused("max_tool_calls", "there are no tools of the server's own", routes=_RESPONSE),
    Refused("include", "a response has nothing more to tell", ([],), _RESPONSE),
    Refused("top_logprobs", "POST /v1/chat/completions tells log-probabilities", (0,), _RESPONSE),
    Refused("truncation", "a conversation is read whole", ("disabled",), _RESPONSE),
    Refused("context_management", "a conversation is read as it comes", routes=(*_RESPONSE, *_ANTHROPIC)),
    Refused("stream_options", "events are not padded", ({}, {"include_obfuscation": False}), _RESPONSE),
    Refused("image", "responses are text", routes=_RESPONSE),
    Refused("output_format", "output_config.format is the field for it", routes=_ANTHROPIC),
    Refused("mcp_servers", "nothing but the model is asked", ([],), _ANTHROPIC),
    Refused("container", "no code is run", routes=_ANTHROPIC),
    Refused("inference_geo", "the server computes where it is", routes=_ANTHROPIC),
    Refused("speed", "there is one speed", ("standard",), _ANTHROPIC),
)
"""Every field that is refused by name, but for those that one route honours and another lacks."""


def _neutral(check: Check, default: Any) -> tuple[Any, ...]:
    """The values of a parameter that change nothing."""
    if default is not None:
        return (int(default) if isinstance(default, float) else default,)
    return ([],) if isinstance(check, Several) and not check.fewest else ()


_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **{name: _neutral(check, getattr(SamplingParams, name)) for name, check in CHECKS.items()},
    **dict.fromkeys(("max_tokens", "temperature", "top_p", "top_k"), ()),  # a model's file may have other defaults
    "best_of": (1,),
    "input_extra": ([],),
    "top_logprobs": (0,),
    **dict.fromkeys(("logprobs", "stream_options", "logit_bias", "chat_template_kwargs"), (False, {})),
    "tools": ([],),
    "tool_choice": ("none",),
    **dict.fromkeys(("echo", "continue_final_message", "add_special_tokens"), (False,)),
    **dict.fromkeys(("return_token_ids", "return_tokens_as_token_ids"), (False,)),
    **dict.fromkeys(("add_generation_prompt", "parallel_tool_calls"), (True, False)),
    "response_format": ({"type": "text"},),
}
"""Fields that one route honours and another lacks -> the values that change nothing there."""


@cache
def refused_of(shape: type[Struct]) -> Mapping[str, Refused]:
    """The fields that a shape refuses, those among them that another route alone honours."""
    found: dict[str, Refused] = {}
    if shape not in (CountTokensRequest, *_TOKENIZE):
        for name in {*CompletionRequest.__struct_fields__, *ChatRequest.__struct_fields__}:
            found[name] = Refused(name, "this route does not have it", _NEUTRAL.get(name, ()))
    found |= {name: row for row in REFUSED if shape in row.routes for name in row.fields.split()}
    return {name: row for name, row in found.items() if name not in shape.__struct_fields__}


def check_refused(content: Mapping[str, Any], shape: type[Struct]) -> None:
    """Raise `RequestError` for the first field that asks for something which is not done here."""
    refused = refused_of(shape)
    for name, value in content.items():
        only = refused.get(name)
        if only is None or value is None or any(_is_same(value, allowed) for allowed in only.allowed):
            continue
        words = " or ".join(["absent", *(json_text(allowed) for allowed in only.allowed)])
        raise invalid(name, must_be(name, value, f"{words}, since {only.why}") + ".", "unsupported_parameter")


def _is_same(value: Any, allowed: Any) -> bool:
    """Whether they are equal as JSON, where 1 is 1.0 and not true."""
    return bool(value == allowed) and isinstance(value, bool) == isinstance(allowed, bool)


def taken_names(shape: type[Struct]) -> frozenset[str]:
    """Fields that the shape lacks and that are no surprise."""
    own: tuple[str, ...] = ANTHROPICS_ASK_NOTHING if issubclass(shape, CountTokensRequest) else ()
    if shape is CountTokensRequest:
        own += MessagesRequest.__struct_fields__  # what changes an answer and not the length of its prompt
    return frozenset(refused_of(shape)).union(ASK_NOTHING, own)


def json_text(value: Any) -> str:
    return msgspec.json.encode(value).decode()
