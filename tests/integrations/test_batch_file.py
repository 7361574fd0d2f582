"""A line of a batch is a request, or says why it is none; it is known by its name and by what stands in it.
The file of results is its own record: what stands in it is not asked again."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from d3engine import InvalidValueError
from d3engine.integrations import batch_file as lines
from d3engine.integrations.batch_file import Line, Result, Results, line_of, open_results, read_lines

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
    plain = path.read_bytes().lstrip()
    path.write_bytes(b"\xef\xbb\xbf" + plain)
    assert [(line.fault, line.id) for line in read_lines(path)] == [(None, of().id)] * 2


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


def line(name: str, prompt: str = "x") -> Line:
    return of(custom_id=name, body={"prompt": prompt})


BAD = line_of(4, b"no JSON")
ANSWERED = Result(line("a"), 200, "id-1", b'{"text": "caf\xc3\xa9"}')
REFUSED = Result(line("b"), 400, "id-2", b'{"error": {"message": "no"}}')


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


@pytest.fixture
def begun(path: Path) -> Path:
    with open_results(path) as results:
        for result in (ANSWERED, REFUSED, Result(BAD)):
            results.add(result)
    return path


def test_results_are_written_as_openai_has_them(begun: Path) -> None:
    answered, refused, bad = map(json.loads, begun.read_text("utf-8").splitlines())
    assert answered == {
        "id": ANSWERED.line.id,
        "custom_id": "a",
        "response": {"status_code": 200, "request_id": "id-1", "body": {"text": "café"}},
        "error": None,
    }
    assert refused["response"]["body"] == {"error": {"message": "no"}}
    assert (bad["custom_id"], bad["response"], bad["error"]["code"]) == (None, None, "invalid_line")


def test_result_in_the_file_is_there_and_any_other_is_missing(begun: Path) -> None:
    """A result that stands in the file is there, and any other is missing."""
    with open_results(begun) as results:
        assert all(results.has(given) for given in (line("a"), line("b"), BAD))
        assert not results.has(line("c"))
        assert not results.has(line_of(5, b"no JSON"))
        results.add(Result(line("c"), 200, "id-3", b"{}"))
    assert len(begun.read_text().splitlines()) == 4


@pytest.mark.parametrize("kept", [1, 10, 30, -1])
def test_a_torn_last_line_is_missing_and_written_anew(begun: Path, kept: int) -> None:
    whole = begun.read_bytes()
    first = whole.index(b"\n") + 1
    begun.write_bytes(whole[:first] + whole[first : whole.index(b"\n", first)][:kept])
    with open_results(begun) as results:
        assert results.has(line("a"))
        assert not results.has(line("b"))
        results.add(REFUSED)
        results.add(Result(BAD))
    assert begun.read_bytes() == whole


@pytest.mark.parametrize(
    "content", ["a letter", "a letter\nof mine\n", '{"id": 5}\n', '{"id":"other","custom_id":"a"}\n']
)
def test_a_file_of_anything_else_is_refused_and_stays_as_it_is(path: Path, content: str) -> None:
    path.write_text(content)
    with pytest.raises(InvalidValueError, match="OUT must be a new file"), open_results(path):
        pass
    assert path.read_text() == content


def test_results_of_another_batch_show_by_an_equal_name(begun: Path) -> None:
    """Results of another batch show by an equal name of another line."""
    with open_results(begun) as results, pytest.raises(InvalidValueError, match="it answers another line 'a'"):
        results.has(line("a", "another prompt"))


def test_nobody_else_writes_to_it_at_the_same_time(path: Path) -> None:
    second = pytest.raises(InvalidValueError, match="no other batch is writing to")
    with open_results(path), second, open_results(path):
        pass


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match="OUT must be a file that can be written"), open_results(tmp_path):
        pass


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_named_by_the_file_of_results() -> None:
    results = Results(Path("out.jsonl"), open("/dev/full", "r+b"))  # noqa: SIM115  # its end fails too
    with pytest.raises(OSError, match="No space") as caught:
        results.add(ANSWERED)
    assert caught.value.filename == "out.jsonl"
    with pytest.raises(OSError, match="No space"):
        results._file.close()


FULL = """
import resource
from pathlib import *
from d3engine.integrations.batch_file import line_of
from d3engine.integrations.batch_file import Result, open_results
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    with open_results(PATH) as results:
        asked = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}'
        results.add(Result(line_of(1, asked), 200, "id", b"1" * 2000))
except OSError as error:
    print(error.filename)
"""


def test_what_is_left_to_write_at_the_end_is_named_by_it_too(path: Path) -> None:
    code = FULL.replace("PATH", repr(path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{path}\n"


@pytest.mark.parametrize("device", ["/dev/null", "/dev/full", "/dev/zero"])
def test_a_device_is_no_file_of_results(device: str) -> None:
    with pytest.raises(InvalidValueError, match="OUT must be a regular file"), open_results(Path(device)):
        pass
