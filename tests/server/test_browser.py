"""The page in a real browser: Debian's Chromium, driven by playwright (`make test-server` installs it).

Two servers: the bundled model's, and one whose streams the tests write, byte by byte.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from contrast import contrast, luminance
from serving import HANG_SECONDS, serving
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

playwright = pytest.importorskip("playwright.sync_api", reason="the page's tests in a browser need playwright")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="the page's tests in a browser need chromium")

NUM_LAYERS = 8
KEY = "a-key-of-mine"
HOSTILE = "<img src=x onerror=\"document.title='broken'\"><script>document.title='broken'</script>\u202e&amp;\x00"
D3_CARD = {"num_layers": NUM_LAYERS, "depth": {"policy": "d3", "alpha": 0.9, "start": 0.5, "tail": 0}}


class Script:
    """What the scripted server says, and what it has heard."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.thinks_seconds = 0.0
        self.waits_at_the_end = False
        self.error: tuple[int, str] | None = None
        self.key: str | None = None
        self.bodies: list[dict[str, Any]] = []
        self.left = threading.Event()

    async def models(self, request: Request) -> Response:
        if self.key is not None and request.headers.get("authorization") != f"Bearer {self.key}":
            return _error(401, "An API key is missing.")
        card = {"id": "scripted", "object": "model", "parent": None, "d3ext": D3_CARD}
        return JSONResponse({"object": "list", "data": [card]})

    async def tokenizer_info(self, request: Request) -> Response:
        return JSONResponse({"chat_template": "{{ messages }}"})

    async def completions(self, request: Request) -> Response:
        self.bodies.append(await request.json())
        if self.error is not None:
            return _error(*self.error)
        return StreamingResponse(self._stream(), media_type="text/event-stream")

    async def _stream(self) -> AsyncIterator[bytes]:
        try:
            await asyncio.sleep(self.thinks_seconds)
            for piece in self.pieces:
                yield piece
                await asyncio.sleep(0)
            if self.waits_at_the_end:
                await asyncio.sleep(HANG_SECONDS)
        finally:
            self.left.set()


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": "", "param": None, "code": None}}, status)


def chunk(text: str, depths: list[int], offsets: list[int], ids: list[int], finish: str | None = None) -> bytes:
    """One event of a chat."""
    delta = {"content": text}
    extra = {"depths": depths, "token_offsets": offsets}
    choice = {"index": 0, "delta": delta, "token_ids": ids, "d3ext": extra, "finish_reason": finish}
    return f"data: {json.dumps({'choices': [choice]}, ensure_ascii=False)}\n\n".encode()


DONE = b"data: [DONE]\n\n"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        launched = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """`open_page(address, **context)`: the page, which has loaded; nothing may be said on its console at the end."""
    contexts, complaints = [], []

    def opened(address: str, is_ready: bool = True, **options: Any) -> Any:
        context = browser.new_context(**options)
        contexts.append(context)
        context.set_default_timeout(30_000)
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda said: complaints.append(said.text) if "Security" in said.text else None)
        page.goto(address)
        if is_ready:
            page.wait_for_selector("#run:enabled")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.fixture(scope="module")
def scripted_address() -> Iterator[tuple[str, list[Script]]]:
    from d3engine.server.routes.page import PAGE_ROUTES

    holder = [Script()]

    async def answer(request: Request) -> Response:
        return await getattr(holder[0], request.url.path.rpartition("/")[2])(request)

    paths = {"/v1/models": "GET", "/tokenizer_info": "GET", "/v1/chat/completions": "POST"}
    routes = [Route(path, answer, methods=[method]) for path, method in paths.items()]
    with serving(Starlette(routes=[*routes, *PAGE_ROUTES])) as address:
        yield address, holder


@pytest.fixture
def scripted(scripted_address: tuple[str, list[Script]]) -> tuple[str, Script]:
    address, holder = scripted_address
    holder[0] = Script()
    return address, holder[0]


def run(page: Any, prompt: str) -> None:
    page.fill("#prompt", prompt)
    page.click("#run")


def run_whole(page: Any, prompt: str) -> None:
    """Run it until both answers have ended."""
    run(page, prompt)
    page.wait_for_selector("#retry:enabled")


def half_an_answer(open_page: Callable[..., Any], scripted: tuple[str, Script]) -> Any:
    """A page whose two answers have one token, and go on."""
    address, script = scripted
    script.pieces = [chunk("Half", [8], [0], [1])]
    script.waits_at_the_end = True
    page = open_page(address)
    run(page, "Anything")
    return page


def pane(page: Any, number: int) -> Any:
    return page.locator(".pane").nth(number)


def letters(page: Any, number: int) -> str:
    """All that the tokens of an answer read as."""
    return "".join(pane(page, number).locator(".token").all_text_contents())


def style(page: Any, selector: str, name: str) -> str:
    """A computed style of the first element that the selector finds."""
    found: str = page.locator(selector).first.evaluate("(one, name) => getComputedStyle(one)[name]", name)
    return found


def depths(page: Any, number: int) -> list[int]:
    names = pane(page, number).locator(".token").evaluate_all("all => all.map(one => one.className)")
    return [int(word.removeprefix("depth-")) for name in names for word in name.split() if word.startswith("depth-")]


# -- with the bundled model ------------------------------------------------------------------------------------------


def test_a_prompt_runs_at_full_depth_and_at_the_servers_own_at_once_each_token_coloured_by_its_layers(
    open_page: Callable[..., Any], url: str, demo: Any, question: str
) -> None:
    from d3engine import FullDepth, SamplingParams

    page = open_page(url)
    page.click("text=Completion")
    run_whole(page, question)
    for number, depth in enumerate((FullDepth(), None)):
        answer = demo.generate([question], SamplingParams(temperature=0, max_tokens=128, depth=depth), use_tqdm=False)[
            0
        ].outputs[0]
        assert letters(page, number) == answer.text
        assert depths(page, number) == answer.depths
        assert pane(page, number).locator(".count").text_content() == str(len(answer.depths))
        mean = sum(answer.depths) / len(answer.depths)
        assert pane(page, number).locator(".layers").text_content() == f"{mean:.2f} of 16"
    assert pane(page, 0).locator(".cache").text_content() == "all"
    assert pane(page, 1).locator(".cache").text_content().endswith("KiB less")
    assert "Both answers are the same." in page.text_content("#status")
    assert page.text_content("#difference") == "Both answers are the same."
    assert style(page, "#difference", "borderLeftColor") == style(page, "header", "borderBottomColor")


def test_sliders_draw_the_engines_schedule_before_anything_runs_and_the_run_keeps_to_it(
    open_page: Callable[..., Any], url: str
) -> None:
    from d3engine import D3

    page = open_page(url)
    right = pane(page, 1)
    right.locator(".depth").select_option("d3")
    right.locator(".alpha").fill("0.9")
    right.locator(".start").fill("0.3")
    page.click("text=Sampling")
    page.fill("#max-tokens", "20")
    expected = D3(0.9, 0.3).schedule(16).depths(20).tolist()
    mean = sum(expected) / 20
    said = right.locator(".schedule-words").text_content()
    assert f"{expected[-1]} from token {expected.index(expected[-1]) + 1} on, {mean:.1f} on average" in said
    run_whole(page, "Tom has 5 pens. Tom finds 3. Tom buys 2. How many pens does Tom have now?")
    assert depths(page, 1) == expected[: len(depths(page, 1))]
    marked = page.locator(".differs").all_text_contents()
    assert len(marked) == 2
    assert marked[0] != marked[1]
    assert "differ first at token" in page.text_content("#difference")
    assert style(page, "#difference", "borderLeftColor") in style(page, ".differs", "boxShadow")


def test_the_pages_schedule_is_the_engines_for_any_alpha_and_start(open_page: Callable[..., Any], url: str) -> None:
    from d3engine import D3

    page = open_page(url)
    cases = [
        (layers, alpha, start)
        for layers in (1, 6, 16, 32)
        for alpha in (0.5, 0.9, 0.985, 1)
        for start in (0.07, 0.29, 0.7)
    ]
    found = page.evaluate(
        """async (cases) => {
            const { d3Depths, firstLayer } = await import("/page/schedule.js");
            return cases.map(([n, alpha, start]) => [firstLayer(start, n), d3Depths({ alpha, start }, n, 64)]);
        }""",
        cases,
    )
    for (layers, alpha, start), (first, of_page) in zip(cases, found, strict=True):
        policy = D3(alpha, start)
        assert first == policy.first_layer(layers)
        assert of_page == policy.schedule(layers).depths(64).tolist()


def test_focus_on_a_token_shows_its_layers_probability_and_alternatives_and_arrows_move_on(
    open_page: Callable[..., Any], url: str
) -> None:
    page = open_page(url)
    run_whole(page, "Tom has 5 pens. Tom finds 3. How many pens does Tom have now?")
    tokens = pane(page, 1).locator(".token")
    tokens.nth(0).focus()
    assert "Token 1: Adding" in page.text_content("#details")
    page.keyboard.press("ArrowRight")
    details = page.locator("#details")
    assert "Token 2" in details.text_content()
    assert f"Layers: {depths(page, 1)[1]} of 16" in details.text_content()
    assert "Probability" in details.text_content()
    assert details.locator(".alternative").count() >= 5
    page.keyboard.press("Escape")
    assert not details.is_visible()


def test_every_depth_stands_out_from_a_dark_pane_also_where_the_scheme_changes_under_the_answers(
    open_page: Callable[..., Any], url: str
) -> None:
    page = open_page(url, color_scheme="light")
    run_whole(page, "Tom has 5 pens. Tom finds 3. How many pens does Tom have now?")
    deepest, shallowest = (f".depth-{depth}" for depth in (max(depths(page, 1)), min(depths(page, 1))))
    light = style(page, deepest, "backgroundColor")
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(
        "([one, colour]) => getComputedStyle(document.querySelector(one)).backgroundColor !== colour",
        arg=[deepest, light],
    )
    ground = style(page, ".pane", "backgroundColor")
    deep, shallow = (style(page, token, "backgroundColor") for token in (deepest, shallowest))
    assert contrast(deep, ground) >= 3
    assert luminance(shallow) > luminance(deep)
    for token, back in ((deepest, deep), (shallowest, shallow)):
        assert contrast(style(page, token, "color"), back) >= 4.5
    page.emulate_media(color_scheme="light")
    page.wait_for_function(
        "([one, colour]) => getComputedStyle(document.querySelector(one)).backgroundColor === colour",
        arg=[deepest, light],
    )


@pytest.mark.parametrize("width", [390, 820, 1100])
def test_no_map_of_layers_leaves_its_pane(open_page: Callable[..., Any], url: str, width: int) -> None:
    page = open_page(url, viewport={"width": width, "height": 800})
    box = pane(page, 1).bounding_box()
    drawn = pane(page, 1).locator(".schedule").bounding_box()
    assert drawn["x"] + drawn["width"] < box["x"] + box["width"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone_nothing_is_wider_than_the_screen(open_page: Callable[..., Any], url: str, scheme: str) -> None:
    page = open_page(url, viewport={"width": 390, "height": 844}, color_scheme=scheme)
    run_whole(page, "Tom has 5 pens. Tom finds 3. How many pens does Tom have now?")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    left, right = (pane(page, number).bounding_box() for number in (0, 1))
    assert left["x"] == right["x"]
    assert right["y"] >= left["y"] + left["height"]


def test_on_a_phone_panes_without_answers_follow_each_other_closely(open_page: Callable[..., Any], url: str) -> None:
    page = open_page(url, viewport={"width": 390, "height": 1200})
    upper, lower = (pane(page, number).bounding_box() for number in (0, 1))
    assert 0 < lower["y"] - (upper["y"] + upper["height"]) < 32


# -- with streams that the tests write -------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 7])
def test_a_stream_cut_anywhere_reads_as_it_was_written(
    open_page: Callable[..., Any], scripted: tuple[str, Script], size: int
) -> None:
    address, script = scripted
    whole = b": still here\r\n\r\n" + chunk("na\u00efve \U0001f600", [8, 7], [0, 6], [1, 2]).replace(b"\n", b"\r\n")
    whole += chunk("", [6], [7], [3]) + chunk("\u4e2d.", [5], [8], [4], "stop") + DONE
    script.pieces = [whole[i : i + size] for i in range(0, len(whole), size)]
    page = open_page(address)
    run_whole(page, "Anything")
    assert pane(page, 0).locator(".token").all_text_contents() == ["na\u00efve ", "\U0001f600", "\u4e2d", "."]
    assert depths(page, 0) == [8, 7, 6, 5]


def test_names_of_figures_are_on_one_line_though_one_has_no_value_yet(
    open_page: Callable[..., Any], scripted: tuple[str, Script]
) -> None:
    page = half_an_answer(open_page, scripted)
    names = pane(page, 0).locator(".figures dt")
    names.first.wait_for()
    assert len({round(names.nth(number).bounding_box()["y"]) for number in range(names.count())}) == 1


def test_an_answer_in_one_piece_has_the_speed_of_its_whole_time(
    open_page: Callable[..., Any], scripted: tuple[str, Script]
) -> None:
    address, script = scripted
    script.thinks_seconds = 0.25
    script.pieces = [chunk("ab", [8, 8], [0, 1], [1, 2]) + chunk("cd", [8, 8], [2, 3], [3, 4], "stop") + DONE]
    page = open_page(address)
    began = time.monotonic()
    run_whole(page, "Anything")
    most = 4 / script.thinks_seconds
    least = 4 / (time.monotonic() - began)
    for number in (0, 1):
        assert least - 1 < float(pane(page, number).locator(".rate").text_content()) <= most


def test_the_speed_of_an_answer_is_the_engines_once_it_is_told(
    open_page: Callable[..., Any], scripted: tuple[str, Script]
) -> None:
    address, script = scripted
    told = json.dumps({"choices": [], "d3ext": {"decode_seconds": 0.02}})
    script.pieces = [
        chunk("One two three", [8, 8, 8], [0, 3, 7], [1, 2, 3], "stop"),
        f"data: {told}\n\n".encode(),
        DONE,
    ]
    page = open_page(address)
    run_whole(page, "Anything")
    page.wait_for_function("[...document.querySelectorAll('.rate')].every((rate) => rate.textContent === '100')")


def test_what_a_model_writes_is_never_markup(open_page: Callable[..., Any], scripted: tuple[str, Script]) -> None:
    address, script = scripted
    script.pieces = [chunk(HOSTILE, [8], [0], [1], "stop"), DONE]
    page = open_page(address)
    run_whole(page, HOSTILE)
    assert letters(page, 0) == HOSTILE
    pane(page, 0).locator(".token").focus()
    assert page.locator(".answer img, .answer script, .question img, #details img").count() == 0
    assert page.title() == "d3engine: watch depth"


@pytest.mark.parametrize("scrolls_up", [False, True])
def test_the_end_of_a_growing_answer_stays_in_sight_unless_its_reader_scrolls_up(
    open_page: Callable[..., Any], scripted: tuple[str, Script], *, scrolls_up: bool
) -> None:
    url, script = scripted
    script.pieces = [*(chunk("many words " * 8, [16], [88 * nth], [nth]) for nth in range(60)), DONE]
    page = open_page(url, viewport={"width": 390, "height": 844})
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


def test_stop_ends_both_requests_and_keeps_what_has_come(
    open_page: Callable[..., Any], scripted: tuple[str, Script]
) -> None:
    page = half_an_answer(open_page, scripted)
    for number in (0, 1):
        pane(page, number).locator(".token").wait_for()
    page.click("#stop")
    page.wait_for_selector("#retry:enabled")
    assert scripted[1].left.wait(HANG_SECONDS)
    assert [letters(page, number) for number in (0, 1)] == ["Half", "Half"]
    assert page.locator(".end").all_text_contents() == ["you", "you"]
    assert page.locator(".turn .error:visible").count() == 0


def test_retry_asks_the_same_again_and_a_chat_goes_on_with_its_own_answers(
    open_page: Callable[..., Any], scripted: tuple[str, Script]
) -> None:
    address, script = scripted
    script.pieces = [chunk("Yes", [8], [0], [1], "stop"), DONE]
    page = open_page(address)
    run_whole(page, "One?")
    page.click("#retry")
    page.wait_for_selector("#retry:enabled")
    assert script.bodies[2:] == script.bodies[:2]
    assert [body.get("depth") for body in script.bodies[:2]] == ["full", None]
    run_whole(page, "Two?")
    said = [(message["role"], message["content"]) for message in script.bodies[4]["messages"]]
    assert said == [("user", "One?"), ("assistant", "Yes"), ("user", "Two?")]


@pytest.mark.parametrize("when", ["before", "within", "cut"])
def test_an_error_is_shown_as_the_servers_sentence(
    open_page: Callable[..., Any], scripted: tuple[str, Script], when: str
) -> None:
    address, script = scripted
    sentence = "The engine failed on this <b>request</b>."
    event = f"data: {json.dumps({'error': {'message': sentence}})}\n\n".encode()
    if when == "before":
        script.error = (400, sentence)
    script.pieces = [chunk("Half", [8], [0], [1]), *([event, DONE] if when == "within" else [])]
    page = open_page(address)
    run_whole(page, "Anything")
    if when == "cut":
        sentence = "The connection to the server was lost before the answer was complete."
    assert page.locator(".turn .error").all_text_contents() == [sentence, sentence]
    assert page.locator(".error b").count() == 0


def test_the_page_asks_for_a_key_where_there_must_be_one(
    open_page: Callable[..., Any], scripted: tuple[str, Script]
) -> None:
    address, script = scripted
    script.key = KEY
    page = open_page(address, is_ready=False)
    page.wait_for_selector("#key-form:not([hidden])")
    page.fill("#key", KEY)
    page.keyboard.press("Enter")
    page.wait_for_selector("#run:enabled")
    assert not page.locator("#key-form").is_visible()
    assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
