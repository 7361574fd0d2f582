"""Installing: a wheel holds the bundled model, and `make` fetches the torch that the machine can use."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import threading
import tomllib
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from d3engine import errors
from d3engine.kernels.native.build import sources
from d3engine.server import page_libraries

ROOT = Path(__file__).resolve().parents[1]
NATIVE = ROOT / "kernels" / "native"

BUILD = "import setuptools.build_meta as b, sys; getattr(b, 'build_' + sys.argv[1])('.')"
PYTHON_THAT_NOTES_ITS_ARGUMENTS = f"""#!/bin/sh
case "$1" in -c) exec {sys.executable} "$@" ;; esac
echo "$@" >> "$(dirname "$0")/called"
case "$*" in *--index-url*) test ! -e "$(dirname "$0")/../no torch at" ;; esac
"""


def build(kind: str, tmp_path: Path) -> str:
    """What is said while a "wheel" or an "sdist" is built in `tmp_path`, of a copy of this checkout."""
    pytest.importorskip("setuptools", minversion="77")
    for folder in ("d3engine", "kernels", "weights_tools"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, tmp_path)
    command = [sys.executable, "-c", BUILD, kind]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stderr


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tarfile.TarFile]:
    """A source archive as GitHub builds it for a tag."""
    folder = tmp_path_factory.mktemp("sdist")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("SERVER_URL", "https://host"), ("REPOSITORY", "owner/name"), ("REF_NAME", "v1.2.3")):
            patch.setenv(f"GITHUB_{name}", value)
        build("sdist", folder)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        yield archive


def test_an_sdist_holds_all_that_the_native_library_is_built_of(sdist: tarfile.TarFile) -> None:
    held = {Path(*Path(name).parts[1:]) for name in sdist.getnames()}
    needed = {Path("setup.py"), *(path.relative_to(ROOT) for path in (NATIVE / "build.py", *sources(NATIVE)))}
    assert needed <= held
    assert Path("kernels/native/libd3native.so") not in held  # which was built for this machine


def test_metadata_of_a_tag_has_links_to_its_repository(sdist: tarfile.TarFile) -> None:
    """A package index, which has none of the README's files, can show its images and links."""
    (file,) = [name for name in sdist.getnames() if name.count("/") == 1 and name.endswith("/PKG-INFO")]
    metadata = sdist.extractfile(file)
    assert metadata is not None
    text = metadata.read().decode()
    assert "Project-URL: Repository, https://host/owner/name\n" in text
    assert "](https://host/owner/name/raw/v1.2.3/docs/images/headline.png)" in text
    assert "](https://host/owner/name/blob/v1.2.3/docs/tutorials/first-answer.md)" in text
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) > 20
    assert [link for link in links if not link.startswith("https://")] == []


def test_wheel_holds_model_and_page_and_warns_of_no_package(tmp_path: Path) -> None:
    """A wheel holds the bundled model and the page's libraries with their licences, and no package is warned of."""
    assert "d3engine.demo_model" not in build("wheel", tmp_path)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        held = set(wheel.namelist())
    model = {f"d3engine/demo_model/{one.name}" for one in (ROOT / "d3engine/demo_model").iterdir() if one.is_file()}
    assert "d3engine/demo_model/model.safetensors" in model
    assert {*model, "d3engine/py.typed", "d3engine/kernels/reference.py"} <= held
    if page_libraries.is_fetched():  # python d3engine/server/page_libraries.py does it
        vendor, prefix = page_libraries.FOLDER, "d3engine/server/page/vendor/"
        there = {path.relative_to(vendor).as_posix() for path in vendor.rglob("*") if path.is_file()}
        assert {name.removeprefix(prefix) for name in held if name.startswith(prefix)} == there
        assert len([name for name in there if name.endswith("LICENSE")]) == len(page_libraries.LIBRARIES)
        assert {"katex.css", "markdown-it.js"} < there


def test_library_of_the_page_that_has_changed_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library of the page that is another than it was is not taken."""
    (library, *_) = page_libraries.LIBRARIES
    monkeypatch.setattr(page_libraries, "REGISTRY", tmp_path.as_uri())
    package = tmp_path / library.name / "-" / f"{library.name}-{library.version}.tgz"
    package.parent.mkdir(parents=True)
    with pytest.raises(page_libraries.LibraryError, match="cannot be fetched"):
        page_libraries.fetch(tmp_path / "vendor")
    package.write_bytes(b"another")
    with pytest.raises(page_libraries.LibraryError, match="its SHA-512 is another"):
        page_libraries.fetch(tmp_path / "vendor")
    assert not (tmp_path / "vendor").exists()
    monkeypatch.setattr(page_libraries, "REGISTRY", "https://127.0.0.1:9")
    assert page_libraries.main() == (0 if page_libraries.is_fetched() else 1)


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """A virtual environment whose python does nothing but note what it was called with."""
    if shutil.which("make") is None or sys.platform != "linux":
        pytest.skip("the index for CPUs is chosen by make, on Linux")
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(PYTHON_THAT_NOTES_ITS_ARGUMENTS)
    python.chmod(0o755)
    return tmp_path


def installs(venv: Path, *variables: str) -> list[str]:
    """What `make` has pip install for torch, a line for each call."""
    path = os.pathsep.join(p for p in os.environ["PATH"].split(os.pathsep) if not (Path(p) / "nvidia-smi").exists())
    command = ["make", "--always-make", "-o", f"{venv}/bin/python", f"VENV={venv}", *variables, f"{venv}/.torch"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, env=os.environ | {"PATH": path, "no_proxy": "*"})
    return (venv / "bin" / "called").read_text().splitlines()


@pytest.fixture
def wheels(tmp_path: Path) -> Iterator[str]:
    """The address of a package index with torch in it."""
    (tmp_path / "index" / "torch").mkdir(parents=True)
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "index"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


AN_OLD_PYTHON = f"""#!/bin/sh
test "$1" = -c && exec {sys.executable} -c "import sys; sys.version_info = (3, 10, 14); $2"
echo "$@" >> "$(dirname "$0")/called"
"""


@pytest.mark.parametrize("has_venv", [False, True])
def test_too_old_python_is_named_before_anything_is_installed(tmp_path: Path, has_venv: bool) -> None:
    """The script names a Python that is too old before it installs anything."""
    if shutil.which("make") is None:
        pytest.skip("needs make")
    python = tmp_path / ("venv/bin" if has_venv else ".") / "python"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text(AN_OLD_PYTHON)
    python.chmod(0o755)
    command = ["make", f"VENV={tmp_path}/venv", f"PYTHON={python}", "setup"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0
    assert "d3engine needs Python 3.11 or newer; " in done.stderr
    assert " is 3.10: name a newer one" in done.stderr
    assert not (python.parent / "called").exists()


def test_make_asks_for_the_python_that_the_package_does() -> None:
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    (asked,) = re.findall(r"v >= \((\d+), (\d+)\)", (ROOT / "Makefile").read_text())
    assert wanted == ">=" + ".".join(asked)


def test_how_to_install_stands_in_one_file() -> None:
    """The quickstart includes it, the README has its text, and no other page says how to install the package."""
    docs, snippet = ROOT / "docs", (ROOT / "docs" / "snippets" / "install.sh").read_text()
    quickstart = (docs / "tutorials" / "first-answer.md").read_text()
    assert f"```sh\n{snippet}```" in (ROOT / "README.md").read_text()
    assert '```sh\n--8<-- "install.sh"\n' in quickstart
    words = [line.split()[:2] for line in snippet.splitlines()[1:]]
    in_checkout = [["make", "demo"], [".", ".venv/bin/activate"], ["pip", "install"]]  # d3engine is then found
    assert words == [*in_checkout, ["pip", "install"]]
    (index,) = [line for line in quickstart.splitlines() if line.startswith("pip install") and "--index-url" in line]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert index.split('"')[1] in project["dependencies"]
    extras = {
        extra for line in snippet.splitlines() for extra in re.findall(r"\w+", line.partition("[")[2].partition("]")[0])
    }
    assert extras
    assert extras <= set(project["optional-dependencies"])
    said = re.compile(r"pip[ ]install [^`\n]*\.(?:\[|\s|$)")
    assert [page.name for page in docs.rglob("*.md") if said.search(page.read_text())] == []


def test_nothing_says_to_install_a_release_that_there_is_none_of() -> None:
    """No page, help or message; a checkout's extras are `pip install ".[EXTRA]"`."""
    folders = ("d3engine", "kernels", "weights_tools", "docs", "examples", "benchmarks", "tests")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*") if file.suffix in (".py", ".md")]
    files += [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "Makefile", "mkdocs.yml")]
    found = re.compile(r"pip[ ]install\s+(?:-\S+\s+)*['\"]?d3engine\b")
    assert [str(file) for file in files if found.search(file.read_text())] == []


@pytest.mark.parametrize("is_checkout", [True, False])
def test_a_missing_extra_is_installed_from_a_checkout(monkeypatch: pytest.MonkeyPatch, is_checkout: bool) -> None:
    if not is_checkout:
        monkeypatch.setattr(Path, "is_file", lambda self: False)
    said = errors.install_command("serve")
    expected = f"-e '{ROOT}[serve]'" if is_checkout else "'.[serve]' in a checkout of d3engine"
    assert said.endswith(f"pip install {expected}")


NO_DRIVER = "NVIDIA_DRIVER=/does/not/exist"


def test_without_a_gpu_torch_comes_from_the_index_for_cpus(venv: Path, wheels: str) -> None:
    (line,) = installs(venv, NO_DRIVER, f"CPU_WHEELS={wheels}")
    assert f"--index-url {wheels} torch>=2.11,<2.14" in line
    assert "--no-input" in line
    assert "--quiet" not in line  # pip says what it fetches, and how large it is


def test_index_without_torch_leaves_pip_its_own_sources(venv: Path, wheels: str) -> None:
    """Where that index has no torch for this machine, pip looks where it is set to look."""
    (venv / "no torch at").write_text(wheels)
    first, second = installs(venv, NO_DRIVER, f"CPU_WHEELS={wheels}")
    assert "--index-url" in first
    assert "--index-url" not in second
    assert second.endswith("torch>=2.11,<2.14")


@pytest.mark.parametrize("case", ["a driver", "not to be reached", "not wanted"])
def test_elsewhere_torch_comes_from_where_pip_looks(venv: Path, wheels: str, case: str) -> None:
    given = {
        "a driver": [f"NVIDIA_DRIVER={venv}", f"CPU_WHEELS={wheels}"],
        "not to be reached": [NO_DRIVER, f"CPU_WHEELS={wheels}/nowhere"],
        "not wanted": [NO_DRIVER, "CPU_WHEELS="],
    }[case]
    (line,) = installs(venv, *given)
    assert "--index-url" not in line
    assert line.endswith("torch>=2.11,<2.14")
