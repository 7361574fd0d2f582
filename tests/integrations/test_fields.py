"""Sampling parameters out of JSON: what is honoured is what is asked, and everything else is refused by its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from d3engine import AsyncEngine, Engine
    from d3engine.integrations.asgi import FieldReader


@pytest.fixture
def reader(make_engine: Callable[..., Engine]) -> FieldReader:
    from d3engine.depth import FullDepth, TailSkip
    from d3engine.integrations.asgi import FieldReader
    from d3engine.server.settings import ServerSettings

    engine: Any = make_engine()
    client: AsyncEngine = engine  # of which it asks for defaults and depth alone
    settings = ServerSettings(model_names=("m",), depth_aliases={"deep": FullDepth(), "tail": TailSkip(4.5, 16)})
    return FieldReader(client, settings)


def test_null_says_nothing_and_a_form_and_an_alias_are_read(reader: FieldReader) -> None:
    from d3engine.depth import TailSkip
    from d3engine.request.params import RequestOutputKind

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
    from d3engine.errors import InvalidValueError
    from d3engine.request.params import RequestOutputKind

    with pytest.raises(InvalidValueError, match=named):
        reader.params(given, RequestOutputKind.DELTA)
