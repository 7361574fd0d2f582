"""POST /v1/embeddings, as OpenAI's client asks for it."""

import asyncio
import base64
import json
from typing import Any

import httpx
import numpy as np
import pytest

from d3engine import Engine
from d3engine.errors import FailedError
from d3engine.server.routes.embeddings import all_of

TEXTS = ["Tom has 5 pens.", "Ann has 3 cats and a dog.", "How many?"]


def test_the_official_client_gets_the_engines_embeddings(openai: Any, demo: Engine) -> None:
    expected = demo.embed(TEXTS, use_tqdm=False)
    found = openai.embeddings.create(model="demo", input=TEXTS)  # asks for base64
    assert [one.index for one in found.data] == [0, 1, 2]
    assert np.array_equal(np.array([one.embedding for one in found.data], np.float32), expected)
    assert (
        found.usage.prompt_tokens == found.usage.total_tokens == sum(len(demo.get_tokenizer().encode(t)) for t in TEXTS)
    )
    as_floats = openai.embeddings.create(model="demo", input=TEXTS[0], encoding_format="float")
    assert np.array_equal(np.array(as_floats.data[0].embedding, np.float32), expected[0])


def test_token_ids_cut_vectors_and_poolings(openai: Any, demo: Engine) -> None:
    ids = [demo.get_tokenizer().encode(text) for text in TEXTS]
    expected = demo.embed(TEXTS, pooling="last", dimensions=7, normalize=False, use_tqdm=False)
    more = {"extra_body": {"pooling": "last", "normalize": False}}
    for given in (ids, ids[0]):
        found = openai.embeddings.create(model="demo", input=given, dimensions=7, **more)
        assert np.array_equal(np.array([one.embedding for one in found.data], np.float32), expected[: len(found.data)])


def test_more_inputs_than_there_are_places(http: httpx.Client, demo: Engine) -> None:
    texts = [f"Tom has {number} pens." for number in range(700)]
    data = http.post("/v1/embeddings", json={"input": texts, "encoding_format": "base64"}).json()["data"]
    found = np.array([np.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in data])
    assert np.array_equal(found[::100], demo.embed(texts[::100], use_tqdm=False))


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        ({"input": []}, "input", "at least one prompt"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format", '"float" or "base64"; got \'int8\''),
        ({"input": "x", "dimensions": 0}, "dimensions", "at least 1; got 0"),
        ({"input": "x", "dimensions": 100_000}, "dimensions", "the model's own; got 100000"),
        ({"input": "x", "pooling": "max"}, "pooling", "mean or last or cls; got 'max'"),
        ({"input": [1, 10**9]}, "input", "rows of the embedding; got 1000000000"),
        ({"input": "x", "temperature": 0.5}, "temperature", "this route does not have it"),
        ({"input": ["x"] * 2049}, "input", "of at most 2048 prompts"),
        ({"input": "pen " * 100_000}, "input", "max_model_len"),
        ({"input": "x", "model": "other"}, "model", "does not exist"),
    ],
)
def test_what_cannot_be_embedded_is_refused_by_name(refusal: Any, body: Any, field: str, words: str) -> None:
    status, error = refusal("/v1/embeddings", body)
    assert (status, error["param"]) == (404 if field == "model" else 400, field)
    assert words in error["message"]


def test_an_embedding_counts_no_generated_tokens(http: httpx.Client) -> None:
    def metric(name: str) -> float:
        lines = [line for line in http.get("/metrics").text.splitlines() if line.startswith(f"d3engine:{name}")]
        return sum(float(line.split()[-1]) for line in lines)

    generated, prompts = metric("request_generation_tokens_sum"), metric("request_prompt_tokens_sum")
    answer = http.post("/v1/embeddings", json={"input": TEXTS[0]})
    used = answer.json()["usage"]["prompt_tokens"]
    assert metric("request_generation_tokens_sum") == generated
    assert metric("request_prompt_tokens_sum") == prompts + used
    assert json.loads(answer.content)["object"] == "list"


def test_the_first_error_of_several_inputs_is_raised_as_it_is() -> None:
    done: list[int] = []

    async def embed(number: int) -> Any:
        await asyncio.sleep(0)
        if number == 2:
            raise FailedError("broken")
        done.append(number)
        return number

    async def run(numbers: list[int]) -> Any:
        return await all_of([embed(number) for number in numbers], 2)

    assert asyncio.run(run([0, 1, 3, 4])) == [0, 1, 3, 4]
    done.clear()
    with pytest.raises(FailedError, match="broken"):
        asyncio.run(run([0, 1, 2, 3, 4, 5]))
    assert 5 not in done
