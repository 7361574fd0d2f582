"""What a command line gets that cannot be read: one sentence with the option, what it must be, and what it got."""

import pytest
from invoking import invoke, refused

QUANTIZE = ("weights", "quantize", "demo", "nowhere")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("plan", "llama-2-7b"), "--gpus must be given: memory of each device, such as 80GB,80GB (or GiB)"),
        (("bridge", "inspect"), "FILE must be given: a file that d3engine bridge fit has written"),
        (("generate", "demo", "x", "--temperature", "hot"), "--temperature must be a number; got 'hot'"),
        (("generate", "demo", "x", "--max-tokens", "1.5"), "--max-tokens must be an integer; got '1.5'"),
        (("generate", "demo", "x", "--temprature", "1"), "there is no option --temprature (is it --temperature?)"),
        (("chat", "--model", "demo"), "there is no option --model: MODEL is an argument"),
        (("generate", "demo", "-p", "x"), "there is no option -p: PROMPT is an argument"),
        (("generate", "demo", "x", "--temperature"), "Option '--temperature' requires an argument"),
        ((*QUANTIZE, "--scheme", "int5"), "--scheme: 'int5' is not one of 'int8', 'int4', 'fp8'"),
    ],
)
def test_command_line_fault_is_one_line_with_its_help(words: tuple[str, ...], said: str) -> None:
    """A fault of a command line is one line that names the fault and the help."""
    line, end = refused(words).split("\n")
    assert end == ""
    fault, _, help_at = line.removeprefix("error: ").partition("; see ")
    assert fault == said
    command = words[:2] if words[0] in ("weights", "bridge", "depth") else words[:1]
    assert help_at.endswith(f" {' '.join(command)} --help")


@pytest.mark.parametrize("group", [(), ("weights",), ("weights", "convert"), ("analyze",)])
def test_an_unknown_command_is_told_the_commands_that_there_are(group: tuple[str, ...]) -> None:
    listed = invoke((*group, "--help")).stdout.partition("Commands:")[2]
    names = [line.split()[0] for line in listed.splitlines() if line[:2] == "  " and line[2:3].strip()]
    said = f"error: COMMAND must be one of {', '.join(names)}; got 'nosuch'\n"
    assert refused((*group, "nosuch")) == said


def test_a_group_alone_shows_its_help_and_no_error() -> None:
    result = invoke(("weights", "convert"))
    assert "Commands:" in result.output
    assert "error: " not in result.output
