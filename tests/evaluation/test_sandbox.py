"""Untrusted code computes in the sandbox, and does nothing else there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from d3engine.research.evaluation import sandbox
from d3engine.research.evaluation.sandbox import CodeError, CodeTimeError, NoLiteral, SandboxError, call_function

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, whose kernel confines the child")


@pytest.fixture(autouse=True)
def one_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Endless code is to cost little."""
    monkeypatch.setattr(sandbox, "SECONDS", 1)


def run(body: str, *arguments: object) -> object:
    """What `f` returns, whose body may use its argument x."""
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    (found,) = call_function(f"import os, sys\ndef f(x=None):\n{lines}", "f", [list(arguments)])
    return found


def test_sandbox_results_arrive_as_built_in_values() -> None:
    """Results equal those of the code, subclasses of built-in types too; what no literal shows equals nothing."""
    body = """from collections import Counter, namedtuple
from enum import IntEnum
import dataclasses, datetime, decimal, fractions, functools, heapq, itertools, math, random, re, statistics, string
Point = namedtuple("Point", "x y")
return [x, Counter("aab"), Point(1, {2}), frozenset([3]), IntEnum("E", "one").one, -1.5, None, "\\n", set()]"""
    found = run(body, [True, {"k": "é"}])
    assert found == [[True, {"k": "é"}], {"a": 2, "b": 1}, (1, {2}), {3}, 1, -1.5, None, "\n", set()]
    values = "(n for n in [1]), object(), float('nan'), 10**5000, 'x' * 200_000, [].append, loop"
    code = f"def f(n):\n    loop = []\n    loop.append(loop)\n    return ({values})[n]"
    without = call_function(code, "f", [[n] for n in range(7)])
    assert [type(one) for one in without] == [NoLiteral] * 7


def test_sandbox_has_no_input_environment_files_or_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code meets an empty folder, environment and input, and no module of site-packages."""
    monkeypatch.setenv("D3ENGINE_API_KEY", "secret")
    assert run("return [os.listdir('.'), dict(os.environ), sys.stdin.read(), sys.argv[1:]]") == [[], {}, "", []]
    assert run("return [path for path in sys.path if 'site-packages' in path or not path]") == []
    assert run("return hash('the same in each process')") == run("return hash('the same in each process')")
    with pytest.raises(CodeError, match="EOFError"):
        run("return input()")


def test_sandbox_network_namespace_is_another_where_allowed() -> None:
    """Where the system lets a process have its own network, the code has another than this process."""
    found = run("return os.readlink('/proc/self/ns/net')")
    tried = "import ctypes; call = ctypes.CDLL(None).unshare; exit(bool(call(0x50000000) and call(0x40000000)))"
    allowed = subprocess.run([sys.executable, "-c", tried], check=False).returncode == 0
    assert (found != os.readlink("/proc/self/ns/net")) == allowed


@pytest.mark.parametrize(
    "body",
    [
        "os.fork()",
        "import subprocess\nsubprocess.run(['true'])",
        "import ctypes\nif ctypes.CDLL(None).fork() == -1: raise PermissionError",
        "import threading\nthreading.Thread(target=print).start()",
        "import socket\nsocket.socket()",
        "import socket\nsocket.socketpair()",
        "import time\ntime.sleep(1)",
        "os.kill(os.getppid(), 0)",
        "os.remove(x)",
        "os.truncate(x, 0)",
        "open(x, 'a')",
        "os.open(x, os.O_RDONLY | os.O_TRUNC)",
        "os.chmod(x, 0)",
        "os.mkdir('new')",
        "os.symlink('/', 'root')",
        "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (-1, -1))",
        "os.setuid(1)",
    ],
)
def test_sandbox_system_calls_beyond_computing_fail(body: str, tmp_path: Path) -> None:
    """Processes, threads, sockets, sleep, signals and every change of a file fail, for root too."""
    file = tmp_path / "file"
    file.write_text("kept")
    tried = "\n ".join(body.splitlines())
    assert run(f"try:\n {tried}\nexcept (OSError, RuntimeError, ValueError): return 'refused'", str(file)) == "refused"
    assert file.read_text() == "kept"


@pytest.mark.parametrize(
    "body",
    [
        "sys.exit()",
        "os._exit(0)",
        "import atexit\natexit.register(print)\nraise SystemExit(0)",
        "raise KeyboardInterrupt",
        "return 'x' * 10**10",
        "sys.setrecursionlimit(10**9)\nclass A:\n __repr__ = lambda self: repr(self)\nreturn repr(A())",
        "import ctypes\nctypes.string_at(0)",
        "os.abort()",
        "os.closerange(3, 9)",
    ],
)
def test_sandbox_code_that_ends_itself_is_an_error(body: str) -> None:
    """An exit, an exception, too much memory and a crash are errors of the code, not of the sandbox."""
    with pytest.raises(CodeError) as caught:
        run(body)
    assert not isinstance(caught.value, CodeTimeError)


def test_sandbox_code_without_the_function_is_an_error() -> None:
    """Code that is no Python, and code that does not define the function, are errors of the code."""
    for code, error in (("def f() return 1", "SyntaxError"), ("g = 1", "AttributeError")):
        with pytest.raises(CodeError, match=error):
            call_function(code, "f", [[]])


@pytest.mark.parametrize(
    "body",
    [
        "while True:\n try:\n  while True: pass\n except BaseException: pass",
        "while True:\n try: os.fork()\n except OSError: pass",
        "while True: print('x' * 10**6)",
        "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass",
        "os.closerange(0, 64)\nwhile True: pass",
    ],
)
def test_sandbox_endless_code_ends_by_processor_time(body: str) -> None:
    """Endless loops, forks and output end by processor time, whatever the code catches, ignores or closes."""
    with pytest.raises(CodeTimeError):
        run(body)


def test_sandbox_output_is_no_result() -> None:
    """Output goes nowhere; what the code sends through the pipe counts for nothing without the parent's nonce."""
    assert run("print('x' * 10**7)\ntry: sys.exit()\nexcept SystemExit: return 7") == 7
    forged = (
        "for n in range(3, 64):\n try: os.write(n, b'0 ready null\\n0 returned [\"1\"]\\n0')\n except OSError: pass"
    )
    assert run(f"{forged}\nreturn 2") == 2
    with pytest.raises(CodeError):
        run(f"{forged}\nos._exit(0)")


def test_sandbox_flood_of_the_pipe_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that writes without end into the pipe of its results is ended."""
    monkeypatch.setattr(sandbox, "MOST_BYTES", 1 << 16)
    with pytest.raises(CodeError, match="writes without end"):
        run("while True:\n for n in range(3, 9):\n  try: os.write(n, b'x' * 4096)\n  except OSError: pass")


def test_sandbox_code_that_waits_for_ever_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that sleeps and runs nothing between two looks waits for what never comes."""
    monkeypatch.setattr(sandbox, "SILENT_SECONDS", 0.5)
    with pytest.raises(CodeError, match="waits for ever"):
        run("import threading\nlock = threading.Lock()\nlock.acquire()\nlock.acquire()")


def test_sandbox_without_processor_time_gives_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that the machine starves until the last resort of wall clock is no verdict on the code."""
    monkeypatch.setattr(sandbox, "SECONDS", 1000)
    monkeypatch.setattr(sandbox, "SILENT_SECONDS", 0.01)
    monkeypatch.setattr(sandbox, "WALL_SECONDS", 0.0)
    with pytest.raises(SandboxError, match="of a processor"):
        run("while True: pass")


def test_sandbox_that_cannot_confine_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where a child cannot be confined or started, or on another system, there is no verdict."""
    with monkeypatch.context() as patched:
        patched.setattr(sandbox, "LIMITS", {"RLIMIT_NOFILE": 1})
        with pytest.raises(SandboxError, match="cannot be confined"):
            run("return 1")
    with monkeypatch.context() as patched:
        patched.setattr(sandbox.sandbox_child, "__file__", str(tmp_path / "absent.py"))
        with pytest.raises(SandboxError, match=r"absent\.py"):
            run("return 1")
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SandboxError, match="needs Linux"):
        run("return 1")
