"""Bodies: counted in bytes before and while they come, JSON by their type, bounded in depth, in digits and in time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from guarded_apps import JSON, GuardedApp
from hypothesis import given, settings
from hypothesis import strategies as st

from d3engine.server.errors import RequestError
from d3engine.server.guards.json_bounds import MAX_DEPTH, MAX_DIGITS, _without_strings, check_json_bounds, nesting
from d3engine.server.guards.settings import GuardSettings

SMALL = GuardSettings(max_body_bytes=2048)


@pytest.fixture(scope="module")
def app() -> GuardedApp:
    return GuardedApp(SMALL)


def test_a_body_reaches_its_route_whole_in_however_many_pieces_it_came(app: GuardedApp) -> None:
    text = json.dumps({"prompt": "größer " * 50}).encode()
    for size in (1, 7, 4096):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert json.loads(app.call("POST", "/echo", JSON, pieces).body) == json.loads(text)


def test_a_body_of_just_the_allowed_length_is_read(app: GuardedApp) -> None:
    text = json.dumps("x" * 2046).encode()
    assert app.call("POST", "/echo", JSON | {"Content-Length": "2048"}, [text]).status == 200


async def _never() -> AsyncIterator[bytes]:
    raise AssertionError("the body was read")
    yield b""


@pytest.mark.parametrize("length", ["2049", "9" * 30])
def test_a_length_that_is_too_much_is_refused_unread(app: GuardedApp, length: str) -> None:
    """Row 15 of the security list, by what the head says."""
    answer = app.call("POST", "/echo", JSON | {"Content-Length": length}, _never())
    assert (answer.status, answer.code) == (413, "body_too_long")


@pytest.mark.parametrize("length", ["-1", "1e3", "", "0x10", "12 12"])
def test_a_length_that_is_no_number_is_refused(app: GuardedApp, length: str) -> None:
    assert app.call("POST", "/echo", JSON | {"Content-Length": length}, _never()).status == 400


def test_a_body_without_a_length_is_counted_while_it_comes() -> None:
    """Row 15 of the security list, by bytes: no more is taken than is allowed, and one piece."""
    taken = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal taken
        while True:
            taken += 1000
            yield b"\xc3\xa4" * 500  # bytes count, not characters

    answer = GuardedApp(SMALL).call("POST", "/echo", JSON, endless())
    assert (answer.status, answer.code) == (413, "body_too_long")
    assert taken == 3000


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", "json"])
def test_what_a_page_may_send_without_asking_is_not_json(app: GuardedApp, kind: str) -> None:
    answer = app.call("POST", "/echo", {"content-type": kind}, [b"{}"])
    assert (answer.status, answer.code) == (415, "unsupported_media_type")


def test_a_type_may_have_parameters_and_a_packed_body_is_refused(app: GuardedApp) -> None:
    assert app.call("POST", "/echo", {"content-type": "Application/JSON; charset=utf-8"}, [b"{}"]).status == 200
    assert app.call("POST", "/echo", JSON | {"content-encoding": "gzip"}, [b"{}"]).status == 415


def test_a_body_that_does_not_come_is_not_waited_for_for_ever() -> None:
    async def half() -> AsyncIterator[bytes]:
        yield b'{"prompt": '
        await asyncio.Event().wait()

    answer = GuardedApp(GuardSettings(body_timeout=0.01)).call("POST", "/echo", JSON, half())
    assert (answer.status, answer.code) == (408, "body_timeout")


def test_a_client_that_leaves_within_its_body_is_not_answered_and_runs_nothing() -> None:
    app = GuardedApp(SMALL)
    assert app.call("POST", "/echo", JSON, []).messages == []
    assert app.exchanges[0].status == 499
    assert app.traffic.taken == 0


# -- JSON ------------------------------------------------------------------------------------------------------------


def nested(depth: int) -> bytes:
    return b'{"a":[' * (depth // 2) + b"]}" * (depth // 2)


@pytest.mark.parametrize("text", [nested(MAX_DEPTH), b"[" * MAX_DEPTH, b'"' + b"[" * 999 + b'"', b"[],{}," * 5000])
def test_what_nests_within_bounds_passes(text: bytes) -> None:
    check_json_bounds(text)


@pytest.mark.parametrize(
    "text",
    [
        nested(MAX_DEPTH + 2),
        b"[" * (MAX_DEPTH + 1),
        b'{"\\"":' * (MAX_DEPTH + 1),
        b'"a\\\\",' + b"[" * (MAX_DEPTH + 1),
        b"]" * 10 + b"[" * (MAX_DEPTH + 11),
        b"[" * 1_000_000,
    ],
)
def test_what_nests_deeper_is_refused_before_a_parser_sees_it(text: bytes) -> None:
    with pytest.raises(RequestError, match="nests deeper than 64"):
        check_json_bounds(text)


def test_a_number_is_as_long_as_a_number_needs_to_be() -> None:
    check_json_bounds(b'{"seed": 18446744073709551615, "a": "%s"}' % (b"9" * 5000))
    check_json_bounds(b"0." + b"1" * MAX_DIGITS)
    with pytest.raises(RequestError, match="more than 64 digits"):
        check_json_bounds(b'{"seed": %s}' % (b"9" * (MAX_DIGITS + 1)))


def nesting_by_the_letter(text: str) -> int:
    """The most brackets open at once, character by character."""
    depth = most = 0
    is_string = is_escaped = False
    for character in text:
        if is_string:
            if character == '"' and not is_escaped:
                is_string = False
            is_escaped = character == "\\" and not is_escaped
        elif character == '"':
            is_string, is_escaped = True, False
        else:
            depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(character, 0)
            most = max(most, depth)
    return most


PIECES = st.sampled_from(["[", "{", "]", "}", "9", '"a[\\\\"', '"\\"{"', '"[\\\\\\"]"', '"\\u005b"'])


@settings(max_examples=50)
@given(st.lists(PIECES), st.sampled_from(["", '"[[', '"[\\']))
def test_brackets_in_strings_do_not_count_however_their_quotes_are_escaped(pieces: list[str], end: str) -> None:
    text = "".join(pieces) + end
    assert nesting(_without_strings(text.encode())) == nesting_by_the_letter(text)


@pytest.mark.parametrize("piece", [b'\\"', b'"', b"\\", b"[]", b"9 ", b"\x00\xff"])
def test_hostile_text_of_megabytes_is_done_with(piece: bytes) -> None:
    """Work that grew with the square of the length would not end before the test run does."""
    check_json_bounds(b'"' + piece * 1_000_000)


def test_the_answer_to_such_a_body_names_what_is_wrong(app: GuardedApp) -> None:
    answer = app.call("POST", "/echo", JSON, [b"[" * 100])
    assert (answer.status, answer.code) == (400, "json_out_of_bounds")
