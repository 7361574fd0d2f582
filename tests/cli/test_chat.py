"""`d3engine chat` over a pipe: turns, commands, and the refusal of a model that cannot chat."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from invoking import Terminal, invoke, refused, succeed
from rich.console import Console
from watching import watch

from d3engine.cli.chat import HELP, Conversation
from d3engine.cli.terminal import Writer
from d3engine.engine.engine import Engine
from d3engine.engine.model_directory import model_directory
from d3engine.request.params import SamplingParams

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'system' %}{{ message.content }}\n"
    "{% elif message.role == 'user' %}Question: {{ message.content }}\nAnswer:"
    "{% else %} {{ message.content }}\n{% endif %}{% endfor %}"
)
QUESTION = "Tom has 5 pens. Tom finds 3. Tom buys 2. How many pens does Tom have now?"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(model_directory("demo"), directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


def chat(model: Path | str, *lines: str, options: tuple[str, ...] = ()) -> Any:
    small = ["--max-num-seqs", "2", "--kv-cache-memory-bytes", str(2**24), "--device", "cpu", "--max-tokens", "9"]
    return succeed(["chat", str(model), *small, *options], input="\n".join(lines))


def turns_of(monkeypatch: pytest.MonkeyPatch) -> list[list[dict[str, Any]]]:
    """The messages of each turn, as they come."""
    return watch(monkeypatch, Engine, "chat_prompt", lambda engine, messages: list(map(dict, messages)))


def test_a_turn_sees_the_conversation_until_reset(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = turns_of(monkeypatch)
    result = chat(model, "one", "", "two", "/reset", "three", options=("--system", "Be right."))
    assert [[message["role"] for message in messages] for messages in seen] == [
        ["system", "user"],
        ["system", "user", "assistant", "user"],
        ["system", "user"],
    ]
    assert seen[1][1]["content"] == "one"
    assert seen[1][2]["content"] == result.stdout.splitlines()[0].lstrip(" ")
    assert seen[2][1]["content"] == "three"


@pytest.mark.parametrize(
    ("own", "options", "expected"),
    [
        ({}, (), (0.7, 0.9, 0)),
        ({"eos_token_id": 2, "repetition_penalty": 1.1}, (), (0.7, 0.9, 0)),
        ({}, ("--temperature", "0.3"), (0.3, 0.9, 0)),
        ({}, ("--top-p", "1"), (0.7, 1.0, 0)),
        ({"temperature": 0.2, "do_sample": True}, (), (0.2, 1.0, 0)),
        ({"top_k": 20}, (), (1.0, 1.0, 20)),
        ({"do_sample": False, "temperature": 0.9}, (), (0.0, 1.0, 0)),
    ],
)
def test_chat_sampling_defaults_follow_generation_config(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    own: dict[str, Any],
    options: tuple[str, ...],
    expected: tuple[float, float, int],
) -> None:
    """A model whose files name no sampling is sampled by the command's defaults, not at temperature 1."""
    directory = shutil.copytree(model, tmp_path / "model")
    (directory / "generation_config.json").write_text(json.dumps(own))
    seen: list[SamplingParams] = []
    monkeypatch.setattr(
        "d3engine.cli.chat.Conversation",
        lambda engine, params, *rest: seen.append(params) or SimpleNamespace(run=lambda *_: None),
    )
    chat(directory, options=options)
    assert [(params.temperature, params.top_p, params.top_k) for params in seen] == [expected]


def test_the_help_tells_with_what_it_samples() -> None:
    text = " ".join(invoke(["chat", "--help"]).stdout.replace("│", " ").split())
    assert "[default: generation_config.json's, or 0.7]" in text
    assert "[default: generation_config.json's, or 0.9]" in text
    assert "Maximum tokens to generate [default: 512]" in text


def test_exit_ends_and_nothing_after_it_is_read(model: Path) -> None:
    result = chat(model, "/help", "/exit", QUESTION)
    assert result.stdout == ""
    assert "/reset" in result.stderr


def test_depth_is_shown_and_changed(model: Path) -> None:
    lines = ["/depth", "/depth d3 alpha=0.9 start=0.6", QUESTION, "/depth auto"]
    result = chat(model, *lines, options=("--depth", "full"))
    told = [line for line in result.stderr.splitlines() if line.startswith("Depth:")]
    assert told == ["Depth: Full depth", "Depth: D3, alpha 0.9, start 0.6", "Depth: Full depth"]
    lines = result.stderr.splitlines()
    (warned,) = [number for number, line in enumerate(lines) if "was never certified for this model" in line]
    assert lines[warned].startswith("warning: D3, alpha 0.9, start 0.6")
    assert warned < lines.index(told[1])  # at the command, not with the next answer


def test_chat_bad_input_is_reported_and_the_chat_goes_on(model: Path) -> None:
    """Input that is not allowed is reported as an error, and the conversation goes on."""
    wrong = ("/dance", "/depth d3 alpha=x", "/depth d3 alpha=0.9 start=0.6 tail=99")
    result = chat(model, *wrong, QUESTION)
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 3
    assert len(result.stdout.splitlines()) == 1


def test_message_from_a_pipe_without_an_answer_ends_in_1(model: Path) -> None:
    """A script learns that an answer is missing among those on stdout."""
    small = ["--kv-cache-memory-bytes", str(2**24), "--device", "cpu", "--max-tokens", "2"]
    result = invoke(["chat", str(model), *small], input=f"{'word ' * 3000}\n{QUESTION}\n/exit\n")
    assert result.exit_code == 1
    assert result.stderr.count("error: ") == 1
    assert len(result.stdout.splitlines()) == 1


def test_chat_with_the_bundled_model_answers_each_line_alone() -> None:
    """The bundled model answers each line as a separate question."""
    result = chat("demo", QUESTION, "Say something.", QUESTION, options=("--max-tokens", "60"))
    first, *_, last = result.stdout.split("#### ")
    assert last == "10\n"
    assert first.startswith(" Adding 3 makes 5 + 3 = 8.")


def test_chat_without_a_template_is_refused_before_loading(tmp_path: Path) -> None:
    """A model without a chat template is refused before it is loaded."""
    shutil.copytree(model_directory("demo"), tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").unlink()
    stderr = refused(["chat", str(tmp_path / "model")], input=QUESTION)
    assert "chat template" in stderr
    assert "d3engine generate" in stderr
    assert len(stderr.splitlines()) == 1


def test_a_directory_without_a_model_is_told_so_as_everywhere(tmp_path: Path) -> None:
    for command in (["chat", str(tmp_path)], ["generate", str(tmp_path), QUESTION]):
        assert refused(command) == f"error: there is no model in {tmp_path}: config.json is missing\n"


def test_a_message_of_several_lines_stands_in_quotation_marks(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = turns_of(monkeypatch)
    chat(model, '"""one', "", 'two"""', '"""three"""', '"""', "four", '"""')
    assert [messages[-1]["content"] for messages in seen] == ["one\n\ntwo", "three", "four"]


def test_a_quoted_message_is_no_command(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that begins with a comment can be sent in quotation marks."""
    seen = turns_of(monkeypatch)
    result = chat(model, '"""', "/* add */", "int x;", '"""', '"""/exit"""', "/nothing")
    assert [messages[-1]["content"] for messages in seen] == ["/* add */\nint x;", "/exit"]
    assert result.stderr.count("error: ") == 1


class Keys(Terminal):
    """A terminal on which Ctrl-C is pressed where a line says so."""

    def readline(self, *_: Any) -> str:
        """The next line."""
        line = super().readline()
        if line == "^C\n":
            raise KeyboardInterrupt
        return line


def test_ctrl_c_drops_a_message_that_has_begun(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C at a prompt sends nothing and keeps the chat, and prompts are not among the answers."""
    seen = turns_of(monkeypatch)
    typed = Keys(f'"""one\n^C\n{QUESTION}\n^C\n{QUESTION}\n')
    answers, said = io.StringIO(), io.StringIO()
    for name, stream in (("stdin", typed), ("stdout", answers), ("stderr", said)):
        monkeypatch.setattr(sys, name, stream)
    with Engine(model, device="cpu", max_num_seqs=2, kv_cache_memory_bytes=2**24) as engine:
        Conversation(engine, SamplingParams(temperature=0, max_tokens=9), None, False).run()
    assert [[message["content"] for message in messages][::2] for messages in seen] == [[QUESTION], [QUESTION] * 2]
    assert ">" not in answers.getvalue()
    assert said.getvalue().count("> ") == 5
    assert said.getvalue().count("Ctrl-D or /exit ends the chat.") == 1
    assert "... " in said.getvalue()


def test_the_system_message_is_set_shown_and_removed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = turns_of(monkeypatch)
    result = chat(model, "/system", "one", "/system Be right.", "two", "/reset", "three", '/system ""', "four")
    roles = [[message["role"] for message in messages] for messages in seen]
    assert roles[1] == ["system", "user", "assistant", "user"]
    assert roles[2] == ["system", "user"]
    assert roles[3] == ["user", "assistant", "user"]
    assert seen[1][0]["content"] == "Be right."
    assert result.stderr.count("There is no system message.") == 2


def test_an_answer_is_generated_again(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = turns_of(monkeypatch)
    result = chat(model, "/regenerate", QUESTION, "/regenerate", "next")
    assert "error: /regenerate must be typed after a message" in result.stderr
    first, again, after = result.stdout.splitlines()
    assert seen[0] == seen[1]
    assert first != ""
    assert [message["role"] for message in seen[2]] == ["user", "assistant", "user"]
    assert seen[2][1]["content"] == again.lstrip(" ")
    assert after != ""


def test_a_conversation_is_saved_and_goes_on(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = turns_of(monkeypatch)
    path, other = tmp_path / "talk.json", tmp_path / "other.json"
    other.write_text("{}")
    lines = ["/system Be right.", QUESTION, f"/save {path}", f"/save {path}", f"/save {other}", f"/load {other}"]
    result = chat(model, *lines)
    assert result.stderr.count("Saved 3 messages") == 2
    assert "error: /save must be a file that is not there yet" in result.stderr
    assert "error: /load must be a file that /save has written" in result.stderr
    saved = json.loads(path.read_text())["messages"]
    assert [message["role"] for message in saved] == ["system", "user", "assistant"]
    result = chat(model, f"/load {path}", "next", f"/save {path}", f"/load {tmp_path / 'none.json'}")
    assert "Loaded 3 messages" in result.stderr
    assert seen[-1] == [*saved, {"role": "user", "content": "next"}]
    assert len(json.loads(path.read_text())["messages"]) == 5
    assert result.stderr.count("error: /load must be a file") == 1


def test_a_conversation_outlives_what_fails_in_a_turn(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A place that cannot be written and a file that is no policy's end a turn, and not the chat."""
    seen = turns_of(monkeypatch)
    places = (f"{tmp_path}/{'x' * 300}", "~nosuchuser/talk.json", f"{tmp_path}/none/talk.json")
    bridged = f"/depth d3 alpha=0.9 start=0.6 bridges={tmp_path}/none.safetensors"
    result = chat(model, QUESTION, *(f"/save {place}" for place in places), "/load ~nosuchuser/x", bridged, "next")
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert [line.endswith(("File name too long", "No such file or directory")) for line in errors[:3]] == [True] * 3
    assert len(errors) == 5
    assert [message["role"] for message in seen[-1]] == ["user", "assistant", "user"]


def test_sampling_is_set_and_shown(model: Path) -> None:
    lines = ["/set temperature 0", "/set max_tokens 2", QUESTION, "/set", '/set stop ["x", "y"]', "/set seed 7"]
    more = ("/set dry_multiplier 0.8", '/set logit_bias {"5": 2}', "/set n 2")
    result = chat(model, *lines, *more, "/set top_p 2", "/set colour red", "/set top_k")
    assert "temperature: 0" in result.stderr
    assert 'stop: ["x", "y"]' in result.stderr
    assert "dry_multiplier: 0.8" in result.stderr
    assert 'logit_bias: {"5": 2.0}' in result.stderr
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert [error.split(" must ")[0] for error in errors] == [
        *("error: /set", "error: top_p", "error: /set", "error: /set top_k")
    ]
    assert len(result.stdout.split()) <= 2


def test_the_help_names_every_command() -> None:
    commands = ("/system", "/set", "/regenerate", "/save", "/load", "/reset", "/depth", "/help", "/exit")
    assert all(f"\n{command} " in "\n" + HELP for command in commands)
    assert HELP.endswith('"""')


def screen(pieces: list[str], width: int) -> list[str]:
    """The lines of a terminal of this width after the pieces were written one by one."""
    file = io.StringIO()
    writer = Writer(Console(file=file, width=width, force_terminal=True, soft_wrap=True, color_system=None), wrap=True)
    for piece in pieces:
        writer.write(piece)
    lines, column, rest = [""], 0, file.getvalue()
    while rest:
        if found := re.match(r"\x1b\[(\d+)D", rest):
            column = min(column, width - 1) - int(found[1])
        elif found := re.match(r"\x1b\[K", rest):
            lines[-1] = lines[-1][: min(column, width - 1)]
            column = min(column, width - 1)
        else:
            found = re.match(r"(?s).", rest)
            assert found is not None
            if found[0] == "\n":
                lines, column = [*lines, ""], 0
            else:
                assert column < width, lines
                lines[-1] = lines[-1][:column] + found[0]
                column += 1
        rest = rest[found.end() :]
    return [line.rstrip() for line in lines]


@pytest.mark.parametrize("width", [10, 11, 12, 20])
def test_words_that_come_in_pieces_are_not_broken_at_the_edge(width: int) -> None:
    pieces = [
        *("The", " quick", " br", "own", " f", "ox", " jump", "ed"),
        *(" over", " the", " la", "zi", "est", " dog", "."),
    ]
    lines = screen(pieces, width)
    assert " ".join(lines).split() == "".join(pieces).split()
    assert all(len(line) <= width for line in lines)
    assert len(lines) > 2


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals")
def test_lines_pasted_at_the_prompt_are_one_message() -> None:
    """A text of several lines that a terminal pastes is one message, and not one for each line."""
    pytest.importorskip("readline")
    code = "from d3engine.cli.chat import _use_line_editing as use; use(); print(ascii(input('> ')))"
    outside, inside = os.openpty()
    ends: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), inside)
    child = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "TERM": "xterm"}, **ends)
    os.close(inside)
    shown = b""
    while b"> " not in shown:
        shown += os.read(outside, 1024)
    os.write(outside, b"\x1b[200~def f():\n    return 1\x1b[201~\r")
    with suppress(OSError):  # by which Linux says that the other end is closed
        while piece := os.read(outside, 1024):
            shown += piece
    os.close(outside)
    assert child.wait() == 0
    assert rb"'def f():\n    return 1'" in shown
