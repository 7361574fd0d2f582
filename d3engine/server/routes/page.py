"""GET / and what it loads: the page on which people watch depth.

The one idea: the page is a client like any other. Its files say nothing of a model, so they need no key; whatever it
shows it asks the routes for, with the key of whoever sits before it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from d3engine.server.routing import Route

FOLDER = Path(__file__).parent.parent / "page"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # kept, and asked for by its ETag before each use
}


def _files() -> dict[str, Path]:
    """Path of a URL -> the file there. The page itself is at /, what it loads under /page/."""
    loaded = sorted(file for file in FOLDER.iterdir() if file.suffix in TYPES and file.name != "index.html")
    return {"/": FOLDER / "index.html"} | {f"/page/{file.name}": file for file in loaded}


def _endpoint(file: Path) -> Callable[[Request], Awaitable[Response]]:
    content = file.read_bytes()
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = HEADERS | {"ETag": tag}

    async def show(request: Request) -> Response:
        known = [each.strip().removeprefix("W/") for each in request.headers.get("if-none-match", "").split(",")]
        if tag in known or known == ["*"]:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=TYPES[file.suffix])

    return show


PAGE_ROUTES = tuple(Route(path, _endpoint(file), methods=["GET"]) for path, file in _files().items())
PAGE_PATHS = frozenset(route.path for route in PAGE_ROUTES)
"""What answers without a key."""
