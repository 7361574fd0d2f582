"""The program with which the page of serving begins."""

from __future__ import annotations

import pytest
from page_programs import printed, program_with


def test_the_pages_first_program_prints_what_it_says(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    program = program_with("serve", {"http://127.0.0.1:8000": url}, page="serving.md")
    exec(compile(program, "serving.md", "exec", dont_inherit=True), {})
    shown = capsys.readouterr().out
    said = printed(program)
    assert len(said) == 3
    for pattern in said:
        assert pattern.search(shown), shown
    assert shown.endswith("#### 10")  # the stream's, which prints no line's end
