"""POST /v1/embeddings, and /v1/score and /v1/rerank: how well documents answer a query, by the probability of "yes"."""

from __future__ import annotations

import asyncio
import base64
import os
import time
from collections.abc import Awaitable, Sequence
from functools import cache
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from d3engine.engine.model_directory import own_pooling
from d3engine.errors import InvalidValueError, ModelFormatError, require, require_integer
from d3engine.request.engine_request import EngineRequest
from d3engine.request.outputs import RequestOutput
from d3engine.request.params import DEFAULT_POOLING, POOLINGS, pooling_params
from d3engine.request.pooling import FloatArray, embedding_of
from d3engine.request.scoring import ANSWERS, TEMPLATE_VARIABLES, answer_params, judgement, score_of
from d3engine.server.errors import invalid
from d3engine.server.requests.bodies import check_priority, most_work, read_body
from d3engine.server.requests.chat import chat_prompt
from d3engine.server.requests.completions import prepare_all, prompts_of, without_special_tokens
from d3engine.server.requests.sampling import by_names
from d3engine.server.responses.context import RequestContext
from d3engine.server.responses.running import whole_output
from d3engine.server.routes.api import Route
from d3engine.server.schemas import embeddings
from d3engine.server.schemas.requests import ChatRequest
from d3engine.server.state import AppState, json_response, served_by

T = TypeVar("T")

MAX_INPUTS = 2048
"""OpenAI's, of one request."""


async def create_embeddings(request: Request) -> Response:
    """Embed texts."""
    served = served_by(request)
    asked, headers = await read_body(request, embeddings.EmbeddingRequest)
    model = served.models.check(asked.model)
    check_priority(served, asked.priority)
    encoding = asked.encoding_format or "float"
    require(encoding in ("float", "base64"), "encoding_format", encoding, '"float" or "base64"')
    vectors, num_tokens = await embedded(request, asked, model)
    found: list[list[float] | str] = [
        base64.b64encode(vector.astype("<f4").tobytes()).decode() if encoding == "base64" else vector.tolist()
        for vector in vectors
    ]
    answer: embeddings.EmbeddingList = {
        "object": "list",
        "data": [{"object": "embedding", "index": index, "embedding": one} for index, one in enumerate(found)],
        "model": model,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }
    return json_response(answer, headers)


async def embedded(
    request: Request, asked: embeddings.EmbeddingRequest, model: str, *, field: str = "input", truncate: bool = False
) -> tuple[list[FloatArray], int]:
    """The embeddings of the input, and how many tokens that had; with `truncate` of its beginning where it is too long.

    Raises `RequestError` and `InvalidValueError` naming `field`, which the interface has for it. Inputs of one request
    run side by side in as many places as are free, and one at least.
    """
    served = served_by(request)
    params = pooling_params(await _pooling(served, asked.pooling))
    if (dimensions := asked.dimensions) is not None:
        embeddings.DIMENSIONS.check("dimensions", dimensions)
        size = served.client.config.hidden_size
        require(dimensions <= size, "dimensions", dimensions, f"at most {size}, the model's own")
    with by_names({"prompt": field, "prompt_token_ids": field}):
        prompts = prompts_of(asked.input, served, MAX_INPUTS)
        check_texts(served, prompts)
        if asked.add_special_tokens is False:
            prompts = await without_special_tokens(served, prompts)
        if truncate:
            prompts = [await served.in_thread(_cut, served, prompt) for prompt in prompts]
        prepared = await prepare_all(request, prompts, params, model=model, priority=asked.priority)
    most = places_side_by_side(request, len(prepared))
    finish = {"normalize": asked.normalize is not False, "dimensions": dimensions}
    vectors = await all_of([_vector(served, one, finish) for one in prepared], most)
    return vectors, sum(len(one.prompt_token_ids) for one in prepared)


def places_side_by_side(request: Request, num_inputs: int) -> int:
    """How many inputs of a request may run at once: places that it takes now, and one at least."""
    served, place = served_by(request), request.scope["state"]["place"]
    found = min(num_inputs, 1 + max(0, served.traffic.places - served.traffic.taken))
    place.take(found - 1)
    return min(found, served.client.settings.max_num_seqs)


_own_pooling = cache(own_pooling)


async def _pooling(served: AppState, given: str | None) -> str:
    if given is not None:
        return given
    try:
        return await served.in_thread(_own_pooling, served.client.settings.directory) or DEFAULT_POOLING
    except ModelFormatError as error:
        message = f"pooling must be given, one of {', '.join(POOLINGS)}: that of the model's files is none of them."
        raise invalid("pooling", message) from error


def _cut(served: AppState, prompt: str | list[int]) -> str | list[int]:
    """A text with no more tokens than fit, one that is too long as token ids."""
    most = served.client.max_model_len - 1
    if not isinstance(prompt, str) or len(prompt.encode(errors="replace")) + 2 <= most:
        return prompt
    ids = served.tokenizer.encode(prompt)
    return prompt if len(ids) <= most else ids[:most]


def check_texts(served: AppState, prompts: Sequence[str | list[int]]) -> None:
    """Raise `InvalidValueError` for more text in one request than the server takes."""
    work, most = sum(map(len, prompts)), most_work(served)
    if work > most:
        allowed = f"at most {most} characters or ids in all (max_request_work)"
        raise InvalidValueError("prompt", f"{work} characters or ids", allowed)


async def _vector(served: AppState, prepared: EngineRequest, finish: dict[str, Any]) -> FloatArray:
    return embedding_of(await output_of(served, prepared, "embd-"), **finish)


async def output_of(served: AppState, prepared: EngineRequest, prefix: str) -> RequestOutput:
    """The whole output of a request whose answer is no text."""
    job: RequestContext[Any] = RequestContext(served, None, served.models.default, [prepared], None, id_prefix=prefix)
    return await whole_output(job)


async def all_of(work: Sequence[Awaitable[T]], most: int) -> list[T]:
    """The results of all, of which `most` run at once; the first error ends the others."""
    found: dict[int, T] = {}
    waiting = iter(enumerate(work))

    async def run() -> None:
        for number, one in waiting:
            found[number] = await one

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(most):
                group.create_task(run())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        for _, left in waiting:
            left.close()  # type: ignore[attr-defined]  # coroutines that never began
    return [found[number] for number in range(len(work))]


async def create_scores(request: Request) -> Response:
    """Score pairs of texts."""
    asked, headers = await read_body(request, embeddings.ScoreRequest)
    queries, documents = ([one] if isinstance(one, str) else one for one in (asked.text_1, asked.text_2))
    if len(queries) == 1:
        queries = queries * len(documents)
    allowed = f"one text, or as many as text_2 has ({len(documents)})"
    require(len(queries) == len(documents), "text_1", f"{len(queries)} texts", allowed)
    model, scores, num_tokens = await _scored(request, asked, list(zip(queries, documents, strict=True)), "text_2")
    answer: embeddings.ScoreList = {
        "id": f"score-{os.urandom(16).hex()}",
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)],
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }
    return json_response(answer, headers)


async def create_ranking(request: Request) -> Response:
    """Rank documents for a query."""
    asked, headers = await read_body(request, embeddings.RerankRequest)
    most = len(asked.documents) if asked.top_n is None else require_integer("top_n", asked.top_n, 1)
    pairs = [(asked.query, document) for document in asked.documents]
    model, scores, num_tokens = await _scored(request, asked, pairs, "documents")
    results: list[embeddings.Ranked] = [
        {"index": index, "relevance_score": score} for index, score in enumerate(scores)
    ]
    if asked.return_documents is not False:
        for one in results:
            one["document"] = {"text": asked.documents[one["index"]]}
    results.sort(key=lambda one: -one["relevance_score"])
    answer: embeddings.Ranking = {
        "id": f"rerank-{os.urandom(16).hex()}",
        "model": model,
        "results": results[:most],
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }
    return json_response(answer, headers)


async def _scored(
    request: Request,
    asked: embeddings.ScoreRequest | embeddings.RerankRequest,
    pairs: Sequence[tuple[str, str]],
    field: str,
) -> tuple[str, list[float], int]:
    """The model's name, the scores of (query, document) pairs, and how many tokens these had. Raises as `job_of`."""
    served = served_by(request)
    model = served.models.check(asked.model)
    check_priority(served, asked.priority)
    allowed = f"1 to {MAX_INPUTS} texts"
    require(0 < len(pairs) <= MAX_INPUTS, field, f"{len(pairs)} texts", allowed)
    with by_names({"prompt": field, "prompt_token_ids": field}):
        check_texts(served, [query + document for query, document in pairs])
        params = [answer_params(served.tokenizer.encode(one, add_special_tokens=False), one) for one in ANSWERS]
        chat = ChatRequest(messages=[], chat_template_kwargs=TEMPLATE_VARIABLES)
        prompts = [await chat_prompt(served, chat, judgement(*pair, asked.instruction)) for pair in pairs]
        yes, no = [await prepare_all(request, prompts, one, model=model, priority=asked.priority) for one in params]
    most = places_side_by_side(request, len(pairs))
    scores = await all_of([_score(served, *two) for two in zip(yes, no, strict=True)], most)
    return model, scores, sum(len(one.prompt_token_ids) for one in yes)


async def _score(served: AppState, yes: EngineRequest, no: EngineRequest) -> float:
    return score_of(await output_of(served, yes, "score-"), await output_of(served, no, "score-"))


ROUTES = (
    Route("/v1/embeddings", create_embeddings, embeddings.EmbeddingRequest, embeddings.EmbeddingList),
    Route("/v1/score", create_scores, embeddings.ScoreRequest, embeddings.ScoreList),
    Route("/score", create_scores, embeddings.ScoreRequest, embeddings.ScoreList),
    Route("/v1/rerank", create_ranking, embeddings.RerankRequest, embeddings.Ranking),
    Route("/rerank", create_ranking, embeddings.RerankRequest, embeddings.Ranking),
)
