"""llama.cpp's routes: its names, and the same tokens as a completion's."""

import json
from typing import Any

import httpx
import pytest

from d3engine import Engine

PROMPT = "Tom has 5 pens."
GREEDY: dict[str, Any] = {"temperature": 0, "n_predict": 8}


def completion(http: httpx.Client, **body: Any) -> Any:
    return http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 8, **body}).json()["choices"][0]


@pytest.mark.parametrize("path", ["/completion", "/completions"])
def test_a_completion_is_that_of_openais_route(http: httpx.Client, path: str) -> None:
    wanted = completion(http, temperature=0, return_token_ids=True)
    found = http.post(path, json={"prompt": PROMPT, **GREEDY}).json()
    assert (found["content"], found["tokens"]) == (wanted["text"], wanted["token_ids"])
    assert (found["stop"], found["stop_type"], found["tokens_predicted"]) == (True, "limit", 8)
    assert found["timings"]["predicted_n"] == 8
    assert found["generation_settings"]["n_predict"] == 8


def test_a_stream_ends_with_all_fields_and_without_done(http: httpx.Client) -> None:
    wanted = completion(http, temperature=0)["text"]
    text = http.post("/completion", json={"prompt": PROMPT, "stream": True, **GREEDY}).text
    events = [json.loads(line.removeprefix("data: ")) for line in text.split("\n") if line.startswith("data: ")]
    assert "[DONE]" not in text
    assert "".join(event["content"] for event in events) == wanted
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    assert "timings" in events[-1]


def test_a_stream_has_every_token_and_its_probabilities(http: httpx.Client) -> None:
    """A token whose whole text may begin a stop word is told when it comes."""
    asked = {"prompt": PROMPT, "n_probs": 1, **GREEDY}
    whole = http.post("/completion", json=asked).json()
    stop = [f"{row['token']}never" for row in whole["completion_probabilities"][1:5]]
    text = http.post("/completion", json={**asked, "stop": stop, "stream": True}).text
    events = [json.loads(line.removeprefix("data: ")) for line in text.split("\n") if line.startswith("data: ")]
    assert "".join(event["content"] for event in events) == whole["content"]
    assert [token for event in events for token in event["tokens"]] == whole["tokens"]
    rows = [row["id"] for event in events for row in event.get("completion_probabilities", ())]
    assert rows == whole["tokens"]


def test_sampling_fields_go_by_both_names(http: httpx.Client) -> None:
    ours = {"temperature": 0.9, "seed": 3, "top_k": 9, "min_p": 0.01, "logit_bias": {"7": 2.0, "9": -100.0}}
    wanted = completion(http, repetition_penalty=1.3, max_tokens=16, **ours)["text"]
    theirs = ours | {"repeat_penalty": 1.3, "n_predict": 16, "logit_bias": [[7, 2.0], [9, False]]}
    off = {"mirostat": 0, "typical_p": 1.0, "dynatemp_range": 0, "xtc_probability": 0, "cache_prompt": True}
    assert http.post("/completion", json={"prompt": PROMPT, **theirs, **off}).json()["content"] == wanted


def test_a_prompt_of_texts_and_tokens(http: httpx.Client, demo: Engine) -> None:
    tokenizer = demo.get_tokenizer()
    ids = tokenizer.encode("Tom has")
    wanted = completion(http, temperature=0, prompt=[*ids, *tokenizer.encode(" 5 pens.", add_special_tokens=False)])
    assert http.post("/completion", json={"prompt": [*ids, " 5 pens."], **GREEDY}).json()["content"] == wanted["text"]
    whole = completion(http, temperature=0)["text"]
    assert http.post("/completion", json={"prompt": [PROMPT], **GREEDY}).json()["content"] == whole


def test_stop_words_probabilities_and_no_token_at_all(http: httpx.Client) -> None:
    whole = http.post("/completion", json={"prompt": PROMPT, **GREEDY}).json()["content"]
    found = http.post("/completion", json={"prompt": PROMPT, "stop": [whole[3:5]], **GREEDY}).json()
    assert (found["stop_type"], found["stopping_word"]) == ("word", whole[3:5])
    rows = http.post("/completion", json={"prompt": PROMPT, "n_probs": 2, **GREEDY}).json()["completion_probabilities"]
    assert len(rows) == 8
    assert all(len(row["top_logprobs"]) == 2 and row["top_logprobs"][0]["id"] == row["id"] for row in rows)
    none = http.post("/completion", json={"prompt": PROMPT, "n_predict": 0}).json()
    assert (none["content"], none["tokens"], none["tokens_predicted"]) == ("", [], 0)


def test_answers_keep_to_gbnf_and_to_json_schemas(http: httpx.Client) -> None:
    grammar = 'root ::= "yes" | "no" ws\nws ::= [ ]{0,3}'
    found = http.post("/completion", json={"prompt": PROMPT, "grammar": grammar, "n_predict": -1}).json()["content"]
    assert found.strip() in ("yes", "no")
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9, "minimum": 0}}, "required": ["n"]}
    body = {"prompt": PROMPT, "json_schema": schema | {"additionalProperties": False}}
    assert set(json.loads(http.post("/completion", json=body).json()["content"])) == {"n"}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/completion", {"prompt": PROMPT, "mirostat": 2}, "mirostat"),
        ("/completion", {"prompt": PROMPT, "n_predict": -5}, "n_predict"),
        ("/completion", {"prompt": PROMPT, "grammar": "root ::= ("}, "grammar"),
        ("/completion", {"prompt": PROMPT, "grammar": 'root ::= "a"', "json_schema": {}}, "grammar"),
        ("/completion", {"prompt": PROMPT, "logit_bias": [["word", 1]]}, "logit_bias"),
        ("/completion", {"prompt": PROMPT, "repeat_last_n": 64, "repeat_penalty": 1.1}, "repeat_last_n"),
        ("/completion", {"prompt": PROMPT, "n_probs": 10**6}, "n_probs"),
        ("/completion", {"prompt": PROMPT, "n": 2}, "n"),
        ("/completion", {"prompt": ["Tom has", "Ann has"]}, "prompt"),
        ("/completion", {}, "prompt"),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}, "input_suffix"),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix"),
        ("/v1/completions", {"prompt": "a", "input_extra": [{"filename": "b", "text": "c"}]}, "input_extra"),
        ("/tokenize", {"content": "a", "parse_special": False}, "parse_special"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(refusal: Any, path: str, body: Any, field: str) -> None:
    status, error = refusal(path, body)
    assert (status, error["param"]) == (400, field)


def test_fields_of_editors_without_a_counterpart_are_named(http: httpx.Client) -> None:
    body = {"prompt": PROMPT, "samplers": ["top_k", "infill"], "t_max_predict_ms": 500, "n_indent": 0, "novel": 1}
    answer = http.post("/completion", json={**body, **GREEDY})
    assert answer.headers["X-D3-Ignored-Fields"] == "samplers, t_max_predict_ms, novel"


def test_texts_become_tokens_and_come_back(http: httpx.Client, demo: Engine) -> None:
    tokenizer = demo.get_tokenizer()
    ids = tokenizer.encode(PROMPT, add_special_tokens=False)
    assert http.post("/tokenize", json={"content": PROMPT}).json()["tokens"] == ids
    with_bos = http.post("/tokenize", json={"content": PROMPT, "add_special": True}).json()
    assert with_bos["tokens"] == tokenizer.encode(PROMPT)
    asked = {"content": PROMPT, "with_pieces": True, "return_token_strs": True}
    found = http.post("/tokenize", json=asked).json()
    assert found["tokens"] == [{"id": i, "piece": s} for i, s in zip(ids, found["token_strs"], strict=True)]
    text = http.post("/detokenize", json={"tokens": ids}).json()
    assert text == {"prompt": text["content"], "content": text["content"]}
    assert text["content"].strip() == PROMPT


def test_the_template_is_applied(http: httpx.Client, demo: Engine) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    ids = demo.chat_prompt(messages)["prompt_token_ids"]
    expected = demo.get_tokenizer().decode(ids, skip_special_tokens=False)
    assert http.post("/apply-template", json={"messages": messages}).json() == {"prompt": expected}


def test_the_depth_of_an_answer_is_chosen_and_told(http: httpx.Client) -> None:
    depth = {"policy": "d3", "alpha": 0.9, "start": 0.6}
    wanted = completion(http, temperature=0, depth=depth)["text"]
    found = http.post("/completion", json={"prompt": PROMPT, "depth": depth, "return_depths": True, **GREEDY}).json()
    assert found["content"] == wanted
    assert found["d3ext"]["policy"]["alpha"] == 0.9
    options = {"temperature": 0, "num_predict": 8, "depth": depth, "return_depths": True}
    body = {"model": "demo", "prompt": PROMPT, "raw": True, "stream": False, "options": options}
    answer = http.post("/api/generate", json=body).json()
    assert (answer["response"], answer["d3ext"]["policy"]["alpha"]) == (wanted, 0.9)


def test_props_and_slots(http: httpx.Client) -> None:
    props = http.get("/props").json()
    slots = http.get("/slots").json()
    assert props["total_slots"] == len(slots)
    assert props["default_generation_settings"]["n_ctx"] == slots[0]["n_ctx"]
    params = props["default_generation_settings"]["params"]
    assert (params["temperature"], params["n_predict"], params["dry_base"], params["repeat_penalty"]) == (
        0,
        -1,
        1.75,
        1,
    )
    assert None not in params.values()
    assert props["model_alias"] == "demo"
    assert props["d3ext"] == {"chat_defaults": {}}  # its generation_config.json says how to sample it
    assert not any(slot["is_processing"] for slot in slots)
