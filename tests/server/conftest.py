"""One server for all tests: the bundled model behind a real uvicorn, and clients of it or of a module's own `url`.
As in all such files, what imports Triton waits for a fixture: `tests/conftest.py` first says how Triton is to run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest

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
    from demo_server import demo_engine

    with demo_engine() as engine:
        yield engine


@pytest.fixture(scope="session")
def url(client: AsyncEngine) -> Iterator[str]:
    """Where the server answers."""
    from demo_server import serving_demo

    from d3engine import FullDepth

    with serving_demo(client, depth_aliases={"demo-full": FullDepth()}, max_depth_policies=2) as address:
        yield address


@pytest.fixture(scope="module")
def openai(url: str) -> Iterator[Any]:
    """OpenAI's own client."""
    from demo_server import openai_of

    with openai_of(url) as made:
        yield made


@pytest.fixture(scope="module")
def anthropic(url: str) -> Iterator[Any]:
    """Anthropic's own client."""
    from demo_server import anthropic_of

    with anthropic_of(url) as made:
        yield made


@pytest.fixture(scope="module")
def http(url: str) -> Iterator[httpx.Client]:
    """For what OpenAI's client would not send, and for what it hides."""
    with httpx.Client(base_url=url, timeout=120) as made:
        yield made


@pytest.fixture(scope="session")
def question() -> str:
    return QUESTION


@pytest.fixture(scope="module")
def refusal(http: httpx.Client) -> Any:
    """`refusal(path, body)` -> (status, error): what a request that is refused is told."""

    def ask(path: str, body: Any, **more: Any) -> tuple[int, dict[str, Any]]:
        answer = http.post(path, json=body, **more)
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}, error
        assert error["message"].endswith(".")
        return answer.status_code, error

    return ask
