"""What the pages of embeddings and of Ollama's and llama.cpp's APIs send, the server answers."""

import json

import httpx
import pytest
from page_programs import curls, program_with, run_program

PAGES = ("how-to/embeddings.md", "how-to/from-ollama.md")


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_the_page_are_answered(http: httpx.Client, page: str) -> None:
    commands = curls(page)
    assert commands
    for _, address, header, kind, data, body in commands:
        assert (header, kind, data) == ("-H", "Content-Type: application/json", "-d")
        answer = http.post(httpx.URL(address).path, json=json.loads(body))
        if address.endswith("/rerank"):  # the bundled model has no token for "yes"
            assert "single token for 'yes'" in answer.text
            continue
        assert answer.status_code == 200, answer.text
        assert "X-D3-Ignored-Fields" not in answer.headers


def test_the_program_with_ollamas_client_prints_what_it_says(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ollama", reason="ollama is not installed: make test-with-clients does it")
    program = program_with("ollama", {"http://127.0.0.1:11434": url}, page="how-to/from-ollama.md")
    assert run_program(program, 2, capsys).strip()
