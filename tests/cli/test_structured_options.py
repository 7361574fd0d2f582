"""The flags that hold answers to a form."""

import json
import re
from pathlib import Path

import pytest
from invoking import invoke, refused, succeed

SMALL = ["--max-num-seqs", "4", "--kv-cache-memory-bytes", str(2**24), "--device", "cpu", "--raw-prompt", "-q"]


def words(*arguments: str) -> list[str]:
    return ["generate", "demo", *arguments, *SMALL]


def test_every_flag_of_a_form_holds_the_answers_to_it(tmp_path: Path) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text(json.dumps({"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}))
    grammar.write_text('start: "<" ("a" | "b") ">"\n')
    shown = [
        succeed(words("Say:", *flags)).stdout.strip()
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
        (["--json-schema", __file__], "--json-schema must be a file with a JSON schema, which is a JSON object ("),
        (["--regex", ""], "--regex must be text of 1 to"),
        (["--choice", "a", "--choice", "a"], "--choice must be a list of"),
        (["--regex", "a", "--min-tokens", "3"], "--min-tokens must be 0"),
    ],
)
def test_what_is_no_form_is_refused_by_the_flags_name(flags: list[str], message: str) -> None:
    assert message in refused(words("Say:", *flags))


@pytest.mark.parametrize(
    ("flag", "content", "allowed"),
    [
        ("--json-schema", '["SECRET"]', "a file with a JSON schema, which is a JSON object (this one holds a list)"),
        ("--json-schema", '"SECRET"', "a file with a JSON schema, which is a JSON object (this one holds a text)"),
        ("--json-schema", "17", "a file with a JSON schema, which is a JSON object (this one holds a number)"),
        ("--json-schema", "null", "a file with a JSON schema, which is a JSON object (this one holds null)"),
        (
            "--json-schema",
            '{"SECRET": ',
            "a file with a JSON schema, which is a JSON object (this one is not valid JSON: ",
        ),
        (
            "--json-schema",
            '{"SECRET": 1, "SECRET": 2}',
            "a file with a JSON schema, which is a JSON object (this one is not valid JSON)",
        ),
        ("--json-schema", '{"type": 5, "title": "SECRET"}', "a file with a JSON schema to answer by ("),
        ("--json-schema", '{"title": "' + "SECRET" * 20_000 + '"}', "a file with a JSON schema: an object"),
        ("--grammar", "SECRET: (((", "a file with a grammar to answer by ("),
        ("--grammar", "", "a file with text of 1 to 65536 characters"),
    ],
    ids=lambda text: text[:20],
)
def test_file_that_is_no_form_is_named_not_poured_out(flag: str, content: str, allowed: str, tmp_path: Path) -> None:
    file = tmp_path / "form"
    file.write_text(content)
    stderr = refused(words("Say:", flag, str(file)))
    assert stderr.startswith(f"error: {flag} must be {allowed}")
    assert stderr.endswith(f"; got {str(file)!r}\n")
    assert "SECRET" not in stderr


def test_a_form_that_cannot_be_compiled_is_refused_by_its_flag() -> None:
    asked = words("--regex", "(?=a)b")
    without_prompt = [word for word in asked if word != "--raw-prompt"]
    for given in (words("Say:", "--regex", "(?=a)b"), without_prompt):
        result = invoke(given)  # whose stdout may have the problem of the demo
        assert result.exit_code == 2
        assert "error: --regex must be a regular expression to answer by (" in result.stderr
