"""Depth over the API: how a request asks for it, who may, and what is told of it."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from untimed import untimed

from d3engine import D3, FullDepth, SamplingParams
from d3engine.depth import DepthPolicy
from d3engine.server.errors import RequestError
from d3engine.server.requests.sampling import MOST_KNOWN, DepthPolicies
from d3engine.server.settings import ServerSettings

SHALLOW = {"policy": "d3", "alpha": 0.6, "start": 0.5}
ASKED: dict[str, Any] = {"max_tokens": 40}


def depths(answer: Any) -> list[int]:
    found: list[int] = answer.choices[0].model_extra["d3ext"]["depths"]
    return found


@pytest.mark.parametrize(
    ("model", "header", "depth", "policy"),
    [
        ("demo", None, None, None),
        ("demo", None, "auto", None),
        ("demo", None, "full", FullDepth()),
        ("demo", None, {"policy": "full"}, FullDepth()),
        ("demo", None, SHALLOW, D3(alpha=0.6, start=0.5)),
        ("demo", "full", None, FullDepth()),
        ("demo", json.dumps(SHALLOW), None, D3(alpha=0.6, start=0.5)),
        ("demo", "full", "full", FullDepth()),
        ("demo-full", None, None, FullDepth()),
        ("demo-full", None, "auto", FullDepth()),
        ("demo", None, "demo-full", FullDepth()),
    ],
    ids=str,
)
def test_a_request_chooses_its_depth_by_field_header_or_model(
    openai: Any, demo: Any, question: str, model: str, header: str | None, depth: Any, policy: DepthPolicy | None
) -> None:
    extra: dict[str, Any] = {"return_depths": True} | ({} if depth is None else {"depth": depth})
    headers = {} if header is None else {"X-D3-Depth": header}
    answer = openai.completions.create(model=model, prompt=question, **ASKED, extra_body=extra, extra_headers=headers)
    params = SamplingParams(temperature=0, max_tokens=40, depth=policy)
    (expected,) = demo.generate(question, params, use_tqdm=False)
    assert answer.choices[0].text == expected.outputs[0].text
    assert depths(answer) == expected.outputs[0].depths
    assert answer.model == model
    assert answer.model_extra["d3ext"]["certified"] == (policy in (None, FullDepth()))
    assert answer.model_extra["d3ext"]["policy"] == (policy or demo.depth).describe()


def test_nothing_is_said_of_depth_unasked(http: httpx.Client, question: str) -> None:
    answer = http.post("/v1/completions", json={"prompt": question, "depth": "full"}).json()
    assert "d3ext" not in answer
    assert "d3ext" not in answer["choices"][0]


def test_what_depth_saved_adds_up_to_the_engines_own_count(openai: Any, demo: Any, question: str) -> None:
    extra = {"return_depths": True, "depth": SHALLOW}
    sampled: dict[str, Any] = {"n": 2, "temperature": 1.0, "seed": 5, "max_tokens": 30}
    answer = openai.completions.create(model="demo", prompt=question, **sampled, extra_body=extra)
    before = demo.stats().kv_bytes_saved_at_end
    params = SamplingParams(depth=D3(alpha=0.6, start=0.5), **sampled)
    (expected,) = demo.generate(question, params, use_tqdm=False)
    all_depths = [depth for output in expected.outputs for depth in output.depths]
    found = answer.model_extra["d3ext"]
    assert (found["num_layers"], found["layers_run"]) == (16, sum(all_depths))
    assert found["layers_saved"] == 16 * len(all_depths) - sum(all_depths) > 0
    assert found["mean_layers"] == pytest.approx(sum(all_depths) / len(all_depths))
    assert found["kv_bytes_saved"] == demo.stats().kv_bytes_saved_at_end - before > 0


def test_decode_seconds_are_reported_whole_and_streamed(openai: Any, question: str) -> None:
    """The time of an answer after its first token is reported in a stream too."""
    asked: dict[str, Any] = {"model": "demo", "prompt": question, "temperature": 0}
    asked["extra_body"] = {"return_depths": True}
    whole = openai.completions.create(**asked, max_tokens=30)
    *_, last = openai.completions.create(**asked, max_tokens=30, stream=True)
    only = openai.completions.create(**asked, max_tokens=1)
    for answer in (whole, last):
        assert answer.model_extra["d3ext"]["decode_seconds"] > 0
    assert only.model_extra["d3ext"]["decode_seconds"] == 0


@pytest.mark.parametrize("stop", [None, " ="])
def test_token_offsets_are_those_of_each_tokens_text(openai: Any, demo: Any, question: str, stop: str | None) -> None:
    """Offsets say which letters each token wrote, whether streamed or whole."""
    extra = {"return_depths": True, "return_token_ids": True}
    asked: dict[str, Any] = {"model": "demo", "prompt": question, "extra_body": extra, "stop": stop, **ASKED}
    whole = openai.completions.create(**asked)
    (choice,) = whole.choices
    ids, found = choice.model_extra["token_ids"], choice.model_extra["d3ext"]
    texts = [demo.get_tokenizer().convert_id_to_token(token) or "" for token in ids]
    ends = [*found["token_offsets"][1:], None]
    for text, begin, end in zip(texts, found["token_offsets"], ends, strict=True):
        shown = choice.text[begin:end]
        assert text.replace("\u2581", " ").startswith(shown)
    streamed: dict[str, list[int]] = {"depths": [], "token_offsets": []}
    summaries = []
    for chunk in openai.completions.create(**asked, stream=True):
        for name, values in chunk.choices[0].model_extra["d3ext"].items():
            streamed[name] += values
        summaries.append((chunk.model_extra or {}).get("d3ext"))
    assert streamed == found
    assert [untimed(one) for one in summaries if one is not None] == [untimed(whole.model_extra["d3ext"])]
    assert summaries[-1] is not None


# -- what is allowed -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("depth", "code"),
    [
        ("d3", "invalid_depth"),  # without its options
        ({"policy": "d3", "alpha": 2, "start": 0.5}, "invalid_depth"),
        ({"policy": "d3", "alpha": 0.9, "start": 0.5, "beta": 1}, "invalid_depth"),
        ({"alpha": 0.9, "start": 0.5}, "depth_not_allowed"),
        ({"policy": ["d3"]}, "depth_not_allowed"),
        ("tail-skip", "depth_not_allowed"),
        ({"policy": "speculative", "draft_model": "/etc"}, "depth_not_allowed"),
        ({"policy": "table", "rows": [[True]]}, "depth_not_allowed"),
        ({"policy": "installed_package", "x": 1}, "depth_not_allowed"),
        ({"policy": "d3", "alpha": {"policy": "speculative"}, "start": 0.5}, "depth_not_allowed"),
    ],
    ids=str,
)
def test_a_depth_that_is_malformed_or_not_allowed_is_refused(refusal: Any, depth: Any, code: str) -> None:
    status, error = refusal("/v1/completions", {"prompt": "Tom", "depth": depth})
    assert (status, error["param"], error["code"]) == (400, "depth", code)


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        ({"depth": "full"}, {"X-D3-Depth": json.dumps(SHALLOW)}),
        ({"model": "demo-full", "depth": SHALLOW}, {}),
        ({}, {"X-D3-Depth": "{"}),
        ({"depth": 5}, {}),
    ],
    ids=str,
)
def test_depths_that_disagree_or_are_none_are_refused(
    refusal: Any, body: dict[str, Any], headers: dict[str, str]
) -> None:
    status, error = refusal("/v1/completions", {"prompt": "Tom"} | body, headers=headers)
    assert (status, error["param"]) == (400, "depth")


def test_a_path_from_a_client_opens_no_file(http: httpx.Client, question: str, tmp_path: Path) -> None:
    path = tmp_path / "bridges.safetensors"
    path.write_bytes(b"opened, it would be called no file of bridges")
    depth = {**SHALLOW, "bridges": str(path)}
    answer = http.post("/v1/completions", json={"prompt": question, "depth": depth})
    assert answer.status_code == 400
    assert 'bridges must be "auto", or what the engine\'s own policy names' in answer.json()["error"]["message"]


def policies(**changes: Any) -> DepthPolicies:
    return DepthPolicies(ServerSettings(model_names=("m",), **changes), D3(alpha=0.8, start=0.7))


def test_a_policy_inside_of_another_must_be_allowed_too() -> None:
    found = policies(allow_depth=("d3", "lossless"))
    inner = {"policy": "d3", "alpha": 0.9, "start": 0.5}
    assert found.read("m", {"policy": "lossless", "draft": inner}, None) is not None
    with pytest.raises(RequestError) as caught:
        found.read("m", {"policy": "lossless", "draft": {"policy": "table", "rows": [[True]]}}, None)
    assert caught.value.code == "depth_not_allowed"


def test_locked_depth_allows_the_own_depth_and_aliases_alone() -> None:
    """A locked server takes its own depth and its aliases only."""
    found = policies(lock_depth=True, depth_aliases={"m-full": FullDepth()})
    own = D3(alpha=0.8, start=0.7).describe()
    assert [found.read("m", asked, None) for asked in (None, "auto", own)] == [None, None, None]
    assert found.read("m-full", None, None) == FullDepth()
    assert found.read("m", None, "m-full") == FullDepth()
    for asked in ("full", SHALLOW):
        with pytest.raises(RequestError) as caught:
            found.read("m", asked, None)
        assert caught.value.code == "depth_locked"


def test_only_so_many_different_policies_are_at_work_at_once() -> None:
    found = policies(max_depth_policies=2, depth_aliases={"m-full": FullDepth()})
    first, second, third = (D3(alpha=alpha, start=0.5) for alpha in (0.9, 0.8, 0.7))
    with found.at_work(first), found.at_work(second), found.at_work(first):
        with found.at_work(None), found.at_work(FullDepth()):
            pass
        with pytest.raises(RequestError) as caught, found.at_work(third):
            pass
        assert caught.value.status == 429
        assert int(caught.value.headers["Retry-After"]) > 0
    with found.at_work(third), found.at_work(second):
        pass


def test_few_depths_are_remembered_by_their_very_spelling() -> None:
    """A depth that was read is known again if it is spelled the same, and few are remembered."""
    known = policies(allow_depth=("d3",))
    asked = {"policy": "d3", "alpha": 1, "start": 0.5}
    assert known.read("m", asked, None) == known.read("m", dict(asked), None) == D3(alpha=1, start=0.5)
    with pytest.raises(RequestError, match="alpha must be"):
        known.read("m", asked | {"alpha": True}, None)
    for nth in range(200):
        start = 0.5 + nth / 1000
        assert known.read("m", {"policy": "d3", "alpha": 0.9, "start": start}, None) == D3(alpha=0.9, start=start)
    assert len(known._known) == MOST_KNOWN
