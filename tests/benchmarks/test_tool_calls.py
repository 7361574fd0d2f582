"""The benchmark of tool calls counts what parses and what satisfies its schema."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from benchmark_reports import report_of

from benchmarks import tool_calls

pytest.importorskip("llguidance")
ASKED = json.loads(tool_calls.FILE.read_text())


def choice(*calls: tuple[str, str], reason: str = "tool_calls") -> dict[str, Any]:
    called = [{"function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    return {"message": {"content": None, "tool_calls": called}, "finish_reason": reason}


def test_tools_are_twelve_sound_schemas_and_sixty_prompts() -> None:
    """There are twelve functions of sound schemas, and sixty prompts."""
    assert len(ASKED["tools"]) == 12
    assert len({one["prompt"] for one in ASKED["prompts"]}) == 60
    names = {tool["function"]["name"] for tool in ASKED["tools"]}
    assert {one["function"] for one in ASKED["prompts"]} == {*names, None}
    for tool in ASKED["tools"]:
        jsonschema.Draft202012Validator.check_schema(tool["function"]["parameters"])


def test_calls_are_counted_by_what_is_wrong_with_them() -> None:
    counts: Counter[str] = Counter()
    prompt = {"prompt": "Oslo?", "function": "get_weather"}
    answers = [
        choice(("get_weather", '{"city": "Oslo"}')),
        choice(("get_weather", '{"city": 5}'), ("set_timer", '{"seconds": 5}')),
        choice(("get_weather", '{"city": "Os')),
        choice(("other", "{}")),
        choice(("get_weather", '{"city": "Oslo"}'), ("set_timer", '{"sec'), reason="length"),
        choice(reason="stop"),
    ]
    rows = [tool_calls.judged(prompt, answer, ASKED["tools"], counts) for answer in answers]
    assert [row.get("fault", "")[:7] for row in rows] == ["", "5 is no", "no JSON", "no such", "", ""]
    assert counts == {
        "prompts": 6,
        "answers with calls": 5,
        "answers cut within a call": 1,
        "calls": 6,
        "calls that parse": 5,
        "calls that are valid": 3,
        "answers that call the right function": 4,
    }


def test_prompts_are_asked_whole_and_as_streams(tmp_path: Path) -> None:
    report = report_of(tool_calls.main, tmp_path, "demo", "--prompts=2", "--max-tokens=6")
    assert report["counts"]["prompts"] == 2
    assert all(row["text"] for row in report["answers"])  # its template refuses tools
