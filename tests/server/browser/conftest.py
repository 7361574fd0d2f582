"""The page in a real browser: Debian's Chromium, driven by playwright (`make test-server` installs it)."""

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from browsed_chat import ask_whole
from browsed_page import Open, compare
from demo_server import serving_demo
from serving import serving
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from written_streams import Script, Scripted, whole


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="the page's tests in a browser need playwright")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("the page's tests in a browser need chromium")
    with playwright.sync_playwright() as driver:
        launched = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def full_depth_url() -> Iterator[str]:
    """Where a server answers whose own depth is full."""
    from d3engine import AsyncEngine, FullDepth

    with serving_demo(AsyncEngine("demo", depth=FullDepth(), device="cpu", kv_cache_memory_bytes=2**25)) as address:
        yield address  # the engine ends with its last reader: playwright's loop leaves none to close it in


@pytest.fixture
def open_tab(browser: Any) -> Iterator[Callable[..., Any]]:
    """`open_tab(**context)`: an empty tab of a browser without a history. At the end a page's code may not have failed,
    and nothing may have been against its policy or have gone to another host."""
    contexts, complaints = [], []

    def opened(**options: Any) -> Any:
        context = browser.new_context(**options)
        contexts.append(context)
        context.set_default_timeout(30_000)
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda said: complaints.append(said.text) if "Security" in said.text else None)
        page.on("request", lambda asked: None if "://127.0.0.1:" in asked.url else complaints.append(asked.url))
        return page

    yield opened
    for context in contexts:
        context.close()
    assert [said for said in complaints if not said.startswith(("blob:", "data:"))] == []


@pytest.fixture
def open_page(open_tab: Open) -> Callable[..., Any]:
    """`open_page(address, **context)`: the page of depths, which has loaded, with two panes where it `compares`."""

    def opened(address: str, is_ready: bool = True, compares: bool = False, **options: Any) -> Any:
        page = open_tab(**options)
        page.goto(f"{address}/compare")
        if is_ready:
            page.wait_for_selector("#run:enabled")
            compare(page, compares=compares)
        return page

    return opened


@pytest.fixture
def open_chat(open_tab: Open) -> Callable[..., Any]:
    """`open_chat(address, **context)`: the chat, which has loaded; it asks for `titles` only where a test says so."""

    def opened(address: str, titles: bool = False, **options: Any) -> Any:
        page = open_tab(**options)
        if not titles:
            page.add_init_script("try { localStorage.setItem('d3engine-titles', 'false') } catch {}")  # in frames too
        page.goto(address)
        page.wait_for_selector("#model option", state="attached")
        return page

    return opened


@pytest.fixture(scope="module")
def scripted_address() -> Iterator[tuple[str, list[Script]]]:
    from d3engine.server.routes.api import PAGE_ROUTES
    from d3engine.server.schemas.requests import REFERENCE, ChatRequest

    _, schemas = msgspec.json.schema_components([ChatRequest], ref_template=REFERENCE)

    async def describe(request: Request) -> Response:
        return JSONResponse({"components": {"schemas": schemas}})

    holder = [Script()]

    async def answer(request: Request) -> Response:
        return await getattr(holder[0], request.url.path.rpartition("/")[2])(request)

    paths = {"/v1/models": "GET", "/tokenizer_info": "GET", "/v1/chat/completions": "POST"}
    routes = [Route(path, answer, methods=[method]) for path, method in paths.items()]
    routes.append(Route("/openapi.json", describe))
    with serving(Starlette(routes=[*routes, *PAGE_ROUTES])) as address:
        yield address, holder


@pytest.fixture
def scripted(scripted_address: tuple[str, list[Script]]) -> tuple[str, Script]:
    address, holder = scripted_address
    holder[0] = Script()
    return address, holder[0]


@pytest.fixture
def chat(open_chat: Open, scripted: Scripted) -> tuple[Any, Script]:
    """The chat in a browser, and what its server says."""
    return open_chat(scripted[0]), scripted[1]


@pytest.fixture
def panes(open_page: Open, scripted: Scripted) -> tuple[Any, Script]:
    """The page of depths with two panes, and what its server says."""
    return open_page(scripted[0], compares=True), scripted[1]


@pytest.fixture
def list_of_two(chat: tuple[Any, Script]) -> Any:
    """The chat with the conversations "Two" and "One"."""
    page, script = chat
    script.pieces = whole("Yes")
    for question in ("One", "Two"):
        page.click("#new")
        ask_whole(page, question)
    return page
