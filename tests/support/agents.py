"""A server whose model calls a function until it has three results, for the agent loops of clients.
AGENT_MODEL names another model than the bundled one; it then chooses the arguments, and the same holds it to calls."""

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from demo_server import InHermesFormat, serving_demo
from json_schemas import closed

MODEL = os.environ.get("AGENT_MODEL", "demo")
NUM_CALLS = 3
MAX_TOKENS = 300
QUESTION = "Use the function add to compute 1 + 2, then 3 + 4, then 5 + 6. Then say that you are done."
ADD = closed({"a": {"type": "integer", "minimum": 0, "maximum": 9}, "b": {"enum": [2, 4, 6]}})
FUNCTION: dict[str, Any] = {"name": "add", "description": "The sum of two numbers", "parameters": ADD}


def added(arguments: Any) -> str:
    """The result of a call, whose arguments satisfy the schema."""
    assert arguments["a"] in range(10)
    assert arguments["b"] in (2, 4, 6)
    return str(arguments["a"] + arguments["b"])


@contextmanager
def agent_server() -> Iterator[str]:
    """Where it answers."""
    from msgspec import structs

    from d3engine import AsyncEngine
    from d3engine.server.requests import chat
    from d3engine.server.requests.formats import ToolFormat

    made, plain = ToolFormat.grammar, chat.tool_use_of

    def tool_use_of(asked: Any, style: Any) -> Any:
        if sum(message.get("role") == "tool" for message in asked.messages) >= NUM_CALLS:
            return plain(structs.replace(asked, tool_choice="none"), style)
        with patch.object(
            ToolFormat, "grammar", lambda own, calls: made(own, replace(calls, is_auto=False, several=False))
        ):
            return plain(asked, style)

    engine = AsyncEngine(MODEL, device="cpu", kv_cache_memory_bytes=2**25 if MODEL == "demo" else 2**28)
    try:
        client: Any = InHermesFormat(engine) if MODEL == "demo" else engine
        with patch.object(chat, "tool_use_of", tool_use_of), serving_demo(client) as url:
            yield url
    finally:
        asyncio.run(engine.close())
