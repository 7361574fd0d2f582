"""The bundled model behind a real server, for clients that are tried against it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from serving import serving

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %} {{ call.function.name }}{{ call.function.arguments | tojson }}"
    "{% endfor %}\n{% endfor %}{% if tools %}{{ tools | tojson }}\n{% endif %}Answer:"
)
"""One that knows of tools; the bundled model's own refuses them."""


class WithTools:
    """An engine whose chats are written by that template."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def chat_prompt(self, messages: Any, **more: Any) -> Any:
        """The prompt of a conversation."""
        return await self._client.chat_prompt(messages, **more | {"chat_template": TEMPLATE})


HERMES = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}{{ message.role }}: "
    "{{ message.content }}{% for call in message.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}\n{% endfor %}Answer:"
)


class InHermesFormat(WithTools):
    """The same in the format of Hermes and Qwen."""

    async def chat_prompt(self, messages: Any, **more: Any) -> Any:
        """The prompt of a conversation."""
        return await self._client.chat_prompt(messages, **more | {"chat_template": HERMES})


@contextmanager
def demo_server(*, with_tools: bool = False, **arguments: Any) -> Iterator[str]:
    """Where it answers; the arguments are `AsyncEngine`'s."""
    from d3engine import AsyncEngine
    from d3engine.server.app import create_app
    from d3engine.server.settings import ServerSettings

    engine = AsyncEngine("demo", device="cpu", kv_cache_memory_bytes=2**25, **arguments)
    try:
        client: Any = WithTools(engine) if with_tools else engine
        with serving(create_app(client, ServerSettings(model_names=("demo",)))) as url:
            yield url
    finally:
        asyncio.run(engine.close())
