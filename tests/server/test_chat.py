"""POST /v1/chat/completions by OpenAI's own client: a conversation in, what the engine says of it out."""

from typing import Any

import httpx
import pytest
from bad_values import bad_values
from demo_server import serving_demo
from openai import BadRequestError
from untimed import untimed

from d3engine import AsyncEngine, SamplingParams

QUESTION = "Tom has 5 pens. Tom finds 3. Tom buys 2. How many pens does Tom have now?"
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
ASKED: dict[str, Any] = {"model": "demo", "messages": MESSAGES}


def expected_of(demo: Any, **params: Any) -> Any:
    """What the engine says of the conversation."""
    (output,) = demo.chat(MESSAGES, SamplingParams(**({"temperature": 0, "max_tokens": None} | params)), use_tqdm=False)
    return output


def test_an_answer_is_the_engines_without_the_space_before_it(openai: Any, demo: Any) -> None:
    answer = openai.chat.completions.create(**ASKED)
    expected = expected_of(demo)
    (choice,) = answer.choices
    assert (choice.message.role, choice.finish_reason, choice.index) == ("assistant", "stop", 0)
    assert choice.message.content == expected.outputs[0].text.removeprefix(" ")
    assert choice.message.content == "Adding 3 makes 5 + 3 = 8. Adding 2 makes 8 + 2 = 10. #### 10"
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert answer.usage.completion_tokens == len(expected.outputs[0].token_ids)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_the_length_may_be_bounded_by_its_new_name_and_its_old(openai: Any, name: str) -> None:
    answer = openai.chat.completions.create(**ASKED, **{name: 4})
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 4


def test_a_streamed_chat_is_the_whole_one_with_a_role_first(openai: Any) -> None:
    sampled: dict[str, Any] = {"n": 2, "temperature": 1.0, "seed": 3, "max_tokens": 20}
    whole = openai.chat.completions.create(**ASKED, **sampled)
    stream = openai.chat.completions.create(**ASKED, **sampled, stream=True, stream_options={"include_usage": True})
    *chunks, last = list(stream)
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in [*chunks, last]}) == 1
    assert last.object == "chat.completion.chunk"
    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    for choice in whole.choices:
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == choice.index]
        assert "".join(one.delta.content or "" for one in own) == choice.message.content
        assert [one.delta.role for one in own] == ["assistant"] + [None] * (len(own) - 1)
        assert [one.finish_reason for one in own] == [None] * (len(own) - 1) + [choice.finish_reason]
        assert not own[0].delta.content


def test_log_probabilities_have_bytes_that_join_to_the_answer(openai: Any, demo: Any) -> None:
    whole = openai.chat.completions.create(**ASKED, logprobs=True, top_logprobs=2).choices[0]
    expected = expected_of(demo, logprobs=2).outputs[0]
    found = whole.logprobs.content or []
    rows = list(zip(expected.token_ids, expected.logprobs, strict=True))
    assert [one.logprob for one in found] == [row[token].logprob for token, row in rows]
    joined = b"".join(bytes(one.bytes or []) for one in found).decode()
    assert joined == f" {whole.message.content}</s>"
    for one, (_, row) in zip(found, rows, strict=True):
        best = sorted(row.values(), key=lambda known: known.rank)[:2]
        assert [(top.token, top.logprob) for top in one.top_logprobs] == [(k.decoded_token, k.logprob) for k in best]
    chunks = openai.chat.completions.create(**ASKED, logprobs=True, top_logprobs=2, stream=True)
    told = [chunk.choices[0].logprobs.content or [] for chunk in chunks if chunk.choices[0].logprobs is not None]
    assert [one for content in told for one in content] == found
    alone = openai.chat.completions.create(**ASKED, logprobs=True).choices[0].logprobs
    assert [one.top_logprobs for one in alone.content or []] == [[]] * len(found)


def test_a_message_can_be_continued_where_it_ends(openai: Any) -> None:
    begun = "Adding 3 makes 5 + 3 = 8."
    messages = [*MESSAGES, {"role": "assistant", "content": begun}]
    extra = {"continue_final_message": True}
    answer = openai.chat.completions.create(model="demo", messages=messages, extra_body=extra)
    assert answer.choices[0].message.content == " Adding 2 makes 8 + 2 = 10. #### 10"


def test_a_content_may_be_a_list_of_texts(openai: Any) -> None:
    parts: list[Any] = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]
    answer = openai.chat.completions.create(model="demo", messages=parts)
    assert answer.choices[0].message.content == openai.chat.completions.create(**ASKED).choices[0].message.content


def test_depth_is_told_in_a_chat_as_in_a_completion(openai: Any, demo: Any) -> None:
    extra = {"return_depths": True, "return_token_ids": True, "depth": "full"}
    answer = openai.chat.completions.create(**ASKED, extra_body=extra)
    choice, whole = answer.choices[0], answer.model_extra
    found = choice.model_extra["d3ext"]
    assert set(found["depths"]) == {16}
    assert whole["d3ext"]["mean_layers"] == 16
    assert whole["prompt_token_ids"] == expected_of(demo).prompt_token_ids
    content = choice.message.content or ""
    pieces = [demo.get_tokenizer().convert_id_to_token(token) or "" for token in choice.model_extra["token_ids"]]
    for piece, begin, end in zip(pieces, found["token_offsets"], [*found["token_offsets"][1:], None], strict=True):
        assert content[begin:end] in (piece.replace("\u2581", " "), piece.removeprefix("\u2581"), "")
    chunks = list(openai.chat.completions.create(**ASKED, extra_body=extra, stream=True))
    told = [chunk.choices[0].model_extra["d3ext"] for chunk in chunks[1:]]
    assert [offset for one in told for offset in one["token_offsets"]] == found["token_offsets"]
    assert untimed(chunks[-1].model_extra["d3ext"]) == untimed(whole["d3ext"])


def test_chat_template_of_a_request_is_used_where_trusted(client: AsyncEngine, openai: Any) -> None:
    """A request may bring a chat template where the server's owner trusts it."""
    body = ASKED | {"chat_template": "{{ messages[0].content }}\nAnswer:", "max_tokens": 8}
    with serving_demo(client, trust_request_chat_template=True) as address:
        found = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=120).json()
    assert found["choices"][0]["message"]["content"]
    bare = openai.completions.create(
        model="demo", prompt=f"{QUESTION}\nAnswer:", max_tokens=8, extra_body={"add_special_tokens": False}
    )
    assert bare.choices[0].text.removeprefix(" ") == found["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        *bad_values(messages=[None, "Tom"], logprobs=[2], top_logprobs=[2], max_completion_tokens=[0]),
        *bad_values(chat_template=["{{ 1 }}"], chat_template_kwargs=[{"messages": []}], reasoning_effort=["high"]),
        *bad_values(tool_choice=["required"], functions=[[]], response_format=[{"type": "json_schema"}], store=[True]),
        *bad_values(modalities=[["text", "audio"]], audio=[{}], prediction=[{}], verbosity=["low"]),
        *bad_values(web_search_options=[{}]),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ],
    ids=str,
)
def test_a_chat_that_cannot_be_honoured_names_the_field(refusal: Any, changes: dict[str, Any], param: str) -> None:
    status, error = refusal("/v1/chat/completions", ASKED | changes)
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)


def test_chat_too_long_conversation_gets_openais_error_code(openai: Any) -> None:
    """A conversation that is too long gets OpenAI's error code."""
    with pytest.raises(BadRequestError) as caught:
        openai.chat.completions.create(model="demo", messages=[{"role": "user", "content": "Tom " * 2000}])
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
    with pytest.raises(BadRequestError) as both:
        openai.chat.completions.create(**ASKED, max_completion_tokens=1020)
    assert (both.value.code, both.value.param) == ("context_length_exceeded", "max_completion_tokens")
