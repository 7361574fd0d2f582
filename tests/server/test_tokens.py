"""/tokenize, /detokenize and /tokenizer_info: the model's own tokenizer over HTTP."""

from typing import Any

import httpx
import pytest

from d3engine import Engine

MESSAGES = [{"role": "user", "content": "Tom has 5 pens."}]
TEXT = "Tom has 5 pens, caf\u00e9 \U0001f600"


@pytest.mark.parametrize("special", [True, False])
def test_a_text_becomes_its_tokens_and_they_become_it_again(http: httpx.Client, demo: Engine, special: bool) -> None:
    asked = {"prompt": TEXT, "add_special_tokens": special, "return_token_strs": True}
    found = http.post("/tokenize", json=asked).json()
    ids = demo.get_tokenizer().encode(TEXT, add_special_tokens=special)
    assert (found["tokens"], found["count"], found["max_model_len"]) == (ids, len(ids), 1024)
    assert found["token_strs"] == [demo.get_tokenizer().convert_id_to_token(token) for token in ids]
    back = http.post("/detokenize", json={"tokens": ids}).json()["prompt"]
    assert back == demo.get_tokenizer().decode(ids, skip_special_tokens=False)
    assert back.removeprefix("<s>").strip() == TEXT


def test_a_conversation_becomes_the_prompt_that_a_chat_has(http: httpx.Client, demo: Engine) -> None:
    found = http.post("/tokenize", json={"messages": MESSAGES}).json()["tokens"]
    assert found == demo.chat_prompt(MESSAGES)["prompt_token_ids"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [768]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
    ],
    ids=str,
)
def test_what_cannot_be_encoded_is_refused_by_name(refusal: Any, path: str, body: dict[str, Any], param: str) -> None:
    status, error = refusal(path, body)
    assert (status, error["param"]) == (400, param)


def test_the_harness_can_use_it_as_its_remote_tokenizer(url: str) -> None:
    from lm_eval.utils import RemoteTokenizer, check_remote_tokenizer_support

    address = f"{url}/v1/completions"
    assert check_remote_tokenizer_support(address)
    tokenizer = RemoteTokenizer(address)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    assert tokenizer.decode(tokenizer.encode("Tom has")) == "Tom has"
