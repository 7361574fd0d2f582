"""`d3engine models` lists what `weights fetch` keeps and frees it; tests/engine/test_hub.py has the hub's cache."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from invoking import Terminal, invoke, refused
from rich.text import Text

from d3engine.cli.models import _print
from d3engine.engine.model_directory import FETCHED, fetched_directory
from d3engine.weights_tools import stored

CODER = "qwen2.5-coder-1.5b"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("D3ENGINE_CACHE", str(tmp_path))
    monkeypatch.setattr(stored, "_of_the_hub", lambda: iter(()))
    return tmp_path


def keep(name: str, num_bytes: int, folder: Path | None = None) -> Path:
    folder = folder or fetched_directory(name)
    folder.mkdir(parents=True)
    file = folder / (FETCHED[name] or "model.safetensors")
    file.write_bytes(bytes(num_bytes))
    return file


def models(*words: str) -> Any:
    return invoke(["models", *words])


def test_an_empty_list_says_how_to_fetch_a_model() -> None:
    assert "d3engine weights fetch qwen2.5-coder-1.5b" in models().stdout
    assert json.loads(models("--json").stdout) == []
    none = f"error: NAME must be a model that was fetched: there is none; got '{CODER}'\n"
    assert refused(["models", "remove", CODER, "--yes"]) == none


def test_each_model_has_its_kind_its_bytes_and_its_path() -> None:
    whole, file = keep("smollm2", 3_200_000), keep(CODER, 1000)
    listed = json.loads(models("--json").stdout)
    assert [(one["name"], one["kind"], one["bytes"]) for one in listed] == [
        ("smollm2", "float32", 3_200_000),
        (CODER, "Q4_K_M", 1000),
    ]
    assert [one["path"] for one in listed] == [str(whole.parent), str(file)]
    assert {one["source"] for one in listed} == {"PyPI"}
    _, _, *rows = models().stdout.splitlines()
    assert [row.split() for row in rows] == [
        ["smollm2", "float32", "3.2", "MB", "PyPI", str(whole.parent)],
        [CODER, "Q4_K_M", "1.0", "kB", "PyPI", str(file)],
    ]


def test_a_narrow_terminal_gets_the_table_without_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    keep("smollm2", 1000)
    keep(CODER, 1000)
    for columns in (80, 300):
        terminal = Terminal()
        with monkeypatch.context() as patch:
            patch.setenv("COLUMNS", str(columns))
            patch.setenv("TERM", "xterm")
            patch.setattr(sys, "stdout", terminal)
            _print(stored.stored_models())
        shown = Text.from_ansi(terminal.getvalue()).plain
        assert max(map(len, shown.splitlines())) <= columns
        assert len([line for line in shown.splitlines() if CODER in line and "Q4_K_M" in line]) == 1
        assert (str(fetched_directory(CODER)) in shown) == (columns == 300)
        assert ("With paths: d3engine models --json" in shown) == (columns == 80)


def test_models_remove_deletes_all_of_one_model_alone(cache: Path) -> None:
    """`models remove` deletes all files of one model, unfinished ones too, and none of another."""
    other, file = keep("smollm2", 10), keep(CODER, 1000)
    (file.parent / "d3.json").write_bytes(bytes(24))
    left = keep(CODER, 500, file.parent.parent / f".{CODER}.k3j2")  # by a fetch that was killed
    assert [one["kind"] for one in json.loads(models("--json").stdout)] == ["float32", "Q4_K_M", "unfinished"]
    assert models("remove", CODER).stderr == "error: --yes must be given where no terminal can be asked\n"
    assert file.exists()
    assert models("remove", CODER, "--yes").stdout == f"removed {CODER}: 1,524 bytes are free\n"
    assert not file.parent.exists()
    assert not left.parent.exists()
    assert other.exists()
    assert models("remove", CODER, "--yes").stderr == f"error: NAME must be one of smollm2; got '{CODER}'\n"


@pytest.mark.parametrize(("answer", "removes"), [("y\n", True), ("n\n", False), ("", False)])
def test_a_terminal_is_asked(answer: str, removes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    file = keep("smollm2", 10)
    monkeypatch.setattr("d3engine.cli.models._asks", lambda: True)
    said = invoke(["models", "remove", "smollm2"], input=answer)
    assert said.stderr == "Remove smollm2, 10 bytes? [y/N] "
    assert said.exit_code == 0
    assert file.exists() != removes
    assert said.stdout == ("removed smollm2: 10 bytes are free\n" if removes else "smollm2 is kept\n")
