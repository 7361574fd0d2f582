"""A user's files are read and written in one way: what cannot be read is named, and what is written is whole."""

import ast
import json
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from d3engine.cli import app
from d3engine.cli.engine_options import _form
from d3engine.depth.policy import calibrated_for, policy_from_directory
from d3engine.engine.depth import resolve_depth
from d3engine.engine.model_directory import default_sampling_params
from d3engine.errors import D3EngineError, ModelFormatError
from d3engine.integrations.batch_file import open_results, read_lines
from d3engine.model.bridges import read_bridges
from d3engine.model.config import ModelConfig
from d3engine.model.gguf_file import open_gguf
from d3engine.model.source import open_checkpoint
from d3engine.research.analysis.answers import read_prompts
from d3engine.research.evaluation.bbh import load_bbh
from d3engine.research.evaluation.gsm8k import load_gsm8k
from d3engine.research.evaluation.kept import KeptAnswers
from d3engine.text.chat_template import load_chat_template
from d3engine.text.prompts import QUESTION_TEMPLATE_FILE, load_question_template
from d3engine.text.tokenizer import load_tokenizer
from d3engine.utils import files
from d3engine.utils.files import (
    CONFIG_BYTES,
    UnreadableFileError,
    append_lines,
    read_bytes,
    read_json,
    read_text,
    write_whole,
)
from d3engine.weights_tools.convert import convert_llama2c, load_pickled

DEMO = Path(files.__file__).parents[1] / "demo_model"
needs_pipes = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")


def open_weights(folder: Path) -> None:
    with open_checkpoint(folder):
        pass


def read_gsm8k(folder: Path) -> Any:
    return load_gsm8k(folder, split="train", shots=0, seed=0)


def read_bbh(folder: Path) -> Any:
    return load_bbh(folder, split="test", shots=1, tasks=["task"])


def read_own_prompts(folder: Path) -> Any:
    return read_prompts(folder / "prompts.txt", 1)


def generate(folder: Path) -> Any:
    result = CliRunner().invoke(app, ["generate", "demo", "--prompt-file", str(folder / "prompt.txt")])
    assert result.exit_code == 2
    raise D3EngineError(result.output)


def read_auto_bridges(folder: Path) -> None:
    setting = {"depth": {"policy": "d3", "alpha": 0.8, "start": 0.6, "bridges": "auto"}, "bridges": {"sha256": "a"}}
    (folder / "d3.json").write_text(json.dumps(setting))
    resolve_depth("auto", folder)


def open_shard(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "part.safetensors"}}))
    open_weights(folder)


def read_batch(folder: Path) -> None:
    list(read_lines(folder / "batch.jsonl"))


def read_results(folder: Path) -> None:
    with open_results(folder / "results.jsonl"):
        raise D3EngineError("results.jsonl is missing")  # then it is made


READERS: list[tuple[str, Callable[[Path], Any]]] = [
    ("added_tokens.json", load_tokenizer),
    ("bridges.safetensors", read_auto_bridges),
    ("part.safetensors", open_shard),
    ("bridges.safetensors", lambda folder: read_bridges(folder / "bridges.safetensors")),
    ("draft.gguf", lambda folder: open_gguf(folder / "draft.gguf")),
    ("consolidated.00.pth", lambda folder: load_pickled(folder / "consolidated.00.pth")),
    ("stories.bin", lambda folder: convert_llama2c(folder / "stories.bin", folder / "out")),
    ("batch.jsonl", read_batch),
    ("results.jsonl", read_results),
    ("kept.jsonl", lambda folder: KeptAnswers(folder / "kept.jsonl", {})),
    ("schema.json", lambda folder: _form("json_schema", folder / "schema.json")),
    ("config.json", ModelConfig.from_directory),
    ("generation_config.json", ModelConfig.from_directory),
    ("generation_config.json", default_sampling_params),
    ("d3.json", policy_from_directory),
    ("d3.json", calibrated_for),
    ("tokenizer.json", load_tokenizer),
    ("tokenizer.model", load_tokenizer),
    ("tokenizer_config.json", load_tokenizer),
    ("special_tokens_map.json", load_tokenizer),
    ("chat_template.jinja", load_chat_template),
    (QUESTION_TEMPLATE_FILE, load_question_template),
    ("model.safetensors", open_weights),
    ("model.safetensors.index.json", open_weights),
    ("gsm8k/train.jsonl", read_gsm8k),
    ("bbh/task.json", read_bbh),
    ("bbh/cot-prompts/task.txt", read_bbh),
    ("prompts.txt", read_own_prompts),
    ("prompt.txt", generate),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model directory with data beside it, but for weights; each test makes one of the files special."""
    for name in ("config.json", "generation_config.json", "tokenizer.model", "tokenizer_config.json"):
        shutil.copy(DEMO / name, tmp_path)
    (tmp_path / "bbh" / "cot-prompts").mkdir(parents=True)
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "bbh" / "task.json").write_text('{"examples": [{"input": "a", "target": "b"}]}')
    prompt = "-----\nDo it.\n\nQ: a\nA: Let's think step by step.\nSo the answer is b."
    (tmp_path / "bbh" / "cot-prompts" / "task.txt").write_text(prompt)
    return tmp_path


KINDS = [pytest.param("pipe", marks=needs_pipes), "endless device", "broken link", "loop of links", "folder", "socket"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "read"), READERS)
def test_irregular_file_is_refused_by_name_without_waiting(
    folder: Path, name: str, read: Callable[[Path], Any], kind: str
) -> None:
    """A file that is not regular is refused by its name and never waited for."""
    path = folder / name
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        # An address has at most 108 characters: so it is made under a short one, and moved.
        with tempfile.TemporaryDirectory(dir="/tmp") as short, socket.socket(socket.AF_UNIX) as made:
            made.bind(f"{short}/s")
            os.rename(f"{short}/s", path)
    else:
        target = {"endless device": "/dev/zero", "broken link": "/nowhere/at/all", "loop of links": path.name}[kind]
        path.symlink_to(target)
    with pytest.raises(D3EngineError, match=r"regular\s+file|is\s+missing|cannot be|can be") as caught:
        read(folder)
    assert path.name in "".join(str(caught.value).split())  # a console may break a long line


CONFIGURATIONS = ("config.json", "generation_config.json", "tokenizer_config.json", "d3.json")


@pytest.mark.parametrize(("name", "read"), READERS)
def test_no_byte_of_a_file_is_read_that_is_far_too_large(folder: Path, name: str, read: Callable[[Path], Any]) -> None:
    if name in ("batch.jsonl", "results.jsonl"):
        pytest.skip("of any size, and read by lines")
    (folder / name).unlink(missing_ok=True)
    with (folder / name).open("wb") as file:
        file.truncate(2**40)  # sparse: it takes no room, and a reader would take all of it
    said = f"has more than {CONFIG_BYTES:,} bytes" if name in CONFIGURATIONS else None
    with pytest.raises(D3EngineError, match=said) as caught:
        read(folder)
    assert name.rpartition("/")[2] in "".join(str(caught.value).split())


OPENED_ELSEWHERE = {
    # By the path of a file that `open_regular` has opened, or after it.
    *("d3engine/model/bridges.py: safe_open", "d3engine/model/checkpoint.py: safe_open"),
    *("d3engine/research/bridges/fitting.py: safe_open", "weights_tools/convert.py: torch.load"),
    "d3engine/engine/prefix_file.py: safe_open",
    "weights_tools/convert.py: np.memmap",
    # To write.
    *("d3engine/integrations/batch_file.py: os.open", "weights_tools/fetch.py: target.open"),
    # Files of the system, of the package, and of this process.
    *("d3engine/cli/streams.py: open", "d3engine/cli/streams.py: os.open", "d3engine/text/limited_worker.py: open"),
    *("d3engine/text/limited_worker.py: os.open", "d3engine/async_engine/engine_process.py: path.open"),
    *("d3engine/engine/host.py: CGROUP.read_text", "d3engine/engine/host.py: (group / 'cpu.max').read_text"),
    "d3engine/engine/host.py: (group / f'cpu.cfs_{name}_us').read_text",
    "d3engine/engine/host.py: (group / ('memory.max' if is_second else 'memory.limit_in_bytes')).read_text",
    "d3engine/server/routes/api.py: file.read_bytes",
    # What was fetched by its SHA-512, and what this installation has written beside it.
    *("d3engine/server/page_libraries.py: tarfile.open", "d3engine/server/page_libraries.py: note.read_text"),
    # The sandbox's own folder, and what the system says of its child.
    "d3engine/research/evaluation/sandbox_child.py: os.open",
    "d3engine/research/evaluation/sandbox.py: Path(f'/proc/{pid}/stat').read_text",
    # What a request has written itself.
    "d3engine/request/hidden_states.py: safe_open",
    # What the training of the bundled model has written itself.
    *("weights_tools/demo_trainer.py: safetensors.torch.load_file", "weights_tools/train_demo.py: torch.load"),
    "weights_tools/demo_trainer.py: (directory / 'tokenizer.model').read_bytes",
    "weights_tools/demo_text.py: (directory / 'config.json').read_text",
    "weights_tools/demo_text.py: (directory / 'tokenizer.model').read_bytes",
    "weights_tools/train_demo.py: (self.out / 'FINISH').read_text",
    "weights_tools/train_demo.py: (directory / 'config.json').read_text",
}
OPENERS = ("open", "os.open", "safe_open", "torch.load", "np.load", "np.memmap", "np.fromfile")
NO_PATHS = ("self.", "files.", "archive.", "chat.")


@pytest.mark.parametrize(
    ("name", "read"),
    [("model.safetensors", open_weights), ("tokenizer.json", load_tokenizer), ("model.gguf", open_gguf)],
)
def test_pointer_of_git_lfs_is_named_as_one(folder: Path, name: str, read: Callable[[Path], Any]) -> None:
    """A clone without Git LFS has a pointer in place of each large file, and the error says so."""
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(ModelFormatError, match=rf"{name} is a pointer of Git LFS, not the file itself: git lfs pull"):
        read(folder / name if name == "model.gguf" else folder)


def test_folder_that_may_not_be_looked_into_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder without the right to look into it is no folder without a model."""

    def refuse(*given: Any, **named: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "lstat", refuse)
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ModelFormatError, match=r"config\.json cannot be read: Permission denied"):
        ModelConfig.from_directory(folder)


def test_only_one_module_opens_the_files_of_users() -> None:
    root = Path(__file__).parents[2]
    calls = {
        f"{path.relative_to(root)}: {name}"
        for folder in ("d3engine", "weights_tools")
        for path in (root / folder).rglob("*.py")
        if path.name != "files.py"
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call) and opens(name := ast.unparse(node.func))
    }
    assert calls == OPENED_ELSEWHERE


def opens(name: str) -> bool:
    is_method = name.endswith((".open", ".read_bytes", ".read_text", ".load_file")) and not name.startswith(NO_PATHS)
    return name in OPENERS or is_method


def test_bound_counts_bytes_read_and_not_the_stated_size(tmp_path: Path) -> None:
    """The bound counts what is read, and not what the size says."""
    said_empty = Path("/proc/self/status")
    if said_empty.exists():
        assert said_empty.stat().st_size == 0
        assert b"Pid:" in read_bytes(said_empty)
        with pytest.raises(UnreadableFileError, match="status has more than 100 bytes"):
            read_bytes(said_empty, 100)
    (tmp_path / "full").write_bytes(b"x" * 100)
    assert read_bytes(tmp_path / "full", 100) == b"x" * 100
    with pytest.raises(UnreadableFileError, match="full has more than 99 bytes"):
        read_bytes(tmp_path / "full", 99)


def test_text_has_one_kind_of_line_end_and_is_utf8(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes("ä\r\nb\rc\n".encode())
    assert read_text(tmp_path / "text") == "ä\nb\nc\n"
    (tmp_path / "text").write_bytes(b"\xef\xbb\xbfone \xe2\x80\xa8line\r\n\r\ntwo \x0cthree\r\n")
    assert read_prompts(tmp_path / "text", 9) == ["one \u2028line", "two \x0cthree"]
    (tmp_path / "text").write_bytes(b"caf\xe9")
    with pytest.raises(UnreadableFileError, match=r"text is not UTF-8 text: .* position 3"):
        read_text(tmp_path / "text")


@pytest.mark.parametrize("content", ["{", "[" * 200_000, '{"a": 1, "a": 2}', '{"a": ' + "9" * 5000 + "}", ""])
def test_what_is_no_json_is_an_error_with_the_file_name(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(UnreadableFileError, match=r"a\.json is not valid JSON"):
        read_json(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("contents", "message"),
    [({"temperature": 1e9}, "temperature"), ({"top_p": 1.5}, "top_p"), ({"max_new_tokens": 0}, "max_tokens")],
)
def test_sampling_default_out_of_range_is_named_by_file(tmp_path: Path, contents: dict[str, Any], message: str) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(contents))
    with pytest.raises(ModelFormatError, match=rf"{tmp_path}/generation_config\.json: .*{message}"):
        default_sampling_params(tmp_path)


# -- writing -----------------------------------------------------------------------------------------------------------


def test_a_file_is_written_whole_or_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.html"
    page.write_text("old")
    for name, error in (("replace", KeyboardInterrupt), ("replace", OSError)):
        with monkeypatch.context() as patch:

            def fail(*_: object, error: type[BaseException] = error) -> None:
                raise error

            patch.setattr(os, name, fail)
            with pytest.raises(error):
                write_whole(page, "new")
        assert page.read_text() == "old"
        assert list(tmp_path.iterdir()) == [page]
    write_whole(page, "new")
    assert page.read_text() == "new"
    assert list(tmp_path.iterdir()) == [page]


def test_lines_that_several_add_at_once_are_all_whole(tmp_path: Path) -> None:
    """Two commands that keep their answers in one file do not write over each other's."""
    path, texts = tmp_path / "kept.jsonl", [letter * (99 + 7 * place) for place, letter in enumerate("abcdefgh")]
    with ThreadPoolExecutor(len(texts)) as pool:
        for done in [pool.submit(append_lines, path, [text]) for _ in range(25) for text in texts]:
            done.result()
    assert sorted(path.read_text().splitlines()) == sorted(25 * texts)
    path.write_bytes(path.read_bytes() + b"torn")
    append_lines(path, ["last"])
    assert path.read_text().splitlines()[-2:] != ["torn", "last"]
    assert path.read_text().endswith("\nlast\n")


def test_a_written_file_keeps_its_mode_and_a_link_stays_one(tmp_path: Path) -> None:
    kept, link, fresh, plain = (tmp_path / name for name in ("kept", "link", "fresh", "plain"))
    kept.write_text("old")
    kept.chmod(0o640)
    link.symlink_to(kept)
    write_whole(link, b"new")
    assert link.is_symlink()
    assert kept.read_text() == "new"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o640
    write_whole(fresh, "x")
    plain.write_text("x")
    assert fresh.stat().st_mode == plain.stat().st_mode


@needs_pipes
def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole(pipe, "text")
        assert os.read(reader, 10) == b"text"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_where_nothing_can_be_written_is_known_before(tmp_path: Path) -> None:
    assert files.is_writable(tmp_path / "new")
    assert files.is_writable(Path("/dev/null"))
    assert not files.is_writable(tmp_path)
    assert not files.is_writable(tmp_path / "nowhere" / "new")
