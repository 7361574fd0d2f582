"""LlamaIndex against our server: completions and chats, whole and streamed."""

import httpx
import pytest
from demo_server import said

pytest.importorskip(
    "llama_index.llms.openai_like", reason="llama-index is not installed: make test-with-clients does it"
)

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

QUESTION = "Tom has 5 pens. Tom finds 3. How many pens does Tom have now?"


@pytest.mark.parametrize("is_chat", [True, False])
def test_whole_and_streamed_answers_are_the_servers(url: str, is_chat: bool) -> None:
    model = OpenAILike(
        model="demo", api_base=url, api_key="none", temperature=0, max_tokens=24, is_chat_model=is_chat, max_retries=0
    )
    if is_chat:
        wanted = said(url, [{"role": "user", "content": QUESTION}], temperature=0, max_tokens=24)
        assert model.chat([ChatMessage(role="user", content=QUESTION)]).message.content == wanted
        streamed = [one.delta for one in model.stream_chat([ChatMessage(role="user", content=QUESTION)])]
    else:
        body = {"model": "demo", "prompt": QUESTION, "temperature": 0, "max_tokens": 24}
        answer = httpx.post(f"{url}/completions", json=body, timeout=120).json()
        wanted = answer["choices"][0]["text"]
        assert model.complete(QUESTION).text == wanted
        streamed = [one.delta for one in model.stream_complete(QUESTION)]
    # In how many pieces depends on how busy the machine is: what waits goes together.
    assert "".join(piece or "" for piece in streamed) == wanted
