"""A request for completions, from its body to a job."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from d3engine.errors import must_be
from d3engine.request.params import BOUNDS
from d3engine.server.answering.job import RequestContext
from d3engine.server.asking.bodies import read_body
from d3engine.server.asking.depth import depth_header
from d3engine.server.asking.prompts import prepare_all, prompts_of, take_places, without_special_tokens
from d3engine.server.asking.sampling import check_num_logprobs, check_stream_options, sampling_params
from d3engine.server.asking.structured import form_of, named
from d3engine.server.asking.work import check_priority, check_work
from d3engine.server.errors import invalid
from d3engine.server.served import served_by
from d3engine.server.shapes.requests import CompletionRequest
from d3engine.server.tracing.tracer import trace_of

DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""


async def completion_job(request: Request) -> tuple[RequestContext[CompletionRequest], dict[str, str]]:
    """What to run, wholly checked, and headers for the answer. Raises `RequestError` and `InvalidValueError`."""
    served = served_by(request)
    asked, headers = await read_body(request, CompletionRequest)
    model = served.models.check(asked.model)
    depth = served.depths.read(model, asked.depth, depth_header(request.scope))
    check_stream_options(asked)
    check_priority(served, asked.priority)
    check_num_logprobs("logprobs", asked.logprobs, served.settings)
    check_num_logprobs("prompt_logprobs", asked.prompt_logprobs, served.settings)
    max_tokens = DEFAULT_MAX_TOKENS if asked.max_tokens is None else asked.max_tokens
    if max_tokens == 0 and not asked.echo:
        raise invalid("max_tokens", must_be("max_tokens", 0, "at least 1, unless echo is true") + ".")
    prompts = prompts_of(asked.prompt, served)
    check_work(request, asked, prompts, asked.best_of)
    decided = {"max_tokens": max_tokens or 1, "structured_outputs": form_of(asked), **_several(asked)}
    params = sampling_params(asked, served.client.default_sampling_params, depth, **decided)
    take_places(request, len(prompts), params.n, "n" if asked.best_of is None else "best_of")
    if asked.add_special_tokens is False:
        prompts = await without_special_tokens(served, prompts)
    with named("response_format" if asked.structured_outputs is None else "structured_outputs"):
        prepared = await prepare_all(request, prompts, params, priority=asked.priority, max_tokens=max_tokens)
    trace = trace_of(request.scope)
    return RequestContext(served, asked, model, prepared, depth, id_prefix="cmpl-", trace=trace), headers


def _several(asked: CompletionRequest) -> dict[str, Any]:
    """The parameters that come of several fields."""
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
