"""The programs with which the pages of serving and of tools begin."""

import pytest
from demo_server import InHermesFormat, call_at_once, serving_demo
from page_programs import program_with, run_program

from d3engine import AsyncEngine


def test_the_pages_first_program_prints_what_it_says(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    program = program_with("serve", {"http://127.0.0.1:8000": url}, page="reference/server.md")
    shown = run_program(program, 3, capsys)
    assert shown.endswith("#### 10")  # the stream's, which prints no line's end


def test_tools_page_program_calls_and_sends_the_result_back(
    client: AsyncEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The program of the page of tools calls, and sends the result back."""
    call_at_once(monkeypatch, several=False)
    with serving_demo(InHermesFormat(client)) as url:
        program = program_with("serve", {"http://127.0.0.1:8000": url}, page="how-to/tools.md")
        assert run_program(program, 1, capsys).split() == ["tool_calls", "3"]
