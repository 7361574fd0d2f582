"""What the demo says and how it runs: commands as they can be typed, speed by turns, threads by the model's size."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from invoking import succeed

from d3engine.cli import demo as shown_problem
from d3engine.cli.commands import as_typed
from d3engine.cli.demo import Speedup, speedups
from d3engine.cli.engine_options import engine_arguments, native_threads_for, open_engine, read_threads
from d3engine.engine.engine import Engine
from d3engine.engine.host import pytorch_threads_for
from d3engine.engine.model_directory import model_directory
from d3engine.errors import InvalidValueError
from d3engine.model.config import ModelConfig
from d3engine.utils.garbage import OBJECTS_BETWEEN_COLLECTIONS

DEMO = ModelConfig.from_directory(model_directory("demo"))
LARGE = replace(DEMO, hidden_size=1024, intermediate_size=2816, num_heads=16, num_kv_heads=8, head_dim=64)


RUN_DEMO = """
import gc, runpy, sys, torch
brought = set(sys.modules)
sys.argv[1:] = ["generate", "demo", "--max-tokens", "4", "--device", "cpu"]
try: runpy.run_module("d3engine", run_name="__main__", alter_sys=True)
except SystemExit as end: assert not end.code
print(gc.get_threshold()[0])
print(*sorted(set(sys.modules) - brought))
"""


@dataclass(frozen=True)
class Demo:
    """`python -m d3engine generate demo` in a process of its own, off the path."""

    said: str
    objects: int  # between two searches for garbage
    imported: set[str]  # beyond what torch brings


@pytest.fixture(scope="module")
def demo() -> Demo:
    command, environment = [sys.executable, "-c", RUN_DEMO], os.environ | {"PATH": "/usr/bin"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    *said, objects, modules = done.stdout.splitlines()
    return Demo("\n".join(said), int(objects), set(modules.split()))


# -- commands as they can be typed -----------------------------------------------------------------------------------


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The script `d3engine`, in a folder where the shell does not look, and called by its path."""
    script = tmp_path / ".venv" / "bin" / "d3engine"
    script.parent.mkdir(parents=True)
    script.write_text("#!/bin/sh\necho called with $@\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "argv", [str(script), "generate"])
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    return script


def test_command_off_the_path_is_printed_with_its_path(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that is not on the PATH is printed with its path, and runs in a shell as printed."""
    elsewhere = as_typed("generate", "--problem-seed", "1")
    assert elsewhere == shlex.join([str(script), "generate", "--problem-seed", "1"])
    monkeypatch.chdir(script.parents[2])
    typed = as_typed("eval", "a b")
    assert typed == ".venv/bin/d3engine eval 'a b'"
    done = subprocess.run(typed, shell=True, capture_output=True, text=True, check=True)
    assert done.stdout == "called with eval a b\n"


def test_a_command_on_the_path_is_spelled_by_its_name(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{script.parent}{os.pathsep}/usr/bin")
    assert as_typed("eval", "demo") == "d3engine eval demo"


def test_other_command_of_the_name_is_not_printed(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another command of the same name on the PATH is not taken for this one."""
    shutil.copy(script, tmp_path / "d3engine")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert as_typed("eval").endswith("/.venv/bin/d3engine eval")


def test_the_module_is_spelled_with_the_python_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/d3engine/__main__.py"])
    done = subprocess.run(as_typed("--version"), shell=True, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("d3engine ")


def test_the_demo_recommends_commands_that_can_be_typed(demo: Demo) -> None:
    another = re.search(r"^Another problem: +(.*)$", demo.said, re.M)
    often = re.search(r"^How often it is right: +(.*)$", demo.said, re.M)
    assert another is not None
    assert often is not None
    for typed in (another[1], often[1]):
        assert Path(shlex.split(typed)[0]).is_file()
        assert shlex.split(typed)[1:3] == ["-m", "d3engine"]


# -- speed by turns --------------------------------------------------------------------------------------------------


def test_speedups_alternate_turns_and_take_the_median() -> None:
    """Turns alternate, and the median ignores a few disturbed ones."""
    slow, fast = iter([3.0, 3.0, 90.0, 3.0, 3.0]), iter([2.0, 2.0, 2.0, 200.0, 2.0])
    order: list[str] = []

    def one() -> list[float]:
        order.append("slow")
        return [next(slow), 8.0]

    def other() -> list[float]:
        order.append("fast")
        return [next(fast), 2.0]

    found = speedups(one, other, most_rounds=5, enough_seconds=1e9)
    assert found == [Speedup(1.5, 5), Speedup(4.0, 5)]
    assert order == ["slow", "fast", "fast", "slow", "slow", "fast", "fast", "slow", "slow", "fast"]


def test_speedups_end_in_time_and_compare_what_both_tell() -> None:
    """A large model takes one turn, and what one way does not tell is not compared."""
    assert speedups(lambda: [4.0], lambda: [2.0], enough_seconds=0.0) == [Speedup(2.0, 1)]
    assert speedups(lambda: [4.0, 1.0], lambda: [2.0], most_rounds=2) == [Speedup(2.0, 2)]


@pytest.mark.parametrize(("tokens", "is_told"), [(1, False), (4, True)])
def test_demo_prints_decode_speedup_apart_from_the_prompt(tokens: int, is_told: bool) -> None:
    """The speedup of decoding is printed apart from the prompt, whose time depth does not change."""
    said = succeed(["generate", "demo", "--max-tokens", str(tokens), "--device", "cpu"])
    words = " ".join(said.output.split())
    assert ("; from its second token on, " in words) == is_told


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (Speedup(1.72, 9), "1.7x faster (median of 9 turns)"),
        (Speedup(0.5, 3), "2.0x slower (median of 3 turns)"),
        (Speedup(1.04, 9), "as fast (median of 9 turns)"),
        (Speedup(0.97, 9), "as fast (median of 9 turns)"),
        (Speedup(2.0, 1), "2.0x faster (one turn each)"),
    ],
)
def test_a_speedup_is_told_in_words(found: Speedup, words: str) -> None:
    assert str(found) == words


# -- threads by the model's size -------------------------------------------------------------------------------------


def test_thread_count_follows_the_size_of_the_model() -> None:
    """A small model gets few threads, and a large one every thread that there is."""
    assert [pytorch_threads_for(DEMO, most) for most in (1, 2, 64)] == [1, 1, 1]
    assert [native_threads_for(DEMO, most) for most in (1, 2, 64)] == [1, 2, 2]
    assert [pytorch_threads_for(LARGE, most) for most in (1, 2, 64)] == [1, 2, LARGE.layer_parameters // 2**20]
    assert [native_threads_for(LARGE, most) for most in (1, 2, 64)] == [1, 2, LARGE.layer_parameters // 2**18]
    assert LARGE.layer_parameters > 8 * 2**20


def test_given_threads_are_used_and_auto_stays_below_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A given number of threads is used, and `auto` never takes more than PyTorch would."""
    assert engine_arguments("demo", {"threads": "3", "seed": 1}) == {"seed": 1, "num_threads": 3}
    assert torch.get_num_threads() == 3
    for given, spare, native in (({"threads": "auto"}, 0, 2), ({}, 0, 2), ({}, 1, 2), ({}, 2, 1), ({}, 9, 1)):
        torch.set_num_threads(3)
        monkeypatch.setattr("d3engine.engine.host.usable_cpus", lambda: 4)
        assert engine_arguments("demo", given, spare) == {"num_threads": native}
        assert torch.get_num_threads() == 1


def test_the_flag_reaches_pytorch() -> None:
    with open_engine("demo", {"threads": "2", "device": "cpu", "kv_cache_memory_bytes": 2**22, "max_num_seqs": 1}):
        assert torch.get_num_threads() == 2


@pytest.mark.parametrize("given", ["0", "-1", "1025", "two", "1.5", "", "²"])
def test_other_threads_are_refused(given: str) -> None:
    with pytest.raises(InvalidValueError, match="--threads must be"):
        read_threads(given)


# -- what somebody waits for before the first word -------------------------------------------------------------------


def test_the_demo_imports_nothing_that_it_does_not_use(demo: Demo) -> None:
    assert {"d3engine.engine.engine", "d3engine.kernels.reference"} <= demo.imported
    unused = {"transformers", "jinja2", "triton", "sympy", "matplotlib", "huggingface_hub", "gguf"}
    unused |= {"torch._dynamo", "torch._inductor", "d3engine.kernels.triton", "d3engine.research.evaluation.accuracy"}
    assert sorted(unused & demo.imported) == []
    assert demo.objects == OBJECTS_BETWEEN_COLLECTIONS, "torch's import is not to be searched for garbage all the time"


def test_demo_shows_its_first_answer_from_the_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo shows its first answer from the first token on, not after a whole answer."""
    engines: list[Engine] = []
    waited: list[int] = []

    def opened(*arguments: Any) -> Engine:
        engines.append(open_engine(*arguments))
        return engines[0]

    def shown(*_: Any, **__: Any) -> None:
        waited.append(engines[0].stats().generated_tokens)

    monkeypatch.setattr(shown_problem, "open_engine", opened)
    monkeypatch.setattr(shown_problem, "show_tokens", shown)
    monkeypatch.setattr(shown_problem, "speedups", lambda *_: [Speedup(1.0, 1)])
    succeed(["generate", "demo", "--device", "cpu"])
    assert waited[0] == shown_problem.WARM_UP_TOKENS + 1
    assert waited[-1] > 3 * waited[0]
