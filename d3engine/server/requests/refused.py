"""Unknown fields of requests: taken, and named to the client."""

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
from d3engine.server.errors import invalid
from d3engine.server.schemas.messages import CountTokensRequest, MessagesRequest
from d3engine.server.schemas.requests import ChatRequest, CompletionRequest
from d3engine.server.schemas.responses import ResponsesRequest

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


@dataclass(frozen=True)
class AllowedValues:
    """The values that a field may have all the same, since they ask for what happens anyway; null is always one."""

    allowed: tuple[Any, ...] = ()
    why: str = ""


ASK_NOTHING = (
    # OpenAI's: who asks, for whom, and at what price.
    *("user", "metadata", "safety_identifier", "service_tier", "access_programs"),
    *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
    # Of vLLM, SGLang, llama.cpp and Ollama: names of requests, and how their servers keep and compute them.
    *("request_id", "rid", "keep_alive", "cache_prompt", "id_slot", "n_keep", "num_keep", "n_discard", "n_cache_reuse"),
    *("num_gpu", "num_thread", "num_batch", "timings_per_token", "return_progress", "spaces_between_special_tokens"),
    # What only changes something with a field that is refused.
    *("mirostat_tau", "mirostat_eta", "xtc_threshold", "dynatemp_exponent", "repeat_last_n", "smoothing_curve"),
    *("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_range", "dry_sequence_breakers"),
)
"""Fields that cannot change an answer."""

ANTHROPICS_ASK_NOTHING = ("cache_control", "user_profile_id", "workspace_id", "diagnostics")
"""Of Anthropic's alone."""

_NO_SAMPLER: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("mirostat", "dry_multiplier", "xtc_probability", "dynatemp_range", "smoothing_factor"), (0,)),
    **dict.fromkeys(("top_a", "epsilon_cutoff", "eta_cutoff", "penalty_alpha", "no_repeat_ngram_size"), (0,)),
    **dict.fromkeys(("typical_p", "typical", "tfs", "tfs_z", "guidance_scale", "num_beams", "beam_width"), (1,)),
    **dict.fromkeys(("encoder_repetition_penalty", "frequency_decay"), (1,)),
    **dict.fromkeys(("length_penalty",), (1, 0)),
    **dict.fromkeys(("top_n_sigma", "nsigma", "min_keep"), (0, -1)),
    **dict.fromkeys(("adaptive_target",), (-1,)),
    **dict.fromkeys(("use_beam_search", "early_stopping", "watermark", "dynamic_temperature"), (False,)),
    **dict.fromkeys(("temperature_last", "grammar_lazy", "no_stop_trim", "penalize_nl"), (False,)),
    **dict.fromkeys(("samplers", "sampler_order", "sampler_priority", "logits_processors", "grammar_triggers"), ([],)),
    **dict.fromkeys(("custom_params", "vllm_xargs", "kv_transfer_params"), ({},)),
    **dict.fromkeys(
        ("custom_logit_processor", "negative_prompt", "exponential_decay_length_penalty", "stop_regex"), ()
    ),
}
"""Fields that change how tokens are drawn -> the values that change nothing."""

_NO_EDITING: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("truncate_prompt_tokens", "truncate", "truncation_side"), ()),
    **dict.fromkeys(("n_indent", "t_max_predict_ms", "t_max_prompt_ms"), (0,)),
    **dict.fromkeys(("documents", "image_data", "images", "lora", "transforms", "plugins"), ([],)),
    **dict.fromkeys(("num_ctx", "template", "system_prompt", "context", "input_prefix", "input_suffix"), ()),
    **dict.fromkeys(("lora_path", "lora_request", "adapter", "adapter_id", "session_params"), ()),
    **dict.fromkeys(("tool_prompt", "guideline", "input_embeds", "input_ids", "inputs", "input_extra"), ()),
    **dict.fromkeys(("mm_processor_kwargs", "media_io_kwargs", "parameters", "options", "sampling_params"), ({},)),
    **dict.fromkeys(("raw", "return_full_text", "think", "separate_reasoning", "thinking_forced_open"), (False,)),
    **dict.fromkeys(("include_reasoning", "parse_tool_calls"), (True,)),
    **dict.fromkeys(("enable_thinking", "thinking_budget", "thinking_budget_tokens", "thinking_token_budget"), ()),
    **dict.fromkeys(("reasoning_budget", "reasoning_format"), ()),
    **dict.fromkeys(("models", "provider", "route"), ()),
}
"""Fields that change what the model reads, or what is shown of its answer -> the values that change nothing."""

_RENAMED = {
    **dict.fromkeys(("n_predict", "num_predict", "max_new_tokens", "max_length"), "max_tokens"),
    **dict.fromkeys(("min_new_tokens", "min_length"), "min_tokens"),
    **dict.fromkeys(("repeat_penalty", "rep_pen"), "repetition_penalty"),
    **dict.fromkeys(("num_return_sequences",), "n"),
    **dict.fromkeys(("do_sample",), "temperature"),
    **dict.fromkeys(("stop_sequences", "stopping_strings"), "stop"),
    **dict.fromkeys(("banned_tokens", "banned_strings"), "bad_words"),
    **dict.fromkeys(("format", "structural_tag"), "structured_outputs"),
}
"""Fields of other servers -> the field that does something like it here."""
_RENAMED_NEUTRAL = {"repeat_penalty": (1,), "rep_pen": (1,), "min_new_tokens": (0,), "num_return_sequences": (1,)}

_OTHERS = {
    **{name: AllowedValues(allowed, "the sampler has no such setting") for name, allowed in _NO_SAMPLER.items()},
    **{name: AllowedValues(allowed, "the server has no such setting") for name, allowed in _NO_EDITING.items()},
    **{
        name: AllowedValues(_RENAMED_NEUTRAL.get(name, ()), f"{field} is the field for it")
        for name, field in _RENAMED.items()
    },
}
"""Of vLLM, SGLang, llama.cpp, Ollama, TGI and others."""

_CONSTRAINTS = {
    name: AllowedValues(why="structured_outputs and response_format are the fields for that")
    for name in (
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "guided_decoding_backend",
        "guided_whitespace_pattern",
        "grammar",
        "json_schema",
        "regex",
        "ebnf",
    )
}
"""Of vLLM, SGLang and llama.cpp, old and new: a client that sends one relies on it."""

_EMBEDDED = {"prompt_embeds": AllowedValues(why="prompts are texts or token ids")}
"""Tensors of a stranger are never loaded."""

_ANTHROPICS = {
    **_EMBEDDED,
    "thinking": AllowedValues(({"type": "disabled"},), "the model has no such setting"),
    "output_format": AllowedValues(why="output_config.format is the field for it"),
    "mcp_servers": AllowedValues(([],), "nothing but the model is asked"),
    "container": AllowedValues(why="no code is run"),
    "context_management": AllowedValues(why="a conversation is read as it comes"),
    "inference_geo": AllowedValues(why="the server computes where it is"),
    "speed": AllowedValues(("standard",), "there is one speed"),
}

_REFUSED: Mapping[type[Struct], Mapping[str, AllowedValues]] = {
    CompletionRequest: {
        "suffix": AllowedValues(why="a text before a given end is nothing that this model was trained to write"),
        **_CONSTRAINTS,
        **_EMBEDDED,
    },
    CountTokensRequest: _ANTHROPICS,
    ResponsesRequest: {
        **_CONSTRAINTS,
        **_EMBEDDED,
        "store": AllowedValues((False,), "nothing is stored"),
        "previous_response_id": AllowedValues(why="nothing is stored: send the conversation whole"),
        "conversation": AllowedValues(why="nothing is stored: send the conversation whole"),
        "prompt": AllowedValues(why="nothing is stored: send the prompt itself"),
        "background": AllowedValues((False,), "an answer is not kept for later"),
        "background_options": AllowedValues(why="an answer is not kept for later"),
        "max_tool_calls": AllowedValues(why="there are no tools of the server's own"),
        "include": AllowedValues(([],), "a response has nothing more to tell"),
        "top_logprobs": AllowedValues((0,), "POST /v1/chat/completions tells log-probabilities"),
        "reasoning": AllowedValues(({},), "the model has no such setting"),
        "truncation": AllowedValues(("disabled",), "a conversation is read whole"),
        "context_management": AllowedValues(why="a conversation is read as it comes"),
        "stream_options": AllowedValues(({}, {"include_obfuscation": False}), "events are not padded"),
        "moderation": AllowedValues(why="nothing is moderated"),
        "image": AllowedValues(why="responses are text"),
    },
    MessagesRequest: _ANTHROPICS,
    ChatRequest: {
        **_CONSTRAINTS,
        **_EMBEDDED,
        "functions": AllowedValues(why="tools is the field for them"),
        "function_call": AllowedValues(("none",), "tool_choice is the field for it"),
        "modalities": AllowedValues((["text"],), "answers are text"),
        "audio": AllowedValues(why="answers are text"),
        "prediction": AllowedValues(why="predicted outputs are not served"),
        "reasoning_effort": AllowedValues(
            why="the model has no such setting (chat_template_kwargs reaches the template)"
        ),
        "verbosity": AllowedValues(why="the model has no such setting"),
        "web_search_options": AllowedValues(why="nothing is searched"),
        "moderation": AllowedValues(why="nothing is moderated"),
        "store": AllowedValues((False,), "nothing is stored"),
    },
}
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "repetition_penalty": (1,),
    "skip_special_tokens": (True,),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "min_p", "min_tokens", "top_logprobs"), (0,)),
    **dict.fromkeys(("logprobs", "stream_options", "logit_bias", "chat_template_kwargs"), (False, {})),
    **dict.fromkeys(("stop", "stop_token_ids", "bad_words", "tools"), ([],)),
    **dict.fromkeys(("tool_choice",), ("none",)),
    **dict.fromkeys(("echo", "ignore_eos", "include_stop_str_in_output", "continue_final_message"), (False,)),
    **dict.fromkeys(("return_token_ids", "return_tokens_as_token_ids", "add_special_tokens"), (False,)),
    **dict.fromkeys(("add_generation_prompt", "parallel_tool_calls"), (True, False)),
    "response_format": ({"type": "text"},),
}
"""Fields that one route honours and another lacks -> the values that change nothing there."""


@cache
def refused_of(shape: type[Struct]) -> Mapping[str, AllowedValues]:
    """The fields that a shape refuses, with the values that they may have.

    Those are its own, those of other servers, and those that another route alone honours.
    """
    if shape not in _REFUSED:
        return {name: _OTHERS[name] for name in ("documents", "truncate_prompt_tokens")}
    if shape is CountTokensRequest:
        return _REFUSED[shape]
    honoured = {name for other in (CompletionRequest, ChatRequest) for name in other.__struct_fields__}
    elsewhere = {name: AllowedValues(_NEUTRAL.get(name, ()), "this route does not have it") for name in honoured}
    found = {**_OTHERS, **elsewhere, **_REFUSED[shape]}
    return {name: only for name, only in found.items() if name not in shape.__struct_fields__}


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
