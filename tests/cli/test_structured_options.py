"""The flags that hold answers to a form."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from d3engine.cli import app

SMALL = ["--max-num-seqs", "4", "--kv-cache-memory-bytes", str(2**24), "--device", "cpu", "--raw-prompt", "-q"]


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["generate", "demo", *arguments, *SMALL])


def test_every_flag_of_a_form_holds_the_answers_to_it(tmp_path: Path) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text(json.dumps({"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}))
    grammar.write_text('start: "<" ("a" | "b") ">"\n')
    shown = [
        run("Say:", *flags).stdout.strip()
        for flags in (
            ["--json-schema", str(schema)],
            ["--grammar", str(grammar)],
            ["--regex", "[xy]{3}!"],
            ["--choice", "yes", "--choice", "no"],
        )
    ]
    first, second, third, fourth = shown
    assert [type(value) for value in json.loads(first)] == [bool, bool]
    assert second in ("<a>", "<b>")
    assert re.fullmatch("[xy]{3}!", third)
    assert fourth in ("yes", "no")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--regex", "a", "--choice", "b"], "--regex, --choice must be one alone"),
        (["--json-schema", "/nowhere.json"], "--json-schema must be a regular file"),
        (["--json-schema", __file__], "--json-schema must be a JSON schema"),
        (["--regex", ""], "--regex must be text of 1 to"),
        (["--choice", "a", "--choice", "a"], "--choice must be a list of"),
        (["--regex", "a", "--min-tokens", "3"], "min_tokens must be 0"),
    ],
)
def test_what_is_no_form_is_refused_by_the_flags_name(flags: list[str], message: str) -> None:
    result = run("Say:", *flags)
    assert result.exit_code == 2
    assert message in result.output
