"""The pages at / and /compare: their files are served whole and safely, and they ask for nothing of anybody else.
What they do in a browser, the folder `browser` says."""

import re
from pathlib import Path

import httpx
import pytest
from contrast import contrast, luminance
from starlette.applications import Starlette

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "d3engine" / "server" / "page"
FILES = sorted(file.name for file in FOLDER.iterdir() if file.is_file())
PAGES = {"/": "index.html", "/compare": "compare.html"}
PREVIEW = "preview.html"
SCRIPTS = [name for name in FILES if name.endswith(".js")]


@pytest.mark.parametrize("path", PAGES)
def test_page_policy_lets_it_load_its_own_files_alone(http: httpx.Client, path: str) -> None:
    """A page is under a policy that lets it load its own files alone."""
    answer = http.get(path)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.text == (FOLDER / PAGES[path]).read_text()
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'self';")
    assert "unsafe" not in policy
    assert "require-trusted-types-for 'script'" in policy
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_all_that_the_page_and_its_scripts_name_is_there(http: httpx.Client) -> None:
    pages = "".join((FOLDER / name).read_text() for name in PAGES.values())
    named = set(re.findall(r'(?:href|src)="(page/[^"]+)"', pages))
    for name in SCRIPTS:
        text = (FOLDER / name).read_text()
        named |= {f"page/{other}" for other in re.findall(r'from "\./([^"]+)"', text)}
        named |= set(re.findall(r'\.src = "(page/[^"]+)"', text))
    named |= {f"page/{other}" for other in re.findall(r'src="([^"/]+)"', (FOLDER / PREVIEW).read_text())}
    assert named == {f"page/{name}" for name in FILES if name not in PAGES.values()}
    types = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml", ".html": "text/html"}
    for path in named:
        answer = http.get(f"/{path}")
        assert answer.status_code == 200
        assert answer.headers["content-type"].partition(";")[0] == types[Path(path).suffix]
        source = "'none'" if path.endswith(PREVIEW) else "'self'"
        assert f"default-src {source}" in answer.headers["content-security-policy"]
        assert answer.content == (FOLDER / Path(path).name).read_bytes()


def test_a_preview_is_of_another_origin_and_loads_nothing(http: httpx.Client) -> None:
    """Its own policy holds wherever it is framed: no origin of the server's, no request, no script but its own."""
    policy = http.get(f"/page/{PREVIEW}").headers["content-security-policy"].split("; ")
    assert {"default-src 'none'", "script-src 'self'", "sandbox allow-scripts", "frame-ancestors 'self'"} <= set(policy)
    remote = [rule for rule in policy if rule.startswith(("img", "font", "media", "connect", "frame-src", "style"))]
    assert remote == ["style-src 'unsafe-inline'", "img-src data:", "font-src data:"]


def test_a_file_that_a_browser_has_is_not_sent_again(http: httpx.Client) -> None:
    first = http.get("/page/chat.js")
    assert first.headers["cache-control"] == "no-cache"
    again = http.get("/page/chat.js", headers={"If-None-Match": f'"other", W/{first.headers["etag"]}'})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == first.headers["etag"]
    assert http.get("/page/chat.js", headers={"If-None-Match": '"other"'}).content == first.content
    assert http.get("/page/style.css").headers["etag"] != first.headers["etag"]


@pytest.mark.parametrize(
    "path", ["/page/", "/page/none.js", "/page/../app.py", "/page/%2e%2e/app.py", "/page/index.html", "/page/vendor/"]
)
def test_nothing_else_of_the_disk_is_served(http: httpx.Client, path: str) -> None:
    assert http.get(path).status_code == 404


def test_the_page_needs_no_key_where_everything_it_asks_for_does() -> None:
    from serving import serving
    from starlette.responses import PlainTextResponse
    from starlette.routing import Route

    from d3engine.server.app import guards
    from d3engine.server.middleware.access import OPEN_PATHS
    from d3engine.server.middleware.limits import AdmissionControl
    from d3engine.server.middleware.request_log import log_exchange
    from d3engine.server.middleware.settings import GuardSettings
    from d3engine.server.routes.api import PAGE_PATHS, PAGE_ROUTES

    def models(request: object) -> PlainTextResponse:
        return PlainTextResponse("models")

    keyed = GuardSettings(api_keys=("a-key-of-mine",))
    stack = guards(keyed, AdmissionControl(4), log_exchange, OPEN_PATHS | PAGE_PATHS)
    with serving(Starlette(routes=[Route("/v1/models", models), *PAGE_ROUTES], middleware=stack)) as address:
        assert httpx.get(f"{address}/v1/models").status_code == 401
        for path in PAGE_PATHS:
            assert httpx.get(f"{address}{path}").status_code == 200


@pytest.mark.parametrize("name", FILES)
def test_no_file_names_another_host_or_makes_markup_of_text(name: str) -> None:
    text = (FOLDER / name).read_text()
    assert re.findall(r"(?:https?:)?//[a-z0-9-]+\.[a-z.]+", text.replace("http://www.w3.org/2000/svg", "")) == []
    sinks = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|srcdoc|\beval\(|new Function|javascript:"
    assert re.findall(sinks, text) == []
    if name.endswith(".html"):
        assert re.findall(r"<style|style=|\son\w+=|<script(?![^>]*\ssrc=)", text) == []


def test_its_colours_are_those_of_the_terminal_and_the_pictures() -> None:
    from d3engine.research.plots import RAMP

    found = re.search(r"RAMP = \[(.*?)\]", (FOLDER / "colours.js").read_text())
    assert found is not None
    assert tuple(re.findall(r'"(#\w+)"', found[1])) == RAMP


def test_dark_depth_colours_get_lighter_and_stand_out() -> None:
    """Depth on the dark page gets ever lighter, and stands out from its ground and skipped layers."""
    found = re.search(r"RAMP_ON_DARK = \[(.*?)\]", (FOLDER / "colours.js").read_text())
    assert found is not None
    ramp = re.findall(r'"(#\w+)"', found[1])
    assert len(ramp) > 2
    assert [luminance(colour) for colour in ramp] == sorted({luminance(colour) for colour in ramp})
    colours = dict(re.findall(r"--([\w-]+): light-dark\(#\w{6}, (#\w{6})\);", (FOLDER / "style.css").read_text()))
    assert {"page", "ground", "skipped"} <= colours.keys()
    for name in ("page", "ground", "skipped"):
        assert contrast(ramp[0], colours[name]) >= 3, name
    for letters, ground in (("ink", "ground"), ("quiet", "ground"), ("quiet", "page"), ("error", "page")):
        assert contrast(colours[letters], colours[ground]) >= 4.5, letters
