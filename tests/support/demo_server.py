"""The bundled model behind a real server, for clients that are tried against it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from serving import HANG_SECONDS, serving

from d3engine.errors import EngineDeadError

if TYPE_CHECKING:
    from d3engine import AsyncEngine

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %} {{ call.function.name }}{{ call.function.arguments | tojson }}"
    "{% endfor %}\n{% endfor %}{% if tools %}{{ tools | tojson }}\n{% endif %}Answer:"
)
"""One that knows of tools; the bundled model's own refuses them."""


TURNS = [{"role": "user", "content": "Tom has 5 pens."}]
LEAST: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Tom has", "max_tokens": 1},
    "/v1/chat/completions": {"messages": TURNS, "max_tokens": 1},
    "/v1/responses": {"input": "Tom has", "max_output_tokens": 1},
    "/v1/messages": {"messages": TURNS, "max_tokens": 1},
}
"""The least that each route can be asked for."""


class Around:
    """An engine of which a test changes a method or two."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


class Dying(Around):
    """An engine that ends after its first output."""

    async def generate(self, *asked: Any, **more: Any) -> AsyncIterator[Any]:
        """The first output of a request, and the end."""
        async for output in self._client.generate(*asked, **more):
            yield output
            raise EngineDeadError("a secret")


class WithTools(Around):
    """An engine whose chats are written by that template."""

    template = TEMPLATE

    async def chat_prompt(self, messages: Any, **more: Any) -> Any:
        """The prompt of a conversation."""
        return await self._client.chat_prompt(messages, **more | {"chat_template": self.template})


HERMES = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}{{ message.role }}: "
    "{{ message.content }}{% for call in message.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}\n{% endfor %}Answer:"
)


class InHermesFormat(WithTools):
    """The same in the format of Hermes and Qwen."""

    template = HERMES


def call_at_once(monkeypatch: pytest.MonkeyPatch, **changes: bool) -> None:
    """Let a model that may call a function do so: the bundled one begins no call by itself."""
    from d3engine.server.requests.formats import ToolFormat

    made = ToolFormat.grammar
    monkeypatch.setattr(ToolFormat, "grammar", lambda own, asked: made(own, replace(asked, is_auto=False, **changes)))


def openai_of(address: str) -> Any:
    """OpenAI's own client of a server; it gives up at the first error."""
    from openai import OpenAI

    return OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


def anthropic_of(address: str) -> Any:
    """Anthropic's own client of a server, which takes two seconds to import."""
    from anthropic import Anthropic

    return Anthropic(base_url=address, api_key="none", max_retries=0)


def said(url: str, messages: Any, **body: Any) -> str:
    """What a chat completion says, of a server whose routes of OpenAI are under `url`."""
    asked = {"model": "demo", "messages": messages, **body}
    answer = httpx.post(f"{url}/chat/completions", json=asked, timeout=HANG_SECONDS).json()
    found: str = answer["choices"][0]["message"]["content"]
    return found


@contextmanager
def serving_demo(engine: Any, **settings: Any) -> Iterator[str]:
    """Where a server of this engine answers, as "demo" unless `ServerSettings` name it otherwise."""
    from d3engine.server.app import create_app
    from d3engine.server.settings import ServerSettings

    settings = {"model_names": ("demo",)} | settings
    with serving(create_app(engine, ServerSettings(**settings))) as address:
        yield address


@contextmanager
def demo_engine(**arguments: Any) -> Iterator[AsyncEngine]:
    """The bundled model; the arguments are `AsyncEngine`'s."""
    from d3engine import AsyncEngine

    arguments = {"kv_cache_memory_bytes": 2**25} | arguments
    engine = AsyncEngine("demo", device="cpu", **arguments)
    try:
        yield engine
    finally:
        asyncio.run(engine.close())


@contextmanager
def demo_server(*, with_tools: bool = False, **arguments: Any) -> Iterator[str]:
    """Where it answers; the arguments are `AsyncEngine`'s."""
    with demo_engine(**arguments) as engine, serving_demo(WithTools(engine) if with_tools else engine) as url:
        yield url
