"""POST /v1/score and /v1/rerank, over a model for whose "yes" and "no" two of its words stand."""

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from demo_server import TEMPLATE, WithTools, serving_demo

from d3engine import AsyncEngine, Engine, FullDepth, SamplingParams
from d3engine.request.scoring import judgement
from d3engine.server.routes import embeddings as routes

ANSWERS = ("Tom", "pens")
DOCUMENTS = ["Tom has 5 pens.", "Ann has 3 cats.", "How many?"]


@pytest.fixture
def scores(client: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[httpx.Client]:
    monkeypatch.setattr(routes, "ANSWERS", ANSWERS)
    with serving_demo(WithTools(client)) as url, httpx.Client(base_url=url, timeout=60) as found:
        yield found


def expected(demo: Engine, query: str, document: str, instruction: str | None = None) -> float:
    """By all log-probabilities of the next token."""
    prompt = demo.chat_prompt(judgement(query, document, instruction), chat_template=TEMPLATE)
    params = SamplingParams(max_tokens=1, temperature=0, logprobs=-1, depth=FullDepth())
    (entries,) = demo.generate(prompt, params, use_tqdm=False)[0].outputs[0].logprobs or ()
    yes, no = (entries[demo.get_tokenizer().encode(one, add_special_tokens=False)[0]].logprob for one in ANSWERS)
    return float(np.exp(yes) / (np.exp(yes) + np.exp(no)))


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
def test_pairs_of_texts_get_scores(scores: httpx.Client, demo: Engine, path: str) -> None:
    found = scores.post(path, json={"model": "demo", "text_1": "Pens?", "text_2": DOCUMENTS}).json()
    wanted = [expected(demo, "Pens?", document) for document in DOCUMENTS]
    assert [one["score"] for one in found["data"]] == pytest.approx(wanted, abs=1e-5)
    assert [one["index"] for one in found["data"]] == [0, 1, 2]
    assert found["usage"]["prompt_tokens"] == found["usage"]["total_tokens"] > 0
    pairs = scores.post(path, json={"text_1": ["Pens?", "Cats?"], "text_2": DOCUMENTS[:2], "instruction": "Count"})
    wanted = [expected(demo, query, one, "Count") for query, one in zip(["Pens?", "Cats?"], DOCUMENTS, strict=False)]
    assert [one["score"] for one in pairs.json()["data"]] == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank"])
def test_documents_are_ranked_by_their_scores(scores: httpx.Client, demo: Engine, path: str) -> None:
    found = scores.post(path, json={"query": "Pens?", "documents": DOCUMENTS}).json()["results"]
    wanted = {nth: expected(demo, "Pens?", document) for nth, document in enumerate(DOCUMENTS)}
    assert [one["index"] for one in found] == sorted(wanted, key=lambda nth: -wanted[nth])
    assert [one["document"]["text"] for one in found] == [DOCUMENTS[one["index"]] for one in found]
    asked = {"query": "Pens?", "documents": DOCUMENTS, "top_n": 1, "return_documents": False}
    (best,) = scores.post(path, json=asked).json()["results"]
    assert best == {"index": found[0]["index"], "relevance_score": pytest.approx(found[0]["relevance_score"])}


@pytest.mark.parametrize(
    ("path", "body", "field", "words"),
    [
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1", "as many as text_2 has (1); got '2 texts'"),
        ("/v1/score", {"text_1": "a", "text_2": []}, "text_2", "1 to 2048 texts"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "temperature": 1}, "temperature", "this route does not have it"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents", "1 to 2048 texts"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n", "at least 1"),
        ("/v1/rerank", {"query": "a", "documents": ["pen " * 100_000]}, "documents", ""),
        ("/v1/rerank", {"query": "a", "documents": [5]}, "documents", ""),
        ("/v1/rerank", {"documents": ["b"]}, "query", ""),
    ],
)
def test_what_cannot_be_scored_is_refused(scores: httpx.Client, path: str, body: Any, field: str, words: str) -> None:
    answer = scores.post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, field)
    assert words in error["message"]


def test_a_model_without_one_token_for_yes_is_refused(refusal: Any) -> None:
    status, error = refusal("/v1/score", {"text_1": "a", "text_2": "b"})
    assert (status, error["param"]) == (400, "model")
    assert "a single token for 'yes'" in error["message"]
