"""POST /v1/score and /v1/rerank: how well documents answer a query, by the probability of "yes"."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from d3engine.errors import require, require_integer
from d3engine.request.engine_request import EngineRequest
from d3engine.request.scoring import ANSWERS, TEMPLATE_VARIABLES, answer_params, judgement, score_of
from d3engine.server.requests.bodies import check_priority, read_body
from d3engine.server.requests.chat import chat_prompt
from d3engine.server.requests.completions import prepare_all
from d3engine.server.requests.sampling import by_names
from d3engine.server.routes.api import Route
from d3engine.server.routes.embeddings import MAX_INPUTS, all_of, check_texts, output_of, places_side_by_side
from d3engine.server.schemas.requests import ChatRequest
from d3engine.server.schemas.scores import Ranked, Ranking, RerankRequest, ScoreList, ScoreRequest
from d3engine.server.state import AppState, json_response, served_by


async def create_scores(request: Request) -> Response:
    """Score pairs of texts."""
    asked, headers = await read_body(request, ScoreRequest)
    queries, documents = ([one] if isinstance(one, str) else one for one in (asked.text_1, asked.text_2))
    if len(queries) == 1:
        queries = queries * len(documents)
    allowed = f"one text, or as many as text_2 has ({len(documents)})"
    require(len(queries) == len(documents), "text_1", f"{len(queries)} texts", allowed)
    model, scores, num_tokens = await _scored(request, asked, list(zip(queries, documents, strict=True)), "text_2")
    answer: ScoreList = {
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
    asked, headers = await read_body(request, RerankRequest)
    most = len(asked.documents) if asked.top_n is None else require_integer("top_n", asked.top_n, 1)
    pairs = [(asked.query, document) for document in asked.documents]
    model, scores, num_tokens = await _scored(request, asked, pairs, "documents")
    results: list[Ranked] = [{"index": index, "relevance_score": score} for index, score in enumerate(scores)]
    if asked.return_documents is not False:
        for one in results:
            one["document"] = {"text": asked.documents[one["index"]]}
    results.sort(key=lambda one: -one["relevance_score"])
    answer: Ranking = {
        "id": f"rerank-{os.urandom(16).hex()}",
        "model": model,
        "results": results[:most],
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }
    return json_response(answer, headers)


async def _scored(
    request: Request, asked: ScoreRequest | RerankRequest, pairs: Sequence[tuple[str, str]], field: str
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
        limits = {"priority": asked.priority, "max_tokens": None}
        yes, no = [await prepare_all(request, prompts, one, model=model, **limits) for one in params]
    most = places_side_by_side(request, len(pairs))
    scores = await all_of([_score(served, *two) for two in zip(yes, no, strict=True)], most)
    return model, scores, sum(len(one.prompt_token_ids) for one in yes)


async def _score(served: AppState, yes: EngineRequest, no: EngineRequest) -> float:
    return score_of(await output_of(served, yes, "score-"), await output_of(served, no, "score-"))


ROUTES = (
    Route("/v1/score", create_scores, ScoreRequest, ScoreList),
    Route("/score", create_scores, ScoreRequest, ScoreList),
    Route("/v1/rerank", create_ranking, RerankRequest, Ranking),
    Route("/rerank", create_ranking, RerankRequest, Ranking),
)
