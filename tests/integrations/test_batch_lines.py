"""A line of a batch is a request, or says why it is none; it is known by its name and by what stands in it."""

import json
from pathlib import Path
from typing import Any

import pytest

from d3engine import InvalidValueError
from d3engine.integrations import batch_file as lines
from d3engine.integrations.batch_file import Line, line_of, read_lines

GOOD: dict[str, Any] = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}


def of(**changes: Any) -> Line:
    return line_of(1, json.dumps(GOOD | changes).encode())


def test_a_body_stays_as_it_stands_in_the_file() -> None:
    text = b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"seed": 1e3 , "prompt":"\\u00e9"}}'
    line = line_of(7, text)
    assert (line.number, line.custom_id, line.url, line.fault) == (7, "a", "/v1/completions", None)
    assert line.body == b'{"seed": 1e3 , "prompt":"\\u00e9"}'


@pytest.mark.parametrize(
    ("line", "code", "name", "said"),
    [
        (line_of(1, b"{"), "invalid_line", None, "no request"),
        (line_of(1, b"[" * 9999), "invalid_line", None, "no request"),
        (line_of(1, b'"\xff"'), "invalid_line", None, "no request"),
        (line_of(1, b'{"custom_id": "a"}'), "invalid_line", "a", "method"),
        (of(more=1), "invalid_line", "a", "more"),
        (of(body="text"), "invalid_line", "a", "object"),
        (of(custom_id=""), "invalid_custom_id", None, "custom_id must be"),
        (of(custom_id=5), "invalid_line", None, "custom_id"),
        (of(method="GET"), "invalid_method", "a", "method must be POST; got 'GET'."),
        (of(url="/v1/embeddings"), "invalid_url", "a", "url must be one of /v1/completions"),
        (of(body={"stream": True}), "unsupported_parameter", "a", "stream must be absent or false"),
    ],
)
def test_what_cannot_be_run_says_why_under_its_name(line: Line, code: str, name: str | None, said: str) -> None:
    assert line.fault is not None
    assert (line.fault.code, line.custom_id) == (code, name)
    assert said in line.fault.message


def test_lines_are_told_apart_by_what_stands_in_them() -> None:
    assert of().id == of().id
    assert of().id != of(body={"prompt": "y"}).id
    assert line_of(1, b"{").id != line_of(2, b"{").id  # both have no name


def test_empty_lines_count_without_requests_and_last_is_open(tmp_path: Path) -> None:
    """Empty lines count and are no requests, and a last line needs no end."""
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n  \r\n" + json.dumps(GOOD).encode() + b"\r\n\n" + json.dumps(GOOD).encode())
    assert [line.number for line in read_lines(path)] == [3, 5]


def test_line_too_long_for_memory_fails_and_the_next_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line too long for memory is at fault, and the next is read."""
    monkeypatch.setattr(lines, "LONGEST_LINE", 100)
    path = tmp_path / "in.jsonl"
    good = json.dumps(GOOD).encode()
    path.write_bytes(b"x" * 101 + b"\n" + good + b"\n" + b"x" * 1000 + b"\n" + good + b"\n" + b"x" * 250)
    found = list(read_lines(path))
    assert [line.number for line in found] == [1, 2, 3, 4, 5]
    assert [line.fault and line.fault.code for line in found] == ["line_too_long", None] * 2 + ["line_too_long"]
    assert len({line.id for line in found}) == 4  # the two that are alike are known by their names


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match="IN must be a file that can be read"):
        list(read_lines(tmp_path))
