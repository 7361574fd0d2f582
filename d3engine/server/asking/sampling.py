"""The sampling fields of a request become `SamplingParams`; what a request leaves out is what the model's
generation_config.json says."""

from __future__ import annotations

from typing import Any

from d3engine.depth import DepthPolicy
from d3engine.request.bounds import Integers
from d3engine.request.params import RequestOutputKind, SamplingParams
from d3engine.server.errors import invalid
from d3engine.server.settings import ServerSettings
from d3engine.server.shapes.fields import TEMPERATURES
from d3engine.server.shapes.requests import Common

SAME_NAMES = (
    "n",
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "seed",
    "stop",
    "top_k",
    "min_p",
    "repetition_penalty",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "allowed_token_ids",
    "bad_words",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "prompt_logprobs",
    "cache_salt",
)
"""Fields of a request that are `SamplingParams`' own."""
SEVERAL_ANSWERS_TEMPERATURE = 1.0
"""OpenAI's default, of requests for several answers; a model's file may say 0, which would make them all the same."""


def sampling_params(
    asked: Common, defaults: SamplingParams, depth: DepthPolicy | None, **decided: Any
) -> SamplingParams:
    """The parameters of a request. `decided` are those that its route has worked out from several fields.

    Raises `InvalidValueError` or `RequestError` for values that are not allowed.
    """
    wanted = {name: value for name in SAME_NAMES if (value := getattr(asked, name)) is not None}
    if asked.temperature is not None:
        TEMPERATURES.check("temperature", asked.temperature)
    elif max(wanted.get("n", 1), decided.get("n", 1)) > 1:
        wanted["temperature"] = SEVERAL_ANSWERS_TEMPERATURE
    if asked.stop == "":
        raise invalid("stop", "stop must be null or of at least one character.")
    if asked.stream and asked.prompt_logprobs is not None:
        raise invalid("prompt_logprobs", "prompt_logprobs must be absent where stream is true.")
    kind = RequestOutputKind.DELTA if asked.stream else RequestOutputKind.FINAL_ONLY
    # What `dataclasses.replace` makes, in two thirds of its time.
    return SamplingParams(**{**vars(defaults), **wanted, **decided, "depth": depth, "output_kind": kind})


def check_stream_options(asked: Common) -> None:
    """Refuse stream_options where nothing is streamed."""
    if asked.stream_options is not None and not asked.stream:
        raise invalid("stream_options", "stream_options must be absent unless stream is true.")


def check_num_logprobs(name: str, number: int | None, settings: ServerSettings) -> None:
    """Refuse more log-probabilities of a token than the server gives."""
    if number is not None:
        logprob_bounds(settings).check(name, number)


def logprob_bounds(settings: ServerSettings) -> Integers:
    """How many log-probabilities of a token may be asked for."""
    return Integers(0, settings.max_logprobs)
