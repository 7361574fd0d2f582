"""docs/reference/server.md says what the server does: its commands run, and its tables have every field."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import httpx
import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "server.md").read_text()
SHELL = re.compile(r"```sh\n(.*?)```", re.DOTALL)
CURLS = [
    line
    for block in SHELL.findall(PAGE)
    for line in block.replace("\\\n", "").splitlines()
    if line.startswith("curl ") and ("/v1/" in line or "tokenize" in line)
]


def test_the_page_has_a_command_for_each_route() -> None:
    from d3engine.server.app import ROUTES

    paths = {httpx.URL(shlex.split(line)[1]).path for line in CURLS}
    expected = {"/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/models", "/tokenize", "/detokenize"}
    assert expected <= paths
    assert [route.path for route in ROUTES if f"`{route.path.replace('name:path', 'id')}`" not in PAGE] == []


@pytest.mark.parametrize("line", CURLS)
def test_a_command_of_the_page_is_answered(http: httpx.Client, line: str) -> None:
    _, address, *words = shlex.split(line)
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
