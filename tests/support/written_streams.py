"""A server of the page whose streams a test writes, byte by byte."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

from serving import HANG_SECONDS
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

NUM_LAYERS = 8
HOSTILE = "<img src=x onerror=\"document.title='broken'\"><script>document.title='broken'</script>\u202e&amp;\x00"
D3_POLICY = {"policy": "d3", "alpha": 0.9, "start": 0.5, "tail": 0}
D3_CARD = {"num_layers": NUM_LAYERS, "depth": D3_POLICY, "certified": True}


class Script:
    """What the scripted server says, and what it has heard."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.thinks_seconds = 0.0
        self.waits_at_the_end = False
        self.error: tuple[int, str] | None = None
        self.key: str | None = None
        self.model_ids = ["scripted"]
        self.d3ext: dict[str, Any] = D3_CARD
        self.bodies: list[dict[str, Any]] = []
        self.left = threading.Event()
        self.title: list[bytes] = []
        self.titles_wait = False
        self.title_begins = threading.Semaphore(0)
        self.title_ends = threading.Semaphore(0)

    async def models(self, request: Request) -> Response:
        if self.key is not None and request.headers.get("authorization") != f"Bearer {self.key}":
            return _error(401, "An API key is missing.")
        card = {"object": "model", "parent": None, "max_model_len": 1000, "d3ext": self.d3ext}
        return JSONResponse({"object": "list", "data": [{**card, "id": name} for name in self.model_ids]})

    async def tokenizer_info(self, request: Request) -> Response:
        return JSONResponse({"chat_template": "{{ messages }}"})

    async def completions(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        if self.error is not None:
            return _error(*self.error)
        pieces = self._title() if is_for_title(body) else self._stream()
        return StreamingResponse(pieces, media_type="text/event-stream")

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

    async def _title(self) -> AsyncIterator[bytes]:
        self.title_begins.release()
        try:
            for piece in self.title:
                yield piece
            if self.titles_wait:
                await asyncio.sleep(HANG_SECONDS)
        finally:
            self.title_ends.release()


Scripted = tuple[str, Script]


def is_for_title(body: dict[str, Any]) -> bool:
    """Whether a request of the page is for a title."""
    return body.get("priority") == 1


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": "", "param": None, "code": None}}, status)


def chunk(text: str, depths: list[int], offsets: list[int], ids: list[int], finish: str | None = None) -> bytes:
    """One event of a chat."""
    delta = {"content": text}
    extra = {"depths": depths, "token_offsets": offsets}
    choice = {"index": 0, "delta": delta, "token_ids": ids, "d3ext": extra, "finish_reason": finish}
    return f"data: {json.dumps({'choices': [choice]}, ensure_ascii=False)}\n\n".encode()


def delta(finish: str | None = None, **fields: Any) -> bytes:
    """One event of a chat with any fields of a delta."""
    choice = {"index": 0, "delta": fields, "finish_reason": finish}
    return f"data: {json.dumps({'choices': [choice]}, ensure_ascii=False)}\n\n".encode()


DONE = b"data: [DONE]\n\n"


def whole(text: str) -> list[bytes]:
    """A stream of one answer."""
    return [delta(content=text, finish="stop"), DONE]
