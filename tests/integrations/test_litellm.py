"""LiteLLM against our server; it reads errors by their words, and must find its own in ours."""

import json
import os
from typing import Any

import agents
import pytest

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it asks for one from elsewhere
pytest.importorskip("litellm", reason="litellm is not installed: make test-with-litellm does it")

import litellm

QUESTION = "Tom has 5 pens."
TURNS = [{"role": "user", "content": QUESTION}]


@pytest.fixture(scope="module")
def asked(url: str) -> dict[str, Any]:
    return {"model": "openai/demo", "api_base": url, "api_key": "none", "num_retries": 0}


def test_chats_are_answered_whole_and_in_pieces(asked: dict[str, Any]) -> None:
    whole: Any = litellm.completion(messages=TURNS, temperature=0, max_tokens=24, **asked)
    chunks: Any = litellm.completion(messages=TURNS, temperature=0, max_tokens=24, stream=True, **asked)
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert len(pieces) > 1
    assert "".join(pieces) == whole.choices[0].message.content
    assert whole.usage.completion_tokens > 0


def test_completions_are_answered(asked: dict[str, Any]) -> None:
    found: Any = litellm.text_completion(prompt=QUESTION, temperature=0, max_tokens=8, **asked)
    assert found.choices[0].text


def test_errors_are_those_that_its_users_catch(asked: dict[str, Any]) -> None:
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(messages=TURNS, **asked | {"model": "openai/gpt-4"})
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=[{"role": "user", "content": "Tom " * 3000}], **asked)
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(messages=TURNS, top_p=5, **asked)


def test_an_agent_calls_three_times_and_then_answers() -> None:
    messages: list[Any] = [{"role": "user", "content": agents.QUESTION}]
    tools = [{"type": "function", "function": agents.FUNCTION}]
    num_calls = 0
    with agents.agent_server() as address:
        asked: dict[str, Any] = {"model": "openai/demo", "api_base": f"{address}/v1", "api_key": "none"}
        while True:
            answer: Any = litellm.completion(
                messages=messages, tools=tools, max_tokens=agents.MAX_TOKENS, temperature=0, **asked
            )
            message = answer.choices[0].message
            if not message.tool_calls:
                break
            num_calls += len(message.tool_calls)
            messages.append(message)
            for call in message.tool_calls:
                result = agents.added(json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    assert num_calls == agents.NUM_CALLS
    assert message.content
