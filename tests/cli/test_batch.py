"""`d3engine batch`: one run, one that goes on where it was ended, and what is refused before a model is loaded."""

import json
from pathlib import Path
from typing import Any

import pytest
from invoking import invoke, refused

QUESTION = "Question: Tom has {} pens. Tom finds 3. How many pens does Tom have now?\nAnswer:"
ENGINE = ["--device", "cpu", "--threads", "1", "--kv-cache-memory-bytes", str(2**24)]


def request(name: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {"max_tokens": 8, **body}}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    lines = [request(str(nth), prompt=QUESTION.format(nth), model="deep", return_depths=True) for nth in range(6)]
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def run(*words: object) -> Any:
    return invoke(["batch", *map(str, words)])


def test_a_batch_is_answered_and_goes_on_where_it_was_ended(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    first = run(source, target, *ENGINE, "--depth-alias", "deep=full")
    assert first.exit_code == 0, first.output
    assert "6 lines, and a result for each; 6 answered now, 0 told why not" in first.stderr
    results = {line["custom_id"]: line["response"] for line in map(json.loads, target.read_text().splitlines())}
    assert sorted(results) == list("012345")
    for response in results.values():
        assert set(response["body"]["choices"][0]["d3ext"]["depths"]) == {16}

    whole = target.read_bytes()
    target.write_bytes(whole[: whole.rindex(b'{"id"') + 40])
    with source.open("a") as file:
        file.write("no JSON\n" + json.dumps(request("bad", prompt="x", temperature=-1)) + "\n")
    second = run(source, target, *ENGINE, "--depth-alias", "deep=full")
    assert second.exit_code == 1
    assert "5 of 8 lines have their results" in second.stderr
    assert "8 lines, and a result for each; 1 answered now, 2 told why not" in second.stderr
    lines = [json.loads(line) for line in target.read_text().splitlines()]
    (unnamed,) = [line for line in lines if line["custom_id"] is None]
    assert unnamed["error"]["code"] == "invalid_line"
    (bad,) = [line for line in lines if line["custom_id"] == "bad"]
    assert bad["response"]["status_code"] == 400
    again = {line["custom_id"]: line["response"] for line in lines}
    assert [again[name]["body"]["choices"] for name in "012345"] == [results[i]["body"]["choices"] for i in "012345"]

    third = run(source, target, *ENGINE, "--depth-alias", "deep=full")
    assert third.exit_code == 0
    assert "8 of 8 lines have their results" in third.stderr


def test_what_cannot_be_is_refused_before_a_model_is_loaded(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    twice = tmp_path / "twice.jsonl"
    twice.write_text("\n".join(json.dumps(request(name, prompt="x")) for name in "aba"))
    mine = tmp_path / "mine.txt"
    mine.write_text("a letter")
    for words, said in [
        ((tmp_path / "none", target), "IN must be a regular file that is there"),
        (("/dev/stdin", target), "IN must be a regular file"),
        ((source, source), "OUT must be another file than IN"),
        ((source, mine), "OUT must be a new file"),
        ((twice, target), "custom_id must be another in each line, since results are known by it; got \"'a' in lines"),
        ((source, target, "--model", "/does/not/exist"), "/does/not/exist"),
        ((source, target, "--allow-depth", "speculative"), "--allow-depth must be"),
        ((source, target, "--ray-engines", "0"), "--ray-engines must be an integer of at least 1; got 0"),
    ]:
        stderr = refused(["batch", *map(str, words)])
        assert said in stderr
        assert len(stderr.splitlines()) == 1
    assert mine.read_text() == "a letter"
