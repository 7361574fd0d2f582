"""The programs with which the pages of serving and of tools begin."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pytest
from demo_server import InHermesFormat
from page_programs import printed, program_with
from serving import serving

if TYPE_CHECKING:
    from d3engine import AsyncEngine


def test_the_pages_first_program_prints_what_it_says(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    program = program_with("serve", {"http://127.0.0.1:8000": url}, page="reference/server.md")
    exec(compile(program, "server.md", "exec", dont_inherit=True), {})
    shown = capsys.readouterr().out
    said = printed(program)
    assert len(said) == 3
    for pattern in said:
        assert pattern.search(shown), shown
    assert shown.endswith("#### 10")  # the stream's, which prints no line's end


def test_tools_page_program_calls_and_sends_the_result_back(
    client: AsyncEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The program of the page of tools calls, and sends the result back."""
    from d3engine.server.app import create_app
    from d3engine.server.requests.formats import ToolFormat
    from d3engine.server.settings import ServerSettings

    made = ToolFormat.grammar  # the bundled model calls nothing of itself
    monkeypatch.setattr(
        ToolFormat, "grammar", lambda own, asked: made(own, replace(asked, is_auto=False, several=False))
    )
    with serving(create_app(cast(Any, InHermesFormat(client)), ServerSettings(model_names=("demo",)))) as url:
        program = program_with("serve", {"http://127.0.0.1:8000": url}, page="how-to/tools.md")
        exec(compile(program, "tools.md", "exec", dont_inherit=True), {})
    (said,) = printed(program)
    assert said.search(capsys.readouterr().out)
