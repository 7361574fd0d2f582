"""An app that brings its own engine: nothing is loaded before its lifespan begins, and nothing is left after it."""

import httpx
import pytest
from contract import ANSWERED, BEHIND, OverOpenAI
from loops import on_a_loop
from serving import serving
from starlette.applications import Starlette
from starlette.routing import Mount

from d3engine import InvalidValueError, RequestOutput


def test_mounted_below_a_path_it_answers_and_knows_its_routes(wanted: list[RequestOutput]) -> None:
    from d3engine.integrations.asgi import asgi_app

    app = asgi_app("demo", **BEHIND)
    outer = Starlette(routes=[Mount("/below", app)], lifespan=app.router.lifespan_context)
    with serving(outer, lifespan="on") as url:
        stack = OverOpenAI(url, completions="/below/v1/completions", metrics="/below/metrics")
        assert stack.answer(ANSWERED[1]) == wanted[1].outputs[0].text
        assert stack.figures().generated_tokens == len(wanted[1].outputs[0].token_ids)
        with httpx.Client(base_url=f"{url}/below", headers={"Host": "a.name.of.somebodys"}) as http:
            assert http.get("/v1/models").json()["data"][0]["id"] == "demo"
            assert http.get("/nothing").json()["error"]["message"] == "There is nothing at '/nothing'."
            refused = http.post("/v1/messages", json={}).json()
            assert refused["type"] == "error"  # as Anthropic's clients expect it, who are told apart by their path


@on_a_loop
async def test_its_engine_comes_and_goes_with_its_lifespan() -> None:
    from d3engine.integrations.asgi import asgi_app

    missing = asgi_app("/no/such/model")  # which is said when it is wanted
    with pytest.raises(InvalidValueError, match="no/such/model"):
        async with missing.router.lifespan_context(missing):
            raise AssertionError("there is no model")
    app = asgi_app("demo", **BEHIND)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://d3") as http:
        with pytest.raises(RuntimeError, match="lifespan has not begun"):
            await http.get("/v1/models")
        async with app.router.lifespan_context(app):
            assert (await http.get("/health")).json() == {"status": "ok"}
        with pytest.raises(RuntimeError, match="lifespan has not begun"):
            await http.get("/v1/models")
