"""No process that d3engine starts runs files of the working directory, or gets keys that it has no use for."""

import ast
import gc
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from d3engine.async_engine import engine_process
from d3engine.engine import ranks as rank_processes
from d3engine.errors import EngineDeadError
from d3engine.text import limited_process
from d3engine.utils import children

ROOT = Path(__file__).resolve().parents[2]
CODE = sorted(
    file
    for folder in ("d3engine", "kernels", "weights_tools", "benchmarks", "examples")
    for file in (ROOT / folder).rglob("*.py")
)

MAY_NAME_PYTHON = {"d3engine/utils/children.py", "d3engine/errors.py", "d3engine/cli/commands.py"}
"""The first starts it; the others print commands."""

STARTS_OTHERS = {  # programs that are not Python
    "benchmarks/gpu/device.py",
    "benchmarks/report.py",
    "benchmarks/serving/vllm_client.py",
    "d3engine/text/process_usage.py:usage_of",
    "kernels/ahead_of_time.py",
    "kernels/native/build.py",
}

SAFE_STARTS = {  # forked, which imports nothing; and with PYTHONSAFEPATH
    "kernels/inspect.py": "multiprocessing.get_context('fork')",
    "benchmarks/gpu_round.py": "get_context('spawn')",
    "benchmarks/gpu/compiled.py": "get_context('fork')",
}


def calls_of(file: Path) -> Iterator[tuple[str, str, str]]:
    """The place (file and function), the called name, and the text of each call."""
    where = str(file.relative_to(ROOT))
    for scope in ast.walk(tree := ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef | ast.Module):
            continue
        own = "" if scope is tree else getattr(scope, "name", "")
        for node in ast.walk(scope):
            if isinstance(node, ast.Call):
                yield f"{where}:{own}", ast.unparse(node.func), ast.unparse(node)


def test_python_is_started_by_one_helper_alone() -> None:
    named = {str(file.relative_to(ROOT)) for file in CODE if "sys.executable" in file.read_text(encoding="utf-8")}
    assert named == MAY_NAME_PYTHON
    assert children.python_command("-c", "")[1:2] == ["-P"]


def test_each_subprocess_is_python_by_helper_or_known_program() -> None:
    """Every subprocess is Python by that helper, or a known program."""
    starts = {"Popen", "run", "call", "check_call", "check_output", "getoutput", "getstatusoutput"}
    found: set[str] = set()
    for file in CODE:
        if "subprocess" not in (text := file.read_text(encoding="utf-8")):
            continue
        assert "from subprocess" not in text, file
        functions: dict[str, bool] = {}
        for place, name, _ in calls_of(file):
            module, _, function = name.rpartition(".")
            if module == "subprocess" and function in starts:
                functions.setdefault(place, False)
            if name in ("python_command", "main_command") or name == "_running":
                functions[place] = True
        found |= {place for place, is_python in functions.items() if not is_python and not place.endswith(":")}
    known = {place for place in found if place in STARTS_OTHERS or place.partition(":")[0] in STARTS_OTHERS}
    assert found - known == set()


def test_nothing_is_started_by_other_means() -> None:
    means = {"os.system", "os.popen", "os.startfile", "create_subprocess_exec", "create_subprocess_shell", "Pool"}
    means |= {"ProcessPoolExecutor", "multiprocessing.Process", "Process", "get_context", "multiprocessing.get_context"}
    for file in CODE:
        where = str(file.relative_to(ROOT))
        for _, name, text in calls_of(file):
            is_start = name in means or name.startswith(("os.exec", "os.spawn", "os.posix_spawn", "asyncio.create_sub"))
            if is_start and not (name == "Process" and "psutil" in text):
                assert text == SAFE_STARTS.get(where), (where, text)
            assert "shell=True" not in text, where


# -- with a folder of hostile files ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which every module's name is a file that says that it was run."""
    folder = tmp_path_factory.mktemp("hostile")
    names = {*sys.stdlib_module_names, *packages_distributions(), "sitecustomize", "usercustomize", "brotli", "ujson"}
    code = f"open({str(folder / 'was-run')!r}, 'a').write(__name__ + chr(10))\nraise SystemExit(1)\n"
    for name in names - {"d3engine"}:
        if name.isidentifier():
            (folder / f"{name}.py").write_text(code)
    return folder


def was_run(folder: Path) -> str:
    mark = folder / "was-run"
    said = mark.read_text() if mark.exists() else ""
    mark.unlink(missing_ok=True)
    return said


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    return kept | {"XDG_CACHE_HOME": str(tmp_path), "D3ENGINE_CACHE": str(tmp_path), "PIP_NO_INDEX": "1"} | more


@pytest.mark.parametrize(
    "arguments",
    [
        "--version",
        "schedule --layers 4 --steps 4 --depth 'd3 alpha=0.9 start=0.6'",
        "generate demo --max-tokens 2 Hello",
        "weights fetch smollm2",
    ],
)
def test_a_command_runs_no_file_of_its_folder(hostile: Path, tmp_path: Path, arguments: str) -> None:
    command = [sys.executable, "-m", "d3engine", *shlex.split(arguments)]
    done = subprocess.run(command, cwd=hostile, env=environment(tmp_path), capture_output=True, text=True, check=False)
    assert was_run(hostile) == ""
    fetches = "fetch" in arguments
    assert (done.returncode == 0) != fetches, done.stderr
    assert not fetches or "pip could not download" in done.stderr or "gguf" in done.stderr


@pytest.mark.parametrize("start", [["-m", "d3engine"], ["-P", "-c", "from d3engine.cli import main; main()"]])
def test_server_with_engine_process_runs_no_file_of_its_folder(hostile: Path, tmp_path: Path, start: list[str]) -> None:
    """A server with an engine process runs no file of its folder."""
    command = [sys.executable, *start, "serve", "demo", "--port", "0", "--device", "cpu", "--engine-process"]
    server = subprocess.Popen(command, cwd=hostile, env=environment(tmp_path), stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    with server:
        lines = []
        for line in server.stderr:
            lines.append(line)
            if "http://" in line:
                break
        server.send_signal(signal.SIGTERM)
        lines += server.stderr.readlines()
    assert was_run(hostile) == ""
    assert server.returncode == 0, lines


RANKS = """
from d3engine import Engine, SamplingParams
with Engine("demo", device="cpu", tensor_parallel_size=2, num_threads=1, kv_cache_memory_bytes=2**24) as engine:
    print(len(engine.generate("Hello", SamplingParams(max_tokens=2), use_tqdm=False)))
"""


def test_ranks_run_no_file_of_their_folder(hostile: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-c", RANKS]
    env = environment(tmp_path, D3ENGINE_KERNELS="reference")
    done = subprocess.run(command, cwd=hostile, env=env, capture_output=True, text=True, check=False)
    assert was_run(hostile) == ""
    assert done.stdout == "1\n", done.stderr


def test_working_directory_stays_with_d3engine_or_if_named(tmp_path: Path) -> None:
    """The working directory stays where d3engine lies in it or the user names it."""
    (tmp_path / "d3engine").symlink_to(ROOT / "d3engine")
    (tmp_path / "mine.py").write_text("import d3engine, other; print(other.VALUE)")
    (tmp_path / "other.py").write_text("VALUE = 3")
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").write_text("import d3engine")
    (tmp_path / "package/__main__.py").write_text("import other; print(other.VALUE)")
    for module in ("mine", "package"):  # modules of a user's own, which import d3engine
        command = [sys.executable, "-m", module]
        env = environment(tmp_path)
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert done.stdout == "3\n", done.stderr
    bare = [sys.executable, "-S", "-m", "d3engine.utils.version"]  # found in the working directory alone
    env = environment(tmp_path)
    assert subprocess.run(bare, cwd=ROOT, env=env, capture_output=True, check=False).returncode == 0


def test_child_searches_the_parents_folders_but_the_current(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child searches the same folders, but for the working directory."""
    added = tmp_path / "added"
    added.mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "path", ["", str(tmp_path / "here"), str(added), *sys.path])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "named"))
    (added / "printing.py").write_text(
        "import json, sys\ndef main(): print(json.dumps([sys.path, sys.argv, list(__import__('os').environ)]))"
    )
    monkeypatch.setenv("D3ENGINE_API_KEY", "secret")
    command = children.main_command("printing", "1", "two")
    said = subprocess.run(command, env=children.child_environment(), capture_output=True, text=True, check=True).stdout
    path, argv, names = json.loads(said)
    assert argv == ["-c", "1", "two"]
    assert str(added) in path
    assert str(tmp_path / "named") in path  # PYTHONPATH counts
    assert not {"", str(tmp_path / "here")} & set(path)
    assert "D3ENGINE_API_KEY" not in names


def test_the_process_of_chat_templates_gets_no_secret_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = ("D3ENGINE_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY")
    for name in secrets:
        monkeypatch.setenv(name, "secret")
    passed_on = limited_process._environment()
    assert "PATH" in passed_on
    assert "secret" not in passed_on.values()


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="this system has no /proc")
def test_processes_that_fail_to_start_leave_no_files_and_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Processes that cannot be started leave no files open and no ranks behind."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    started: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen

    def start_one(*arguments: object, **settings: object) -> subprocess.Popen[bytes]:
        if started:
            raise OSError("no more processes")
        started.append(start([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
        return started[0]

    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", start_one)
        with pytest.raises(EngineDeadError, match="rank 2 of 4 cannot be started"):  # makes what is made once
            rank_processes.start_ranks(4)
        assert started[0].returncode is not None
        assert started[0].stdin is not None
        started[0].stdin.close()
        with pytest.raises(EngineDeadError, match="process cannot be started"):
            engine_process.EngineProcess("demo", {})
        gc.collect()
        before = open_files()
        for attempt in (lambda: rank_processes.start_ranks(2), lambda: engine_process.EngineProcess("demo", {})):
            with pytest.raises(EngineDeadError):
                attempt()
        gc.collect()
    assert open_files() == before
    assert not list(tmp_path.iterdir())
