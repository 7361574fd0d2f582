"""The page over a server whose streams the tests write, byte by byte: cuts, ends, errors, keys and hostile text."""

import json
import time
from typing import Any

import pytest
from browsed_page import Open, at_once, compare, depths, letters, pane, run, run_whole
from serving import HANG_SECONDS
from written_streams import DONE, HOSTILE, Script, Scripted, chunk

KEY = "a-key-of-mine"


@pytest.fixture
def half_an_answer(panes: tuple[Any, Script]) -> tuple[Any, Script]:
    """A page whose two answers have one token, and go on."""
    page, script = panes
    script.pieces = [chunk("Half", [8], [0], [1])]
    script.waits_at_the_end = True
    at_once(page)
    run(page, "Anything")
    return page, script


@pytest.mark.parametrize("size", [1, 2, 7])
def test_a_stream_cut_anywhere_reads_as_it_was_written(panes: tuple[Any, Script], size: int) -> None:
    page, script = panes
    whole = b": still here\r\n\r\n" + chunk("na\u00efve \U0001f600", [8, 7], [0, 6], [1, 2]).replace(b"\n", b"\r\n")
    whole += chunk("", [6], [7], [3]) + chunk("\u4e2d.", [5], [8], [4], "stop") + DONE
    script.pieces = [whole[i : i + size] for i in range(0, len(whole), size)]
    run_whole(page, "Anything")
    assert pane(page, 0).locator(".token").all_text_contents() == ["na\u00efve ", "\U0001f600", "\u4e2d", "."]
    assert depths(page, 0) == [8, 7, 6, 5]


def test_figure_names_share_a_line_while_a_value_is_missing(half_an_answer: tuple[Any, Script]) -> None:
    """The names of figures are on one line although one has no value yet."""
    page, _ = half_an_answer
    names = pane(page, 0).locator(".figures dt:visible")
    names.first.wait_for()
    assert len({round(names.nth(number).bounding_box()["y"]) for number in range(names.count())}) == 1


def test_an_answer_in_one_piece_has_the_speed_of_its_whole_time(panes: tuple[Any, Script]) -> None:
    page, script = panes
    script.thinks_seconds = 0.25
    script.pieces = [chunk("ab", [8, 8], [0, 1], [1, 2]) + chunk("cd", [8, 8], [2, 3], [3, 4], "stop") + DONE]
    began = time.monotonic()
    run_whole(page, "Anything")
    most = 4 / script.thinks_seconds
    least = 4 / (time.monotonic() - began)
    for number in (0, 1):
        assert least - 1 < float(pane(page, number).locator(".rate").text_content()) <= most


def test_the_speed_of_an_answer_is_the_engines_once_it_is_told(panes: tuple[Any, Script]) -> None:
    page, script = panes
    told = json.dumps({"choices": [], "d3ext": {"decode_seconds": 0.02}})
    script.pieces = [
        chunk("One two three", [8, 8, 8], [0, 3, 7], [1, 2, 3], "stop"),
        f"data: {told}\n\n".encode(),
        DONE,
    ]
    run_whole(page, "Anything")
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert page.locator(".rate").all_text_contents() == ["100", "100"]


def test_what_a_model_writes_is_never_markup(panes: tuple[Any, Script]) -> None:
    page, script = panes
    script.pieces = [chunk(HOSTILE, [8], [0], [1], "stop"), DONE]
    run_whole(page, HOSTILE)
    assert letters(page, 0) == HOSTILE
    pane(page, 0).locator(".token").focus()
    assert page.locator(".answer img, .answer script, .question img, #details img").count() == 0
    assert page.title() == "d3engine: compare depths"


@pytest.mark.parametrize("scrolls_up", [False, True])
def test_growing_answer_stays_in_sight_unless_scrolled_up(
    open_page: Open, scripted: Scripted, *, scrolls_up: bool
) -> None:
    """The end of a growing answer stays in sight unless its reader scrolls up."""
    url, script = scripted
    script.pieces = [*(chunk("many words " * 8, [16], [88 * nth], [nth]) for nth in range(60)), DONE]
    page = open_page(url, compares=True, viewport={"width": 390, "height": 844})
    run_whole(page, "Begin")
    script.thinks_seconds = 0.5
    run(page, "Go on")
    if scrolls_up:
        page.mouse.move(100, 100)
        page.mouse.wheel(0, -300)
    page.wait_for_selector("#retry:enabled")
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    figures, form = pane(page, 1).locator(".figures").last.bounding_box(), page.locator("#ask").bounding_box()
    assert (figures["y"] + figures["height"] <= form["y"]) != scrolls_up


def test_stop_ends_both_requests_and_keeps_what_has_come(half_an_answer: tuple[Any, Script]) -> None:
    page, script = half_an_answer
    for number in (0, 1):
        pane(page, number).locator(".token").wait_for()
    page.click("#stop")
    page.wait_for_selector("#retry:enabled")
    assert script.left.wait(HANG_SECONDS)
    assert [letters(page, number) for number in (0, 1)] == ["Half", "Half"]
    assert page.locator(".end").all_text_contents() == ["you", "you"]
    assert page.locator(".turn .error:visible").count() == 0


def test_retry_repeats_the_requests_and_chats_keep_their_answers(panes: tuple[Any, Script]) -> None:
    """Retry sends the same requests again, and each chat goes on with its own answers."""
    page, script = panes
    script.pieces = [chunk("Yes", [8], [0], [1], "stop"), DONE]
    run_whole(page, "One?")
    page.click("#retry")
    page.wait_for_selector("#retry:enabled")
    assert script.bodies[2:] == script.bodies[:2]
    assert [body.get("depth") for body in script.bodies[:2]] == [None, "full"]
    run_whole(page, "Two?")
    said = [(message["role"], message["content"]) for message in script.bodies[4]["messages"]]
    assert said == [("user", "One?"), ("assistant", "Yes"), ("user", "Two?")]


def test_a_question_of_one_pane_alone_is_retried_in_both(panes: tuple[Any, Script]) -> None:
    """Retry repeats the last question, and answers to different conversations are not compared."""
    page, script = panes
    script.pieces = [chunk("Yes", [8], [0], [1], "stop"), DONE]
    run_whole(page, "One?")
    assert page.text_content("#difference") == "Both answers are the same."
    compare(page, compares=False)
    run_whole(page, "Two?")
    compare(page)
    page.click("#retry")
    page.wait_for_selector("#retry:enabled")
    assert [body["messages"][-1]["content"] for body in script.bodies] == ["One?", "One?", "Two?", "Two?", "Two?"]
    assert page.text_content("#difference") == "Both answers are the same."
    compare(page, compares=False)
    run_whole(page, "Three?")
    compare(page)
    run_whole(page, "Four?")
    assert page.text_content("#difference") == "The panes have had different conversations."


@pytest.mark.parametrize("when", ["before", "within", "cut"])
def test_an_error_is_shown_as_the_servers_sentence(panes: tuple[Any, Script], when: str) -> None:
    page, script = panes
    sentence = "The engine failed on this <b>request</b>."
    event = f"data: {json.dumps({'error': {'message': sentence}})}\n\n".encode()
    if when == "before":
        script.error = (400, sentence)
    script.pieces = [chunk("Half", [8], [0], [1]), *([event, DONE] if when == "within" else [])]
    run_whole(page, "Anything")
    if when == "cut":
        sentence = "The connection to the server was lost before the answer was complete."
    assert page.locator(".turn .error").all_text_contents() == [sentence, sentence]
    assert page.locator(".error b").count() == 0


def test_the_page_asks_for_a_key_where_there_must_be_one(open_page: Open, scripted: Scripted) -> None:
    address, script = scripted
    script.key = KEY
    page = open_page(address, compares=True, is_ready=False)
    page.wait_for_selector("#key-form:not([hidden])")
    page.fill("#key", KEY)
    page.keyboard.press("Enter")
    page.wait_for_selector("#run:enabled")
    assert not page.locator("#key-form").is_visible()
    assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
