"""The prompts of a completion, and every prompt's way to a checked request of the engine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request

from d3engine.depth import DepthPolicy
from d3engine.errors import InvalidValueError, TokenizerError, must_be
from d3engine.request.engine_request import EngineRequest
from d3engine.request.params import BOUNDS, SamplingParams
from d3engine.server.errors import invalid
from d3engine.server.requests import sampling
from d3engine.server.requests.bodies import check_priority, check_work
from d3engine.server.requests.sampling import DEPTH_HEADER
from d3engine.server.responses.context import RequestContext
from d3engine.server.schemas.requests import Common, CompletionRequest, Prompt
from d3engine.server.state import AppState, served_by

TOO_LONG = "context_length_exceeded"
"""OpenAI's word, by which clients know that a shorter prompt would help."""
_LONGEST = "This model's maximum context length is {} tokens"
"""By which LiteLLM knows it: it reads messages alone."""


def prompts_of(given: Prompt, served: AppState, most_prompts: int | None = None) -> list[str | list[int]]:
    """The prompts of a request: a text, token ids, or a list of texts or of token ids; `max_prompts` of them at most
    where `most_prompts` is None.

    What is far too long is refused by its length alone, since to look through it would hold up everybody else.
    """
    if isinstance(given, str):
        return [given]
    if len(given) == 0:
        raise invalid("prompt", "prompt must hold at least one prompt.")
    is_one = isinstance(given[0], int)
    most = served.client.max_model_len if is_one else most_prompts or served.settings.max_prompts
    if len(given) > most:
        kind = "token ids" if is_one else "prompts"
        message = must_be("prompt", f"{len(given)} {kind}", f"of at most {most} {kind}") + "."
        raise invalid("prompt", message, TOO_LONG if is_one else None)
    kinds = {type(item) for item in given}
    if len(kinds) > 1:
        raise invalid("prompt", "prompt must be a text, token ids, a list of texts, or a list of lists of token ids.")
    ids = [item for item in given if isinstance(item, int)]
    return [ids] if is_one else [item for item in given if not isinstance(item, int)]


def prompt_schema(served: AppState) -> dict[str, Any]:
    """What `prompts_of` and the engine take, in JSON Schema's words."""
    ids = {
        "type": "array",
        "items": {"type": "integer", "minimum": 0, "maximum": served.client.config.vocab_size - 1},
        "minItems": 1,
        "maxItems": served.client.max_model_len - 1,
    }
    text = {"type": "string"}
    several = {"type": "array", "minItems": 1, "maxItems": served.settings.max_prompts}
    kinds = [text, ids, {**several, "items": text}, {**several, "items": ids}]
    return {"description": "a text, token ids, or a list of either", "anyOf": kinds}


async def prepare_all(
    request: Request,
    prompts: Sequence[Any],
    params: SamplingParams,
    *,
    model: str,
    priority: int | None = None,
    max_tokens: int | None = None,
) -> list[EngineRequest]:
    """Each prompt with these parameters, checked for the model and its length; `max_tokens` is what was asked for.

    One after the other: the readers serve other requests between two of them, and none is read after one that is
    refused. Raises `RequestError` or `InvalidValueError` for the first that can never run.
    """
    served, found = served_by(request), list[EngineRequest]()
    # It may have been unloaded since the request named it.
    most, named_adapter = served.client.max_model_len, served.models.adapter(served.models.check(model))
    adapter = {} if named_adapter is None else {"lora_request": named_adapter}
    flow = request.scope["state"].get("api_key", ""), os.urandom(8).hex()
    try:
        for prompt in prompts:
            if found:
                await asyncio.sleep(0)  # short ones are read here: others have a turn
            prepared: EngineRequest = await served.client.prepare(prompt, params, priority=priority or 0, **adapter)
            length = len(prepared.prompt_token_ids)
            if max_tokens is not None and length + max_tokens > most:
                asked = f"{length + max_tokens} are asked for: {length} in the prompt, {max_tokens} in the answer"
                raise invalid("max_tokens", f"{_LONGEST.format(most)}, but {asked}.", TOO_LONG)
            found.append(replace(prepared, flow=flow))
        return found
    except InvalidValueError as error:  # what is too long has a code of OpenAI's
        if error.field == "prompt" and "max_model_len" in error.allowed:
            raise invalid(error.field, f"{error}. {_LONGEST.format(most)}.", TOO_LONG) from None
        if error.field == "max_tokens" and "KV cache" in error.allowed:
            raise invalid(error.field, f"{error}.", TOO_LONG) from None
        raise


def take_places(request: Request, num_prompts: int, n: int, n_field: str = "n") -> None:
    """Take the room that a request needs beside the place that it has.

    `n_field` is its field that says how many answers there are for each prompt. Raises `RequestError`: 429 where too
    little is left now, and 400 where an idle server would have too little too.
    """
    places = served_by(request).traffic.places
    if num_prompts * n <= places:
        request.scope["state"]["place"].take(num_prompts * n - 1)
        return
    field, given, most = ("prompt", num_prompts, places // n) if n <= places else (n_field, n, places)
    kind = "prompts" if field == "prompt" else "answers per prompt"
    why = f"since the server has room for {places} sequences"
    raise invalid(field, must_be(field, f"{given} {kind}", f"at most {most} {kind}, {why}") + ".", "too_many_sequences")


async def without_special_tokens(served: AppState, prompts: Sequence[str | list[int]]) -> list[str | list[int]]:
    """The same prompts, texts among them as token ids to which nothing was added."""

    def encode(prompt: str | list[int]) -> str | list[int]:
        """One that must be too long is left as it is, to be refused."""
        if not isinstance(prompt, str) or served.tokenizer.fewest_tokens(prompt) >= served.client.max_model_len:
            return prompt
        return served.tokenizer.encode(prompt, add_special_tokens=False)

    try:
        return [await served.in_thread(encode, prompt) for prompt in prompts]
    except TokenizerError as error:
        raise invalid("prompt", f"prompt must be a text that the model's tokenizer can encode ({error}).") from None


def begun(request: Request, asked: Common) -> tuple[AppState, str, DepthPolicy | None]:
    """Whose engine a request is for, by which id and at which depth. Raises `RequestError`."""
    served = served_by(request)
    model = served.models.check(asked.model)
    depth = served.depths.read(model, asked.depth, request.headers.get(DEPTH_HEADER))
    if asked.stream_options is not None and not asked.stream:
        raise invalid("stream_options", "stream_options must be absent unless stream is true.")
    check_priority(served, asked.priority)
    return served, model, depth


async def completion_job_of(
    request: Request, asked: CompletionRequest, *, id_prefix: str, ends_with_context: bool = False
) -> RequestContext[CompletionRequest]:
    """What to run for a completion, wholly checked; `ends_with_context` and errors are those of `chat.job_of`."""
    served, model, depth = begun(request, asked)
    sampling.check_num_logprobs("logprobs", asked.logprobs, served.settings)
    sampling.check_num_logprobs("prompt_logprobs", asked.prompt_logprobs, served.settings)
    max_tokens = asked.max_tokens
    if asked.suffix is None and asked.input_extra:
        raise invalid("input_extra", "input_extra must be absent where there is no suffix.")
    prompts = prompts_of(asked.prompt, served)
    beside = "".join([asked.suffix or "", *(one.text for one in asked.input_extra or ())])
    check_work(request, asked, [*prompts[:-1], str(prompts[-1]) + beside] if beside else prompts, asked.best_of)
    one_at_least = 1 if max_tokens == 0 else max_tokens
    decided = {"max_tokens": one_at_least, "structured_outputs": sampling.form_of(asked), **_several(asked)}
    params = sampling.sampling_params(asked, served.client.default_sampling_params, depth, **decided)
    take_places(request, len(prompts), params.n, "n" if asked.best_of is None else "best_of")
    if asked.suffix is not None:
        prompts, ends = await infilled(served, prompts, asked)
        params = replace(params, stop_token_ids=[*(params.stop_token_ids or ()), *ends])
    elif asked.add_special_tokens is False:
        prompts = await without_special_tokens(served, prompts)
    limits = {"priority": asked.priority, "max_tokens": None if ends_with_context else max_tokens}
    with sampling.named("response_format" if asked.structured_outputs is None else "structured_outputs"):
        prepared = await prepare_all(request, prompts, params, model=model, **limits)
    trace = request.scope["state"].get("trace")
    return RequestContext(served, asked, model, prepared, depth, id_prefix=id_prefix, trace=trace)


async def infilled(
    served: AppState, prompts: Sequence[str | list[int]], asked: CompletionRequest
) -> tuple[list[str | list[int]], tuple[int, ...]]:
    """The prompts whose answers stand between each of these texts and `asked.suffix`, and the tokens that end them.

    Raises `RequestError` where the model has no tokens for it.
    """
    form = served.infill
    if form is None:
        message = "suffix must be absent, since the model has no fill-in-the-middle tokens."
        raise invalid("suffix", message, "unsupported_parameter")
    others = asked.echo or asked.add_special_tokens is False or asked.truncate_prompt_tokens is not None
    if others or not all(isinstance(prompt, str) for prompt in prompts):
        message = "prompt must be a text, and echo, add_special_tokens and truncate_prompt_tokens absent, with suffix."
        raise invalid("prompt", message)
    suffix, files = asked.suffix or "", [(one.filename, one.text) for one in asked.input_extra or ()]

    def fill(prompt: str | list[int]) -> str | list[int]:
        return form.prompt(served.tokenizer, str(prompt), suffix, files)

    return [await served.in_thread(fill, prompt) for prompt in prompts], form.ends


def _several(asked: CompletionRequest) -> dict[str, Any]:
    """The parameters that come of several fields. Raises `RequestError` for fields that contradict each other."""
    if asked.echo and asked.truncate_prompt_tokens is not None:
        given = asked.truncate_prompt_tokens
        raise invalid(
            "truncate_prompt_tokens", must_be("truncate_prompt_tokens", given, "absent where echo is true") + "."
        )
    decided: dict[str, Any] = {"logprobs": asked.logprobs}
    if asked.echo and asked.logprobs is not None:
        decided["prompt_logprobs"] = max(asked.logprobs, asked.prompt_logprobs or 0)
    n = 1 if asked.n is None else asked.n
    if asked.best_of is not None and asked.best_of != n:
        BOUNDS["n"].check("best_of", asked.best_of)
        if asked.best_of < n:
            raise invalid("best_of", must_be("best_of", asked.best_of, f"at least n={n}") + ".")
        if asked.stream:
            raise invalid("best_of", "best_of must be absent or equal to n where stream is true.")
        decided |= {"n": asked.best_of, "logprobs": asked.logprobs or 0}
    return decided
