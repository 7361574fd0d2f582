"""Options of the release before, and how many a reader of the help has to look through."""

import re

import pytest
from invoking import invoke, refused

from d3engine.cli.commands import with_new_names


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        (["--admission-waves", "4", "x"], ["--admission-interval", "4", "x"]),
        (["--header-timeout=3", "--port", "1"], ["--timeout", "header=3", "--port", "1"]),
        (["--", "--admission-waves", "4"], ["--", "--admission-waves", "4"]),
        (["--admission-waves"], ["--admission-interval", ""]),
    ],
)
def test_old_option_is_read_and_noted(typed: list[str], read: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert with_new_names(typed) == read
    assert ("old name goes with the next release" in capsys.readouterr().err) == (typed != read)


@pytest.mark.parametrize(
    ("flag", "place"),
    [
        ("--alpha", "d3 alpha=... start=..."),
        ("--exit-batch", "early-exit threshold=... exit-batch=..."),
        ("--policy", "POLICY option=value"),
        ("--depth-option", "POLICY option=value"),
    ],
)
def test_option_of_a_policy_is_refused_with_its_place(flag: str, place: str) -> None:
    stderr = refused(["generate", "demo", "x", flag, "1"])
    assert stderr.startswith(f'error: there is no option {flag} any more: write --depth "{place}"')


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (["header"], "header of --timeout must be a number of seconds; got ''"),
        (["head=3"], "--timeout must be NAME=SECONDS, with one of header, body.*; got 'head=3'"),
        (["body=3", "body=4"], "--timeout must be given once for body; got 'body=4'"),
        (["shutdown=-1"], r"shutdown of --timeout must be .*; got -1"),
    ],
)
def test_timeout_that_is_none_is_refused(given: list[str], complaint: str) -> None:
    stderr = refused(["serve", "demo", *(word for text in given for word in ("--timeout", text))])
    assert re.search(complaint, stderr), stderr


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "batch", "eval"])
def test_help_has_at_most_fifty_options_under_headings(command: str) -> None:
    text = invoke([command, "--help"]).stdout
    assert len(re.findall(r"^  (?:-\w, )?--", text, flags=re.MULTILINE)) <= 50
    assert {"Depth:", "Memory:", "Advanced:"} <= set(text.splitlines())
