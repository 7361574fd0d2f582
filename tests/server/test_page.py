"""docs/reference/server.md says what the server does: its commands run, and its tables have every field."""

import json

import httpx
import pytest
from page_programs import DOCS, curls

PAGE = (DOCS / "reference" / "server.md").read_text()
CURLS = [words for words in curls("reference/server.md") if "/v1/" in words[1] or "tokenize" in words[1]]


def test_the_page_has_a_command_for_each_route() -> None:
    from d3engine.server.app import ROUTES

    paths = {httpx.URL(address).path for _, address, *_ in CURLS}
    expected = {"/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/models", "/tokenize", "/detokenize"}
    assert expected <= paths
    assert [route.path for route in ROUTES if f"`{route.path.replace('name:path', 'id')}`" not in PAGE] == []


@pytest.mark.parametrize("command", CURLS, ids=lambda words: words[1])
def test_a_command_of_the_page_is_answered(http: httpx.Client, command: list[str]) -> None:
    _, address, *words = command
    path = httpx.URL(address).path
    options = dict(zip(words[::2], words[1::2], strict=True))
    headers = dict(word.split(": ") for flag, word in zip(words[::2], words[1::2], strict=True) if flag == "-H")
    if "-d" in options:
        answer = http.post(path, content=options["-d"], headers=headers)
        assert json.loads(options["-d"])
    else:
        answer = http.get(path)
    assert answer.status_code == 200, answer.text
    assert "x-d3-ignored-fields" not in answer.headers
    assert answer.content


def test_server_page_lists_every_field() -> None:
    """The page has every field that is honoured, refused or taken."""
    from d3engine.server.requests.refused import ANTHROPICS_ASK_NOTHING, ASK_NOTHING, refused_of
    from d3engine.server.schemas.messages import CountTokensRequest, MessagesRequest
    from d3engine.server.schemas.requests import ChatRequest, CompletionRequest, StreamOptions
    from d3engine.server.schemas.responses import ResponsesRequest
    from tools.docs_reference import on_page_markdown

    shapes = (CountTokensRequest, MessagesRequest, ResponsesRequest, ChatRequest, CompletionRequest, StreamOptions)
    honoured = {name for shape in shapes for name in shape.__struct_fields__}
    assert sorted(name for name in honoured if f"`{name}`" not in PAGE) == []
    others = {*ASK_NOTHING, *ANTHROPICS_ASK_NOTHING, *(name for shape in shapes for name in refused_of(shape))}
    site = on_page_markdown(PAGE)
    assert sorted(name for name in others if f"`{name}`" not in site) == []
