"""Bodies: counted in bytes before and while they come, JSON by their type, bounded in depth, in digits and in time."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from guarded_apps import JSON, GuardedApp
from hypothesis import given, settings
from hypothesis import strategies as st
from loops import on_a_loop

from d3engine.server.errors import RequestError
from d3engine.server.middleware.bodies import (
    MAX_CONTAINERS,
    MAX_DEPTH,
    MAX_DIGITS,
    MAX_MEMBERS,
    MAX_VALUES,
    SLICE_BYTES,
    JsonBounds,
    is_within_bounds,
)
from d3engine.server.middleware.settings import GuardSettings

SMALL = GuardSettings(max_body_bytes=2048)


def check_json_bounds(text: bytes) -> None:
    for _ in JsonBounds().read(text):
        pass


@pytest.fixture(scope="module")
def app() -> GuardedApp:
    return GuardedApp(SMALL)


def test_body_reaches_its_route_whole_in_any_chunks(app: GuardedApp) -> None:
    """A body reaches its route whole, in however many chunks it comes."""
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


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({"Content-Length": "2049"}, 413, "body_too_long"),
        ({"Content-Length": "9" * 30}, 413, "body_too_long"),
        *(({"Content-Length": no}, 400, "invalid_content_length") for no in ("-1", "1e3", "", "0x10", "12 12")),
        ({"Transfer-Encoding": "gzip, chunked"}, 501, "invalid_framing"),
        ({"Transfer-Encoding": "chunked, identity"}, 400, "invalid_framing"),
        ({"Transfer-Encoding": "chunked", "Content-Length": "2"}, 400, "invalid_framing"),
    ],
)
def test_body_that_its_head_forbids_is_refused_unread(
    app: GuardedApp, headers: dict[str, str], status: int, code: str
) -> None:
    """A body that is too long, or of no length or coding that is read, is refused behind any server."""
    # Row 15 of the security list, by what the head says.
    answer = app.call("POST", "/echo", JSON | headers, _never())
    assert (answer.status, answer.code) == (status, code)


@pytest.mark.parametrize("coding", ["chunked", "Chunked "])
def test_a_chunked_body_is_read(app: GuardedApp, coding: str) -> None:
    assert app.call("POST", "/echo", JSON | {"Transfer-Encoding": coding}, [b"1"]).status == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", "json"])
def test_what_a_page_may_send_without_asking_is_not_json(app: GuardedApp, kind: str) -> None:
    answer = app.call("POST", "/echo", {"content-type": kind}, [b"{}"])
    assert (answer.status, answer.code) == (415, "unsupported_media_type")


def test_a_type_may_have_parameters_and_a_packed_body_is_refused(app: GuardedApp) -> None:
    assert app.call("POST", "/echo", {"content-type": "Application/JSON; charset=utf-8"}, [b"{}"]).status == 200
    assert app.call("POST", "/echo", JSON | {"content-encoding": "gzip"}, [b"{}"]).status == 415


@pytest.mark.parametrize("method", ["PUT", "PATCH", "DELETE", "GET"])
def test_method_that_no_route_has_is_refused_unread(app: GuardedApp, method: str) -> None:
    """A method that no route has is refused as such, and its body is not read."""
    assert app.call(method, "/echo", {"content-type": "text/plain"}, _never()).status == 405


def test_a_body_that_does_not_come_is_not_waited_for_for_ever() -> None:
    async def half() -> AsyncIterator[bytes]:
        yield b'{"prompt": '
        await asyncio.Event().wait()

    answer = GuardedApp(GuardSettings(body_timeout=0.01)).call("POST", "/echo", JSON, half())
    assert (answer.status, answer.code) == (408, "body_timeout")


def test_client_that_leaves_within_its_body_runs_nothing() -> None:
    """A client that leaves within its body gets no answer, and runs nothing."""
    app = GuardedApp(SMALL)
    assert app.call("POST", "/echo", JSON, []).messages == []
    assert app.exchanges[0].status == 499
    assert app.traffic.taken == 0


# -- JSON ------------------------------------------------------------------------------------------------------------


def nested(depth: int) -> bytes:
    return b'{"a":[' * (depth // 2) + b"]}" * (depth // 2)


SHALLOW = [nested(MAX_DEPTH), b"[" * MAX_DEPTH, b'"' + b"[" * 999 + b'"', b"[],{}," * 5000]
SHORT_NUMBERS = [b'{"seed": 18446744073709551615, "a": "%s"}' % (b"9" * 5000), b"0." + b"1" * MAX_DIGITS]


@pytest.mark.parametrize("text", SHALLOW + SHORT_NUMBERS)
def test_what_is_within_bounds_passes(text: bytes) -> None:
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
        b'{"seed": %s}' % (b"9" * (MAX_DIGITS + 1)),
    ],
)
def test_what_is_out_of_bounds_is_refused_before_a_parser(text: bytes) -> None:
    """What nests too deep, and a number that is too long, is refused before a parser sees it."""
    with pytest.raises(RequestError, match="more than 64 digits" if b"seed" in text else "nests deeper than 64"):
        check_json_bounds(text)


@pytest.mark.parametrize(
    ("text", "is_plain"),
    [
        *((plain, True) for plain in (nested(MAX_DEPTH), b'{"a": "%s"}' % (b"x" * 5000), b"9" * MAX_DIGITS)),
        *((other, False) for other in (nested(MAX_DEPTH + 2), b"9" * (MAX_DIGITS + 1), b" " * 2**20)),
    ],
)
def test_only_a_short_plain_text_needs_no_closer_look(text: bytes, is_plain: bool) -> None:
    assert is_within_bounds(text) is is_plain


def depth_by_the_letter(text: str) -> int:
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


@settings(max_examples=200)
@given(st.lists(st.sampled_from([b"[", b"{" * 20, b'"', b'"\\\\"', b"9" * 30, b"x", b"9" * 33]), max_size=40))
def test_what_needs_no_closer_look_would_pass_it(pieces: list[bytes]) -> None:
    text = b"".join(pieces)
    if is_within_bounds(text):
        check_json_bounds(text)


PIECES = st.sampled_from(["[", "{", "]", "}", "9", '"a[\\\\"', '"\\"{"', '"[\\\\\\"]"', '"\\u005b"'])


@settings(max_examples=100)
@given(st.lists(PIECES), st.sampled_from(["", '"[[', '"[\\']), st.integers(1, 9))
def test_json_bounds_ignore_brackets_in_strings_at_any_cut(pieces: list[str], end: str, size: int) -> None:
    """Brackets in strings do not count, however quotes are escaped and texts are cut."""
    text = "[" * (MAX_DEPTH - 1) + "".join(pieces) + end
    bounds = JsonBounds()
    try:
        for start in range(0, len(text), size):
            list(bounds.read(text[start : start + size].encode()))
        fits = True
    except RequestError:
        fits = False
    assert fits == (depth_by_the_letter(text) <= MAX_DEPTH)


@pytest.mark.parametrize("size", [1, 63, 1000])
def test_a_long_number_is_found_however_it_is_cut(size: int) -> None:
    def read(text: bytes) -> None:
        bounds = JsonBounds()
        for start in range(0, len(text), size):
            list(bounds.read(text[start : start + size]))

    nines = b"9" * MAX_DIGITS
    read(b'[%s, "9", %s.%s, "%s9"]' % (nines, nines, nines, nines))
    with pytest.raises(RequestError, match="more than 64 digits"):
        read(b"[%s9]" % nines)


@pytest.mark.parametrize(
    ("text", "most"),
    [
        (b"[" + b"1," * MAX_VALUES + b"1]", f"more than {MAX_VALUES} values"),
        (b"[" + b"[]," * (MAX_CONTAINERS - 1) + b"{}]", f"more than {MAX_CONTAINERS} objects and lists"),
        (b"{" + b'"a":1,' * (MAX_MEMBERS - 1) + b'"a":1,"b":2}', f"more than {MAX_MEMBERS} members"),
    ],
    ids=["values", "containers", "members"],
)
def test_json_bounds_limit_values_containers_and_members(text: bytes, most: str) -> None:
    """A body holds no more than a parser reads in a moment."""
    with pytest.raises(RequestError, match=most):
        check_json_bounds(text)
    check_json_bounds(text.replace(b"1,", b"1 ", 1).replace(b"[],", b"1, ", 1).replace(b'"a":1 ', b"", 1))
    check_json_bounds(b'"' + text.replace(b'"', b"'") + b'"')


@pytest.mark.parametrize(
    ("piece", "status", "code"),
    [
        (b"\xc3\xa4" * 500, 413, "body_too_long"),  # bytes count, not characters
        (b"[" * (MAX_DEPTH // 2), 400, "json_out_of_bounds"),
    ],
)
def test_endless_body_is_refused_at_the_first_excess_chunk(
    app: GuardedApp, piece: bytes, status: int, code: str
) -> None:
    """Row 15 of the security list, by bytes: no more is taken of a body without a length than the bound and a chunk."""
    taken = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal taken
        while True:
            taken += 1
            yield piece

    answer = app.call("POST", "/echo", JSON, endless())
    assert (answer.status, answer.code, taken) == (status, code, 3)


@on_a_loop
async def test_long_body_check_lets_other_tasks_run() -> None:
    """Other tasks have their turns while a long body is checked."""
    turns = 0

    async def wait_for_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(wait_for_turns())
    answer = await GuardedApp().answer("POST", "/echo", JSON, [json.dumps("x" * 10 * SLICE_BYTES).encode()])
    other.cancel()
    assert answer.status == 200
    assert turns > 10


@pytest.mark.parametrize("piece", [b'\\"', b'"', b"\\", b"[]", b"9 ", b"\x00\xff"])
def test_hostile_text_of_megabytes_is_done_with(piece: bytes) -> None:
    """Work that grew with the square of the length would not end before the test run does."""
    check_json_bounds(b'"' + piece * 1_000_000)
