"""The pages of the server, of tools and of other interfaces: commands are answered, programs run, tables are whole."""

import json

import httpx
import pytest
from demo_server import InHermesFormat, call_at_once, serving_demo
from page_programs import DOCS, curls, program_with, run_program

from d3engine import AsyncEngine

PAGE = (DOCS / "reference" / "server.md").read_text()
OF_SERVER = [words for words in curls("reference/server.md") if "/v1/" in words[1] or "tokenize" in words[1]]
OF_OTHERS = [
    words for page in ("how-to/embeddings.md", "how-to/from-ollama.md", "tutorials/serve.md") for words in curls(page)
]


def test_the_pages_have_a_command_for_each_route() -> None:
    from d3engine.server.app import ROUTES

    paths = {httpx.URL(address).path for _, address, *_ in OF_SERVER + OF_OTHERS}
    expected = {"/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/models", "/tokenize", "/detokenize"}
    assert expected | {"/v1/embeddings", "/v1/rerank", "/api/generate", "/completion"} <= paths
    assert [route.path for route in ROUTES if f"`{route.path.replace('name:path', 'id')}`" not in PAGE] == []


@pytest.mark.parametrize("command", OF_SERVER + OF_OTHERS, ids=lambda words: words[1])
def test_a_command_of_a_page_is_answered(http: httpx.Client, command: list[str]) -> None:
    _, address, *words = command
    path = httpx.URL(address).path
    options = dict(zip(words[::2], words[1::2], strict=True))
    headers = dict(word.split(": ") for flag, word in zip(words[::2], words[1::2], strict=True) if flag == "-H")
    if "-d" in options:
        answer = http.post(path, content=options["-d"], headers=headers)
        assert json.loads(options["-d"])
    else:
        answer = http.get(path)
    if path == "/v1/rerank":  # the bundled model has no token for "yes"
        assert "single token for 'yes'" in answer.text
        return
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


def test_the_pages_first_program_prints_what_it_says(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    program = program_with("serve", {"http://127.0.0.1:8000": url}, page="reference/server.md")
    shown = run_program(program, 3, capsys)
    assert shown.endswith("#### 10")  # the stream's, which prints no line's end


def test_the_tutorials_program_streams_an_answer(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With the bundled model in place of the one that it names."""
    named = {"http://127.0.0.1:8000": url, "qwen2.5-coder-0.5b": "demo"}
    assert run_program(program_with("serve", named, page="tutorials/serve.md"), 0, capsys).strip()


def test_tools_page_program_calls_and_sends_the_result_back(
    client: AsyncEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The program of the page of tools calls, and sends the result back."""
    call_at_once(monkeypatch, several=False)
    with serving_demo(InHermesFormat(client)) as url:
        program = program_with("serve", {"http://127.0.0.1:8000": url}, page="how-to/tools.md")
        assert run_program(program, 1, capsys).split() == ["tool_calls", "3"]


def test_the_program_with_ollamas_client_prints_what_it_says(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ollama", reason="ollama is not installed: make test-with-clients does it")
    program = program_with("ollama", {"http://127.0.0.1:11434": url}, page="how-to/from-ollama.md")
    assert run_program(program, 2, capsys).strip()
