"""What importing the package brings, and what it does not."""

from __future__ import annotations

import ast
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import d3engine

ROOT = Path(__file__).resolve().parents[1]


def run(code: str, *, isolated: bool = False) -> str:
    """The output of `code` in a fresh interpreter; isolated: from the bare checkout, without any installation."""
    flags = ["-S", "-I"] if isolated else []
    result = subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    return result.stdout.strip()


def test_importing_the_package_loads_no_transformers_or_torch() -> None:
    """Importing the package loads neither transformers nor torch nor an extra."""
    loaded = run("import d3engine, sys; print(*sys.modules)").split()
    assert "d3engine" in loaded
    assert not {"torch", "transformers", "matplotlib", "typer", "rich"} & set(loaded)


def test_engine_and_server_load_no_optional_package_unasked() -> None:
    """Neither engine nor server loads an optional package that was not asked for."""
    loaded = run("from d3engine import Engine; import d3engine.server.app, sys; print(*sys.modules)").split()
    assert {"torch", "d3engine.server.middleware.request_log"} <= set(loaded)
    assert not {"transformers", "matplotlib", "pytest", "lm_eval", "typer", "opentelemetry"} & set(loaded)


def test_bare_checkout_finds_kernels_without_installation() -> None:
    """A bare checkout finds kernels and tools without an installation."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import d3engine.weights_tools as w; print(w.__file__)"
    assert Path(run(code, isolated=True)) == ROOT / "weights_tools" / "__init__.py"


@pytest.mark.parametrize("name", ["kernels", "weights_tools"])
def test_no_top_level_module_of_a_foreign_name_can_be_imported(name: str) -> None:
    assert run(f"import importlib.util; print(importlib.util.find_spec({name!r}))") == "None"


def test_every_public_name_can_be_imported() -> None:
    for name in d3engine.__all__:
        assert getattr(d3engine, name) is not None
    assert set(d3engine.__all__) <= set(dir(d3engine))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Engin"):
        d3engine.Engin


POSIX_MODULES = {"fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog", "curses", "readline"}
POSIX_SIGNALS = {s.name for s in signal.Signals} - {"SIGINT", "SIGTERM", "SIGABRT", "SIGFPE", "SIGILL", "SIGSEGV"}
POSIX_NAMES = {"O_NONBLOCK", "fork", "register_at_fork", "sched_getaffinity", "getuid", "killpg", *POSIX_SIGNALS}


def run_at_import(nodes: list[ast.stmt]) -> Iterator[ast.AST]:
    """What importing a module runs on every system: nothing in a function, a `try`, or an `if` of the platform."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for part in [*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults)]:
                yield from ast.walk(part)
        elif isinstance(node, ast.ClassDef):
            yield from run_at_import(node.body)
        elif isinstance(node, ast.If):
            asks = ast.unparse(node.test)
            if "platform" not in asks and "hasattr" not in asks and "TYPE_CHECKING" not in asks:
                yield from run_at_import([*node.body, *node.orelse])
        elif not isinstance(node, ast.Try):
            yield from (part for part in ast.walk(node) if not isinstance(part, ast.Lambda))


def test_no_module_needs_what_only_posix_has_to_be_imported() -> None:
    for file in [path for folder in ("d3engine", "kernels", "weights_tools") for path in (ROOT / folder).rglob("*.py")]:
        for node in run_at_import(ast.parse(file.read_text(encoding="utf-8")).body):
            names: set[str] = set()
            if isinstance(node, ast.Import):
                names = {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = {str(node.module).partition(".")[0]}
            assert not names & POSIX_MODULES, file
            assert not (isinstance(node, ast.Attribute) and node.attr in POSIX_NAMES), (file, ast.unparse(node))


ABSENT_ON_WINDOWS = {
    "os": [
        "fork",
        "register_at_fork",
        "sched_getaffinity",
        "sched_yield",
        "getuid",
        "killpg",
        "sysconf",
        "posix_fadvise",
        "O_NONBLOCK",
    ],
    "signal": ["SIGALRM", "SIGHUP", "SIGKILL", "SIGPROF", "SIGUSR1", "setitimer", "pthread_sigmask"],
    "socket": ["AF_UNIX"],
}
"""Names of modules that both systems have."""
NOT_ON_A_CPU = ("kernels/triton/", "kernels/inspect.py", "kernels/ahead_of_time.py", "d3engine/integrations/")
FILES = [
    path.relative_to(ROOT)
    for folder in ("d3engine", "kernels", "weights_tools")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if not path.name.startswith("__") and not path.relative_to(ROOT).as_posix().startswith(NOT_ON_A_CPU)
]
ON_A_CPU = [
    ".".join(["d3engine", *path.with_suffix("").parts]).replace("d3engine.d3engine", "d3engine") for path in FILES
]
AS_ON_WINDOWS = f"""
import ctypes, importlib, sys
from types import ModuleType
from unittest.mock import MagicMock

class Hidden:
    def find_spec(name, path, target=None):
        if name in {POSIX_MODULES!r}:
            raise ModuleNotFoundError(f"no module {{name}}", name=name)

importable = []
for name in {ON_A_CPU!r}:  # first as it is: the libraries of others are loaded then
    try:
        importlib.import_module(name)
        importable.append(name)
    except ModuleNotFoundError as error:  # an extra is not installed
        assert not str(error.name).startswith("d3engine"), error
for name in [name for name in sys.modules if name.startswith("d3engine") or name in {POSIX_MODULES!r}]:
    del sys.modules[name]
for module, absent in {ABSENT_ON_WINDOWS!r}.items():
    for name in absent:
        vars(sys.modules[module]).pop(name)
sys.meta_path.insert(0, Hidden)
sys.modules["msvcrt"], ctypes.WinDLL = ModuleType("msvcrt"), MagicMock()
sys.platform = "win32"
for name in importable:
    importlib.import_module(name)
print(len(importable))
"""


def test_every_module_imports_where_posix_is_hidden() -> None:
    """Those of a CPU, as on Windows; without the code in functions, which only a Windows can try."""
    assert int(run(AS_ON_WINDOWS).splitlines()[-1]) > 200
