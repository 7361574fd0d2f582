"""An app that brings its own engine, and sampling parameters out of JSON.
Nothing is loaded before the app's lifespan begins, and nothing is left after it. Of parameters what is honoured is what
is asked, and everything else is refused by its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from contract import ANSWERED, BEHIND, OverOpenAI
from loops import on_a_loop
from serving import serving
from starlette.applications import Starlette
from starlette.routing import Mount

from d3engine import FullDepth, InvalidValueError, RequestOutput, RequestOutputKind, TailSkip

if TYPE_CHECKING:
    from d3engine import AsyncEngine, Engine
    from d3engine.integrations.asgi import FieldReader


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


@pytest.fixture
def reader(make_engine: Callable[..., Engine]) -> FieldReader:
    from d3engine.integrations.asgi import FieldReader
    from d3engine.server.settings import ServerSettings

    engine: Any = make_engine()
    client: AsyncEngine = engine  # of which it asks for defaults and depth alone
    settings = ServerSettings(model_names=("m",), depth_aliases={"deep": FullDepth(), "tail": TailSkip(4.5, 16)})
    return FieldReader(client, settings)


def test_null_says_nothing_and_a_form_and_an_alias_are_read(reader: FieldReader) -> None:
    form = {"choice": ["a", "b"], "json": None, "backend": None}
    given = {"temperature": 0, "seed": None, "depth": "tail", "structured_outputs": form}
    params = reader.params(given, RequestOutputKind.DELTA)
    assert (params.temperature, params.seed, params.depth) == (0, None, TailSkip(4.5, 16))
    assert params.structured_outputs is not None
    assert params.structured_outputs.choice == ("a", "b")
    assert params.output_kind is RequestOutputKind.DELTA


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"frog": 1}, "frog must be absent"),
        ({"output_kind": 1}, "output_kind must be absent"),
        ({"depth": 3}, "depth must be a name"),
        ({"depth": {"policy": "speculative", "draft_model": "/etc"}}, "depth must be one that is allowed"),
        ({"structured_outputs": {"backend": "own"}}, "structured_outputs.backend must be absent"),
        ([], "sampling parameters must be an object"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_name(reader: FieldReader, given: Any, named: str) -> None:
    with pytest.raises(InvalidValueError, match=named):
        reader.params(given, RequestOutputKind.DELTA)
