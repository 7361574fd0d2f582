"""The chat's comforts: drafts, long pastes, titles by the model, pins, and previews of markup."""

import json
import socket
from typing import Any

import pytest
from axe import check_with_axe
from browsed_chat import answers, ask_whole, ended, press, questions, said, titles
from browsed_page import Open
from serving import HANG_SECONDS
from written_streams import DONE, Script, Scripted, chunk, delta, is_for_title, whole

LONG_TEXT = "A line of a long text.\n" * 120
PASTE = """(text) => {
    const data = new DataTransfer();
    if (text === null) data.items.add(new File([new Uint8Array([0, 255])], "image.png", { type: "image/png" }));
    else data.setData("text/plain", text);
    const event = new ClipboardEvent("paste", { clipboardData: data, bubbles: true, cancelable: true });
    return document.getElementById("prompt").dispatchEvent(event);
}"""
IS_NAMED = """() => new Promise((resolve) => {
    indexedDB.open("d3engine").onsuccess = ({ target }) => {
        const all = target.result.transaction("conversations").objectStore("conversations").getAll();
        all.onsuccess = () => resolve(all.result.some(({ named }) => named));
    };
})"""


def title_requests(script: Script) -> list[dict[str, Any]]:
    return [body for body in script.bodies if is_for_title(body)]


def test_an_unsent_draft_survives_a_reload(chat: tuple[Any, Script]) -> None:
    """Text and attached files stand in the message field again, and are gone once they were sent."""
    page, script = chat
    script.pieces = whole("Yes")
    page.set_input_files("#choose-files", {"name": "notes.txt", "mimeType": "text/plain", "buffer": b"Some notes"})
    page.wait_for_selector("#files li")
    page.fill("#prompt", "Half a\nquestion")
    page.reload()
    page.wait_for_selector("#send:enabled")
    assert page.input_value("#prompt") == "Half a\nquestion"
    assert page.locator("#prompt").bounding_box()["height"] > 50  # as high as its lines
    page.press("#prompt", "Enter")
    ended(page)
    assert said(script.bodies[0]) == [("user", "File `notes.txt`:\n```\nSome notes\n```\n\nHalf a\nquestion")]
    page.reload()
    page.wait_for_selector("#model option", state="attached")
    assert (page.input_value("#prompt"), page.locator("#files li").count()) == ("", 0)


def test_a_long_paste_becomes_a_file(chat: tuple[Any, Script]) -> None:
    """Each of them has another name, and goes along as a file."""
    page, script = chat
    script.pieces = whole("Read")
    assert page.evaluate(PASTE, "x" * 2000) is True  # short enough to be the browser's matter
    for number in (1, 2):
        assert page.evaluate(PASTE, LONG_TEXT) is False
        page.wait_for_selector(f"#files li:nth-child({number})")
    assert page.locator("#files .hint").all_text_contents() == ["2,760 characters"] * 2
    check_with_axe(page)
    ask_whole(page, "Which?")
    content = said(script.bodies[0])[0][1]
    assert content == "".join(f"File `pasted-{n}.txt`:\n```\n{LONG_TEXT}```\n\n" for n in (1, 2)) + "Which?"


def test_a_long_paste_can_be_put_into_the_message(open_chat: Open, scripted: Scripted) -> None:
    """The text comes where the cursor is, and the file is gone."""
    page = open_chat(scripted[0])
    page.fill("#prompt", "Before after")
    page.evaluate("document.getElementById('prompt').setSelectionRange(7, 7)")
    page.evaluate(PASTE, LONG_TEXT)
    page.click("[aria-label='Put pasted-1.txt into the message']")
    assert page.input_value("#prompt") == f"Before {LONG_TEXT}after"
    assert not page.locator("#files").is_visible()


@pytest.mark.parametrize(
    ("pasted", "problem"),
    [
        ("x" * (2**20 + 1), "pasted-1.txt is too large: a file has 1 MiB at most."),
        (None, "image.png is not a text file in UTF-8."),
    ],
    ids=["too large", "a picture"],
)
def test_a_paste_that_is_no_fit_file_is_refused(chat: tuple[Any, Script], pasted: str | None, problem: str) -> None:
    """A paste is bounded as a file is, and what cannot go along is said."""
    page, _ = chat
    assert page.evaluate(PASTE, pasted) is False
    page.wait_for_selector("#problem:visible")
    assert page.text_content("#problem") == problem


def test_the_model_writes_a_title_after_its_answer(open_chat: Open, scripted: Scripted) -> None:
    """One short request behind all others, once for a conversation; the title is kept."""
    address, script = scripted
    script.title = whole('"Conversation title: Pens of Tom."')
    script.pieces = whole("Eight")
    page = open_chat(address, titles=True)
    ask_whole(page, "Tom has 5 pens. He finds 3.")
    page.wait_for_selector("#conversations >> text=Pens of Tom")
    assert page.title().startswith("Pens of Tom ")
    (asked,) = title_requests(script)
    assert (asked["max_tokens"], asked["priority"], asked["model"]) == (24, 1, "scripted")
    assert said(asked)[:2] == [("user", "Tom has 5 pens. He finds 3."), ("assistant", "Eight")]
    ask_whole(page, "And now?")
    assert len(title_requests(script)) == 1
    page.reload()
    page.wait_for_selector("#conversations .open")
    assert titles(page) == ["Pens of Tom"]


@pytest.mark.parametrize(
    "title",
    [
        whole("It is a sum of 5 and 3, as he has 8"),
        whole("Pensandpens" * 6),
        whole("Pens\nand more"),
        [delta(content="Pens and so on and"), delta("length"), DONE],
        whole(""),
        [delta(content="Pens"), f"data: {json.dumps({'error': {'message': 'Out of memory.'}})}\n\n".encode(), DONE],
    ],
)
def test_what_is_no_title_leaves_the_question_as_title(open_chat: Open, scripted: Scripted, title: list[bytes]) -> None:
    """The model is asked once, and nothing is said of it."""
    address, script = scripted
    script.title, script.pieces = title, whole("Eight")
    page = open_chat(address, titles=True)
    page.wait_for_function("indexedDB.databases().then((all) => all.length > 0)")
    ask_whole(page, "How many?")
    page.wait_for_function(IS_NAMED)
    ask_whole(page, "And now?")
    assert len(title_requests(script)) == 1
    assert titles(page) == ["How many?"]
    assert not page.locator("#problem").is_visible()


def test_titles_are_turned_off_and_names_of_people_stay(open_chat: Open, scripted: Scripted) -> None:
    """Without the setting no request is made; a conversation that a person has named is not named again."""
    address, script = scripted
    script.title, script.pieces = whole("Of the model"), whole("Yes")
    page = open_chat(address, titles=True)
    page.click("#open-settings")
    page.uncheck("#titles")
    page.keyboard.press("Escape")
    ask_whole(page, "One?")
    page.click("[aria-label='Rename One?']")
    page.keyboard.type("Of a person")
    page.keyboard.press("Enter")
    page.click("#open-settings")
    page.check("#titles")
    page.keyboard.press("Escape")
    ask_whole(page, "Two?")
    page.click("#new")
    ask_whole(page, "Three?")
    page.wait_for_selector("#conversations >> text=Of the model")
    assert titles(page) == ["Of the model", "Of a person"]
    assert len(title_requests(script)) == 1


def test_a_question_or_a_comparison_ends_a_titles_request(open_chat: Open, scripted: Scripted) -> None:
    """What is measured is not disturbed; the title comes after a later answer."""
    address, script = scripted
    script.title, script.titles_wait, script.pieces = [delta(content="Half")], True, whole("Yes")
    page = open_chat(address, titles=True)
    page.evaluate(
        """() => {
            globalThis.told = [];
            globalThis.watched = new BroadcastChannel("d3engine-comparing");
            watched.onmessage = ({ data }) => told.push(data);
        }"""
    )
    for question in ("One?", "Two?"):
        ask_whole(page, question)
        assert script.title_begins.acquire(timeout=HANG_SECONDS)
    assert script.title_ends.acquire(timeout=HANG_SECONDS)  # the second question has ended the first
    other = page.context.new_page()
    other.goto(f"{address}/compare")
    other.wait_for_selector("#run:enabled")
    script.pieces, script.waits_at_the_end = [chunk("Half", [8], [0], [1])], True
    other.fill("#prompt", "Compared?")
    other.press("#prompt", "Enter")
    assert script.title_ends.acquire(timeout=HANG_SECONDS)
    other.wait_for_selector("text=Half")
    script.pieces, script.waits_at_the_end = whole("Yes"), False
    ask_whole(page, "Three?")
    other.click("#stop")
    page.wait_for_function("told.length === 2")
    script.title, script.titles_wait = whole("Pens"), False
    ask_whole(page, "Four?")
    page.wait_for_selector("#conversations >> text=Pens")
    assert (titles(page), len(title_requests(script))) == (["Pens"], 3)


def test_pinned_conversations_come_first(chat: tuple[Any, Script]) -> None:
    """A pin is kept, keeps the keyboard's place, and is taken out again."""
    page, script = chat
    script.pieces = whole("Yes")
    for question in ("One?", "Two?", "Three?"):
        page.click("#new")
        ask_whole(page, question)
    assert titles(page) == ["Three?", "Two?", "One?"]
    pin = page.get_by_role("button", name="Pin One?")
    pin.focus()
    page.keyboard.press("Enter")
    assert titles(page) == ["One?", "Three?", "Two?"]
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Pin One?"
    assert pin.get_attribute("aria-pressed") == "true"
    check_with_axe(page)
    page.reload()
    page.wait_for_selector("#conversations .open")
    assert titles(page) == ["One?", "Three?", "Two?"]
    pin.focus()
    page.keyboard.press("Enter")
    assert titles(page) == ["Three?", "Two?", "One?"]


MARKUP = """<!doctype html>
<html><head><style>@import url("http://HOST/a.css"); h1 { color: rgb(1, 2, 3) }
body { background: url("http://HOST/b.png") }</style>
<link rel="stylesheet" href="http://HOST/c.css"><link rel="dns-prefetch" href="//HOST">
<meta http-equiv="refresh" content="0; url=http://HOST/d"><base href="http://HOST/"></head>
<body><h1 onclick="parent.document.title='broken'">Shown</h1><p id="was">as it is</p>
<script>document.getElementById("was").textContent = "changed"; fetch("http://HOST/e")</script>
<img src="http://HOST/f.png" onerror="document.body.textContent='broken'">
<iframe src="http://HOST/g"></iframe><object data="http://HOST/h"></object>
<a href="http://HOST/i">link</a><svg width="9" height="9"><circle r="4"/></svg></body></html>
"""


def test_markup_is_previewed_without_scripts_and_requests(browser: Any, scripted: Scripted) -> None:
    """Styles and pictures of the block itself are shown; nothing else of it happens."""
    address, script = scripted
    elsewhere = socket.create_server(("127.0.0.1", 0))
    elsewhere.setblocking(False)
    markup = MARKUP.replace("HOST", f"127.0.0.1:{elsewhere.getsockname()[1]}")
    script.pieces = whole(f"```html\n{markup}```")
    context = browser.new_context()
    page = context.new_page()
    page.goto(address)
    page.wait_for_selector("#model option", state="attached")
    ask_whole(page, "A page?")
    if page.locator(".plain").count():
        pytest.skip("the page's libraries are not here: python d3engine/server/page_libraries.py fetches them")
    page.click("[aria-label=Preview]")
    frame = page.frame_locator("#preview iframe")
    frame.locator("h1").wait_for()
    assert frame.locator("h1").evaluate("one => getComputedStyle(one).color") == "rgb(1, 2, 3)"
    assert frame.locator("#was").text_content() == "as it is"
    frame.locator("h1").click()
    frame.locator("text=link").click()
    assert frame.locator("h1").evaluate("() => [origin, document.scripts.length].join()") == "null,0"
    assert frame.locator(":is(iframe, object, link, meta[http-equiv], base, [onclick], [href^=http])").count() == 0
    assert frame.locator("svg circle").count() == 1
    assert not page.title().startswith("broken")
    with pytest.raises(BlockingIOError):  # there was no connection
        elsewhere.accept()
    elsewhere.close()
    frame.locator("h1").press("Escape")
    page.wait_for_selector("#preview", state="hidden")
    assert page.locator("#preview iframe").count() == 0
    context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_a_preview_fits_its_screen_and_axe_finds_nothing(
    open_chat: Open, scripted: Scripted, width: int, scheme: str
) -> None:
    """An SVG in a block of XML too; a block of another language has no preview."""
    address, script = scripted
    drawing = '<svg xmlns="http://www.w3.org/2000/svg" width="90" height="90"><circle cx="45" cy="45" r="40"/></svg>'
    script.pieces = whole(f"```xml\n{drawing}\n```\n\n```xml\n<a/>\n```\n\n```python\nprint()\n```")
    page = open_chat(address, viewport={"width": width, "height": 800}, color_scheme=scheme)
    ask_whole(page, "A circle?")
    if page.locator(".plain").count():
        pytest.skip("the page's libraries are not here: python d3engine/server/page_libraries.py fetches them")
    assert page.get_by_role("button", name="Preview").count() == 1
    page.click("[aria-label=Preview]")
    page.frame_locator("#preview iframe").locator("circle").wait_for()
    box = page.locator("#preview").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= width
    check_with_axe(page)
    page.click("[aria-label='Close the preview']")
    assert not page.locator("#preview").is_visible()


def test_a_message_can_follow_an_edited_answer(chat: tuple[Any, Script]) -> None:
    """The next question is asked behind the answer as it was edited."""
    page, script = chat
    script.pieces = whole("It is red.")
    ask_whole(page, "Colour?")
    press(page, "assistant", "Edit")
    page.fill("[aria-label='Edit the answer']", "It is green.")
    page.click(".editing >> text=Save")
    ask_whole(page, "Why?")
    assert said(script.bodies[1]) == [("user", "Colour?"), ("assistant", "It is green."), ("user", "Why?")]
    assert (questions(page), answers(page)) == (["Colour?", "Why?"], ["It is green.", "It is red."])
