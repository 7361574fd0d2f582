"""The page in a real browser: Debian's Chromium, driven by playwright (`make test-server` installs it)."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from browsed_page import compare


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
    from serving import serving

    from d3engine import AsyncEngine, FullDepth
    from d3engine.server.app import create_app
    from d3engine.server.settings import ServerSettings

    engine = AsyncEngine("demo", depth=FullDepth(), device="cpu", kv_cache_memory_bytes=2**25)
    with serving(create_app(engine, ServerSettings(model_names=("demo",)))) as address:
        yield address  # the engine ends with its last reader: playwright's loop leaves none to close it in


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """`open_page(address, **context)`: the page, which has loaded, with two panes where it `compares`; nothing may be
    said on its console at the end."""
    contexts, complaints = [], []

    def opened(address: str, is_ready: bool = True, compares: bool = False, **options: Any) -> Any:
        context = browser.new_context(**options)
        contexts.append(context)
        context.set_default_timeout(30_000)
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda said: complaints.append(said.text) if "Security" in said.text else None)
        page.goto(address)
        if is_ready:
            page.wait_for_selector("#run:enabled")
        if compares:
            compare(page)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert complaints == []
