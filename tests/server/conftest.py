"""One server for all tests: the bundled model behind a real uvicorn, and the official client.

As in all such files, what imports Triton waits for a fixture: `tests/conftest.py` first says how Triton is to run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from openai import OpenAI

if TYPE_CHECKING:
    from d3engine import AsyncEngine, Engine

QUESTION = "Question: Tom has 5 pens. Tom finds 3. Tom buys 2. How many pens does Tom have now?\nAnswer:"


@pytest.fixture(scope="session")
def demo() -> Iterator[Engine]:
    """The bundled model in an engine of the test's own: what it says is what the server must say."""
    from d3engine import Engine

    with Engine("demo", device="cpu", kv_cache_memory_bytes=2**25) as engine:
        yield engine


@pytest.fixture(scope="session")
def client() -> Iterator[AsyncEngine]:
    """The engine behind the server."""
    from d3engine import AsyncEngine

    engine = AsyncEngine("demo", device="cpu", kv_cache_memory_bytes=2**25)
    yield engine
    asyncio.run(engine.close())


@pytest.fixture(scope="session")
def url(client: AsyncEngine) -> Iterator[str]:
    """Where the server answers."""
    from serving import serving

    from d3engine import FullDepth
    from d3engine.server.app import create_app
    from d3engine.server.settings import ServerSettings

    settings = ServerSettings(model_names=("demo",), depth_aliases={"demo-full": FullDepth()}, max_depth_policies=2)
    with serving(create_app(client, settings)) as address:
        yield address


@pytest.fixture(scope="session")
def openai(url: str) -> Iterator[OpenAI]:
    """OpenAI's own client; it gives up at the first error."""
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="session")
def http(url: str) -> Iterator[httpx.Client]:
    """For what OpenAI's client would not send, and for what it hides."""
    with httpx.Client(base_url=url, timeout=120) as made:
        yield made


@pytest.fixture(scope="session")
def question() -> str:
    return QUESTION


@pytest.fixture(scope="session")
def refusal(http: httpx.Client) -> Any:
    """`refusal(path, body)` -> (status, error): what a request that is refused is told."""

    def ask(path: str, body: Any, **more: Any) -> tuple[int, dict[str, Any]]:
        answer = http.post(path, json=body, **more)
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}, error
        assert error["message"].endswith(".")
        return answer.status_code, error

    return ask
