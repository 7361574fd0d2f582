"""curl against our server, as the docs write it: whole answers, streams, and an exit status for errors."""

import json
import shutil
import subprocess

import pytest

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed: Debian's package curl")
JSON = ["-H", "Content-Type: application/json"]
HANG_SECONDS = "120"


def curl(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["curl", "-sS", "--max-time", HANG_SECONDS, *arguments], capture_output=True, text=True)


def test_an_answer_is_whole_or_comes_as_events(address: str) -> None:
    body = {"model": "demo", "prompt": "Tom has 5 pens.", "max_tokens": 8, "temperature": 0}
    whole = json.loads(curl(f"{address}/v1/completions", *JSON, "-d", json.dumps(body)).stdout)
    events = curl("-N", f"{address}/v1/completions", *JSON, "-d", json.dumps(body | {"stream": True})).stdout
    *data, done, end = [line.removeprefix("data: ") for line in events.split("\n\n")]
    assert (done, end) == ("[DONE]", "")
    assert "".join(json.loads(one)["choices"][0]["text"] for one in data) == whole["choices"][0]["text"]


def test_what_curl_sends_by_itself_is_no_json_and_is_told_so(address: str) -> None:
    told = curl("--fail-with-body", f"{address}/v1/completions", "-d", '{"prompt": "Tom"}')
    assert told.returncode == 22
    assert "Content-Type: application/json" in json.loads(told.stdout)["error"]["message"]
