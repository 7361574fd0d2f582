"""How every command ends: exit codes, closed, full and poor streams, Ctrl-C; what -v and -q tell; quick help."""

import io
import json
import logging
import os
import re
import signal
import struct
import subprocess
import sys
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import pytest
from invoking import invoke

from d3engine import Engine, SamplingParams
from d3engine.cli.answers import Run, _pace
from d3engine.cli.commands import ExitCode, code_of
from d3engine.cli.depth_options import OPTIONS, OWN_NAMES
from d3engine.cli.engine_options import ENGINE, UNLISTED
from d3engine.depth.policy import POLICIES, policy_class, policy_options
from d3engine.engine.model_directory import FETCHED
from d3engine.errors import (
    D3EngineError,
    EngineDeadError,
    FailedError,
    InvalidValueError,
    MissingExtraError,
    ModelFormatError,
)
from d3engine.model import weights
from d3engine.utils.progress import bar_columns, hides_bars

SCHEDULE = ["schedule", "--layers", "8", "--depth", "full"]
GENERATE = ["generate", "demo", "Question:", "--max-tokens", "2", "--device", "cpu", "--max-num-seqs", "2"]


def run(*arguments: str) -> Any:
    return invoke(arguments, env={"FORCE_COLOR": None, "COLORTERM": None})


def process(*arguments: str, shell: str = '"$@"', env: dict[str, str] | None = None, **settings: Any) -> Any:
    """A command as a process of its own, started by a shell that may redirect its streams."""
    command = ["bash", "-c", shell, "bash", sys.executable, "-m", "d3engine", *arguments]
    environment = {**os.environ, **(env or {})}
    return subprocess.run(command, capture_output=True, env=environment, check=False, **settings)


# -- streams ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("arguments", [SCHEDULE, ["--help"]])
def test_a_full_stdout_is_one_line_and_exit_code_1(arguments: list[str]) -> None:
    result = process(*arguments, shell='"$@" > /dev/full')
    assert (result.returncode, result.stderr) == (1, b"error: stdout: No space left on device\n")


@pytest.mark.parametrize("words", [SCHEDULE, ["generate", "demo", "--max-tokens", "2", "--device", "cpu", "-q"]])
def test_a_reader_who_has_gone_ends_a_command_without_a_word(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "d3engine", *words]
    result = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (result.returncode, result.stderr) == (ExitCode.PIPE_CLOSED, b"")


def test_closed_streams_end_no_command() -> None:
    assert process(*SCHEDULE, shell='"$@" <&- >&- 2>&-').returncode == 0


def test_a_character_that_stdout_cannot_show_is_spelled_out() -> None:
    code = "from d3engine.cli.streams import prepare_streams; prepare_streams(); print('8 \\u2014 \\xe9')"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, check=True)
    assert result.stdout == b"8 \\u2014 \\xe9\n"


def test_utf_8_is_read_as_such_in_a_locale_of_ascii() -> None:
    code = (
        "import sys; from d3engine.cli.streams import given_text, prepare_streams; prepare_streams(); "
        "print(ascii([given_text(sys.argv[1]), sys.stdin.read()]))"
    )
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", code, "Größe?"]
    result = subprocess.run(command, input="é".encode(), capture_output=True, env=environment, check=True)
    assert result.stdout.decode().strip() == ascii(["Größe?", "é"])


def test_a_prompt_that_is_no_utf_8_is_refused_by_name() -> None:
    result = run("generate", "demo", "\udcff")
    assert result.exit_code == 2
    assert result.stderr == "error: PROMPT must be UTF-8 text; got '\\udcff'\n"


# -- exit codes ------------------------------------------------------------------------------------------------------


def test_errors_of_input_are_2_and_those_on_the_way_1() -> None:
    for error in (
        InvalidValueError("n", 0, "more"),
        ModelFormatError("x"),
        MissingExtraError("a", "b"),
        D3EngineError(),
    ):
        assert code_of(error) == 2
    for error in (EngineDeadError("x"), FailedError("x")):
        assert code_of(error) == 1


def test_every_exit_code_is_in_the_docs() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "errors.md").read_text()
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", text, re.M)} == {int(code) for code in ExitCode}


def ending_of(find_spec: str) -> tuple[int, str, str]:
    """How a command ends whose imports ask a finder with this body first: exit status, stdout and stderr."""
    code = (
        "import signal, sys, time, weakref\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"{indent(dedent(find_spec), ' ' * 8)}\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        f"sys.argv = ['d3engine', *{SCHEDULE!r}]\n"
        "from d3engine.cli import main\n"
        "main()\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return result.returncode, result.stdout, result.stderr


@pytest.mark.parametrize("where", ["d3engine.cli.streams", "d3engine.cli.commands", "d3engine.cli.schedule", "numpy"])
def test_ctrl_c_while_importing_ends_in_one_word_and_130(where: str) -> None:
    found = ending_of(f"if name == {where!r}: signal.raise_signal(signal.SIGINT)")
    assert found == (130, "", "interrupted\n")


def test_ctrl_c_that_a_callback_swallows_ends_the_command() -> None:
    """Python drops a Ctrl-C that comes in a callback of a weak reference; it is delivered again."""
    found = ending_of("""\
        if name != 'd3engine.cli.schedule': return
        one = type('Any', (), {})()
        ref = weakref.ref(one, lambda _: signal.raise_signal(signal.SIGINT))
        del one
        for _ in range(2000): time.sleep(0.01)""")
    assert found == (130, "", "interrupted\n")


def test_ctrl_c_in_any_command_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("d3engine.cli.schedule._policy", lambda *_: signal.raise_signal(signal.SIGINT))
    result = run(*SCHEDULE)
    assert (result.exit_code, result.stderr) == (130, "interrupted\n")


def test_a_file_that_cannot_be_written_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise OSError(28, "No space left on device", "a.json")

    monkeypatch.setattr("d3engine.cli.schedule._policy", fails)
    result = run(*SCHEDULE)
    assert (result.exit_code, result.stderr) == (1, "error: a.json: No space left on device\n")


# -- help ------------------------------------------------------------------------------------------------------------


def test_help_shows_each_engine_option_with_its_default() -> None:
    """The help shows each option of the engine with its default."""
    text = " ".join(run("generate", "--help").stdout.split())
    for shown in (
        "--device TEXT",
        "Maximum sequences that run at once [default: 64].",
        "--enable-prefix-caching",
        "[default: on].",
        "[default: the model's, or what fits the memory].",
    ):
        assert shown in text, shown
    for name, (flag, _, told) in ENGINE.items():
        assert "[default: " in told, name
        assert (flag.split("/")[0] in text) == (name not in UNLISTED)


def test_defaults_in_the_help_are_those_of_the_policies() -> None:
    defaults: dict[str, set[str]] = {}
    for name in POLICIES:
        for field in policy_class(name).__dataclass_fields__.values():  # type: ignore[attr-defined]
            defaults.setdefault(field.name, set()).add(
                f"{field.default:g}" if isinstance(field.default, float) else str(field.default).lower()
            )
    checked = set()
    for option, (_, _, text) in OPTIONS.items():
        told = re.search(r"\[default: ([a-z_]+|[\d.]+)[\];]", text)
        if told:
            checked.add(option)
            assert told[1] in defaults[option], option
    assert {"warmup", "confidence", "decay", "min_layer", "every", "batch", "draft_length"} <= checked


def test_every_field_of_a_policy_has_help() -> None:
    assert {field for name in OWN_NAMES for field in policy_options(name)} == set(OPTIONS)


def test_what_is_a_number_is_called_one() -> None:
    text = " ".join(run("generate", "--help").stdout.split())
    for flag in ("--temperature", "--gpu-memory-utilization"):
        assert f"{flag} NUMBER" in text
    assert "--max-num-seqs INTEGER" in text
    for command in ("generate", "chat", "eval", "calibrate", "schedule"):
        kinds = re.findall(r"--[a-z-]+ <(\w+)[>\[]", run(command, "--help").stdout)
        assert not {"int", "float", "str", "path", "list"} & set(kinds), "a kind of value has one name everywhere"
    assert run("schedule", "--layers", "9", "--depth", "d3 alpha=0.9 start=1/3").exit_code == 0
    refused = run("schedule", "--layers", "9", "--depth", "d3 alpha=0.9 start=low").stderr
    assert refused == (
        "error: --depth 'd3 alpha=0.9 start=low': start must be a finite number, or a fraction as text such as '1/3'; "
        "got 'low'\n"
    )


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["analyze", "schedule", "demo", "--alpha", "7"], "--alpha"),
        (["calibrate", "demo", "--out", "d3.json", "--start", "7"], "--start"),
        (["calibrate", "demo", "--out", "d3.json", "--tail", "-7"], "--tail"),
        (["schedule", "--layers", "9", "--depth", "d3 alpha=7 start=0.5"], "--depth 'd3 alpha=7 start=0.5': alpha"),
    ],
)
def test_an_error_names_the_flag_that_was_typed(words: list[str], flag: str) -> None:
    assert run(*words).stderr.startswith(f"error: {flag} must be ")


# -- what is told ----------------------------------------------------------------------------------------------------


def test_quiet_keeps_stdout_alone_and_verbose_adds_to_stderr() -> None:
    """`-q` leaves stdout alone, and `-v` adds to stderr what the engine does."""
    plain, quiet, verbose, most = (run(*GENERATE, *flags) for flags in ([], ["-q"], ["-v"], ["-vv"]))
    assert plain.stdout == quiet.stdout == verbose.stdout == most.stdout
    assert quiet.stderr == ""
    assert "tokens/s" in plain.stderr or "s per token" in plain.stderr
    assert "KV cache: " not in plain.stderr.replace("KV cache saved: ", "")
    assert re.search(r"16 layers, [\w ]+ on cpu", verbose.stderr)
    assert plain.stderr.count("depth from d3.json") == verbose.stderr.count("depth from d3.json") == 1
    assert "debug: " not in verbose.stderr
    assert "debug: prompt-0: " in most.stderr
    assert run(*GENERATE, "-q", "-v").exit_code == 2


def test_a_warning_of_the_package_is_on_stderr_unless_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    warn = logging.getLogger("d3engine.some.module").warning
    monkeypatch.setattr("d3engine.cli.schedule._policy", lambda *_: warn("careful") or 1 / 0)
    assert run(*SCHEDULE).stderr == "warning: careful\n"
    assert run(*SCHEDULE, "-q").stderr == ""


def test_bars_are_hidden_by_a_quiet_logger(capsys: pytest.CaptureFixture[str]) -> None:
    """Every bar follows the level of the logger, that of `generate` in a program too."""
    logger = logging.getLogger("d3engine")
    before = logger.level
    try:
        logger.setLevel(logging.WARNING)
        assert hides_bars() is None
        logger.setLevel(logging.ERROR)
        assert hides_bars() is True
        with Engine("demo", max_model_len=64) as engine:
            engine.generate("Tom", SamplingParams(max_tokens=1))
            assert capsys.readouterr().err == ""
            logger.setLevel(logging.WARNING)
            engine.generate("Tom", SamplingParams(max_tokens=1))
        assert "generate: 100%" in capsys.readouterr().err
    finally:
        logger.setLevel(before)


@pytest.mark.parametrize(("columns", "expected"), [(0, 80), (120, None)])
def test_a_bar_has_a_width_where_the_terminal_has_none(
    monkeypatch: pytest.MonkeyPatch, columns: int, expected: int | None
) -> None:
    import fcntl
    import termios

    outside, inside = os.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 0, columns, 0, 0))
    with open(outside, "rb"), open(inside, "w") as terminal:
        monkeypatch.setattr("sys.stderr", terminal)
        assert bar_columns() == expected


def test_a_bar_follows_what_is_loaded_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    bars: list[Any] = []
    bar = weights.tqdm

    def kept(**options: Any) -> Any:
        bars.append((options["disable"], bar(**(options | {"disable": False, "file": io.StringIO(), "delay": 0}))))
        return bars[-1][1]

    monkeypatch.setattr(weights, "tqdm", kept)
    with Engine("demo", max_model_len=64):
        assert [(disable, made.n) for disable, made in bars] == [(None, bars[0][1].total)]
        assert bars[0][1].total > 0


def test_draft_summary_has_acceptance_and_no_excess_layers() -> None:
    """The summary of drafts has their acceptance, and no more layers than the model has."""
    flags = ["--depth", "lossless alpha=0.9 start=0.6"]
    summary = run(*GENERATE[:3], "--max-tokens", "12", *flags).stderr
    found = re.search(
        r"(\d+) of (\d+) drafted tokens accepted, ([\d.]+) tokens per verification, ([\d.]+) layers run", summary
    )
    assert found is not None, summary
    assert int(found[1]) <= int(found[2])
    assert float(found[3]) >= 1
    assert "drafts included (full depth: 16)" in summary
    assert not re.search(r"[\d.]+ of 16 layers", summary)


def test_less_than_a_token_a_second_is_told_in_seconds() -> None:
    assert [_pace(10, 2.0), _pace(2, 5.0), _pace(0, 5.0)] == ["5.0 tokens/s", "2.5 s per token", "0.0 tokens/s"]
    assert "2.5 s per token (5.00 s)" not in Run([], 4, seconds=5.0).summary()


# -- weights ---------------------------------------------------------------------------------------------------------


def test_weights_inspect_shows_the_demo_and_the_same_as_json() -> None:
    shown, verified = run("weights", "inspect", "demo"), run("weights", "verify", "demo")
    assert (verified.exit_code, verified.stdout) == (0, "OK\n")
    facts = json.loads(run("weights", "inspect", "demo", "--json").stdout)
    assert (facts["num_layers"], facts["quantization"]) == (16, None)
    assert sum(group["values"] for group in facts["tensors"]) == facts["num_parameters"]
    assert f"{facts['kv_bytes_per_token']:,}" in shown.stdout
    assert shown.stdout.isascii()  # plain columns, one line for each kind of tensor
    assert re.search(r"^model\.layers\.\*\.post_attention_layernorm\.weight +16 +128 +BF16", shown.stdout, re.M)
    refused = run("weights", "inspect", "nowhere")
    assert refused.exit_code == 2
    fetched = ", ".join(map(repr, FETCHED))
    kinds = f"'demo', {fetched}, a GGUF file, a directory with a Llama model or 'owner/name' of the Hugging Face hub"
    assert refused.stderr == f"error: model must be {kinds}; got 'nowhere'\n"
