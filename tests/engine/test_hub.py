"""A model by its name on the Hugging Face hub: what is fetched, what is taken from the cache, and what is refused.
The real huggingface_hub talks to a server of our own. It reads its settings from the environment when it is imported:
they are set there, or another process has them."""

import json
import os
import pty
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fixture_types import MakeLlama

pytest.importorskip("huggingface_hub", reason="the extra hub is not installed")

pytest.importorskip("gguf", reason="the extra gguf is not installed")

from gguf_files import SMALL as TINY_GGUF
from gguf_files import bpe_keys, write_gguf
from hub_server import Commit, Hub, serving
from huggingface_hub import constants
from typer.testing import CliRunner

from d3engine import LLM, Engine, FullDepth, InvalidValueError, SamplingParams
from d3engine.cli import app
from d3engine.engine.gguf_choice import quantization_of
from d3engine.engine.hub import _snapshot
from d3engine.engine.model_directory import model_directory, own_pooling
from d3engine.errors import D3EngineError, MissingExtraError
from d3engine.utils.files import DATA_BYTES
from d3engine.weights_tools.inspection import verify_model

Run = Callable[..., Any]
Said = Callable[..., list[str]]
SMALL = {"config.json": b"{}", "model.safetensors": b"weights" * 100}
GGUF = {f"model-{kind}.gguf": kind.encode() * 50 for kind in ("Q2_K", "Q4_K_M", "Q8_0", "F16")}
BESIDE = {
    "mmproj-model-F16.gguf": b"pictures",
    "imatrix.gguf": b"counts",
    "README.md": b"# A model",
    "config.json": b"{}",
}
NEVER_FETCHED = {
    "pytorch_model.bin": b"pickled",
    "consolidated.00.pth": b"pickled",
    "training_args.pt": b"pickled",
    "modeling_model.py": b"raise SystemExit('run')",
    "onnx/model.safetensors": b"another's",
    "original/config.json": b"{}",
    "consolidated.safetensors": b"the same weights again",
    "README.md": b"# A model",
}
NOBODY = "http://127.0.0.1:9"
"""Where nothing listens."""

REMOVE = """
import json, sys
from typer.testing import CliRunner
from d3engine.cli import app
models = lambda *words: CliRunner().invoke(app, ["models", *words]).stdout
listed = lambda: json.loads(models("--json"))
print(json.dumps([listed(), *((models("remove", name, "--yes"), listed()) for name in sys.argv[1:])]))
"""


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving(Hub()) as hub:
        yield hub


@pytest.fixture
def run(hub: Hub, tmp_path: Path) -> Callable[..., Any]:
    """`run(*python_arguments)`: a process whose hub is `hub` and whose HF_HOME is empty at first."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}

    def run(*arguments: str, stderr: Any = subprocess.PIPE, **environment: str) -> Any:
        env = own | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "OMP_NUM_THREADS": "1"} | environment
        command = [sys.executable, *arguments]
        output = {"stdout": subprocess.PIPE, "stderr": stderr, "text": True}
        return subprocess.run(command, check=True, env=env, cwd=tmp_path, **output)

    return run


@pytest.fixture
def said(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Said:
    """`said(*names)`: what each name's directory is, or the error that it ends in."""

    def said(*names: str, offline: bool = False) -> list[str]:
        routes = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        settings = {"ENDPOINT": hub.url, "HUGGINGFACE_CO_URL_TEMPLATE": routes, "HF_HUB_OFFLINE": offline}
        for name, value in (settings | {"HF_HUB_CACHE": str(tmp_path / "hf" / "hub")}).items():
            monkeypatch.setattr(constants, name, value)
        _snapshot.cache_clear()  # as in another process
        found = []
        for name in names:
            try:
                found.append(str(model_directory(name)))
            except D3EngineError as error:
                found.append(f"{type(error).__name__}: {error}")
        return found

    return said


def test_downloaded_hub_model_answers_and_drafts_offline(hub: Hub, run: Run, said: Said) -> None:
    """A model of the hub answers offline once it is downloaded, and drafts too."""
    hub.repositories["ada/adder"] = {
        "main": Commit({file.name: file.read_bytes() for file in model_directory("demo").iterdir() if file.is_file()})
    }
    said("ada/adder")
    hub.url = NOBODY
    prompt = "Question: Tom has 5 pens. Tom finds 3. How many pens does Tom have now?\nAnswer:"
    command = ["generate", "ada/adder", prompt, "--depth", "speculative draft-model=ada/adder"]
    offline = run("-m", "d3engine", *command, "--max-tokens", "8", "--temperature", "0", HF_HUB_OFFLINE="1")
    with Engine("demo", depth=FullDepth(), kv_cache_memory_bytes=2**24) as engine:
        (output,) = engine.generate(prompt, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    assert offline.stdout.strip() == output.outputs[0].text.strip()


def test_only_what_the_loader_opens_is_fetched(hub: Hub, said: Said, tiny_llama: MakeLlama) -> None:
    files = {file.name: file.read_bytes() for file in tiny_llama(max_shard_size="100KB").directory.iterdir()}
    assert "model.safetensors.index.json" in files
    hub.repositories["ada/shards"] = {"main": Commit(files | NEVER_FETCHED)}
    (found,) = said("ada/shards")
    assert sorted(hub.fetched) == sorted(files)
    assert sorted(path.name for path in Path(found).iterdir()) == sorted(files)
    verify_model(Path(found))  # which follows the links of the hub's cache, and reads every tensor


def test_pooling_of_a_hub_model_is_fetched_with_it(hub: Hub, said: Said) -> None:
    """An embedding model of the hub pools as its folder 1_Pooling says."""
    pooling = {"1_Pooling/config.json": b'{"pooling_mode_lasttoken": true}', "2_Dense/config.json": b"{}"}
    hub.repositories["ada/embeds"] = {"main": Commit(SMALL | pooling)}
    (found,) = said("ada/embeds")
    assert own_pooling(Path(found)) == "last"
    assert sorted(hub.fetched) == ["1_Pooling/config.json", *sorted(SMALL)]


def test_revision_is_a_branch_tag_or_commit_and_may_move(hub: Hub, said: Said) -> None:
    """A revision is a branch, a tag or a commit, and a moving one moves."""
    first, second = Commit(SMALL), Commit(SMALL | {"config.json": b'{"second": 1}'})
    hub.repositories["ada/model"] = {"main": first, "refs/pr/1": second, "v1.0": first}
    names = ["ada/model", "ada/model@refs/pr/1", "ada/model@v1.0", f"ada/model@{second.id}"]
    assert [Path(found).name for found in said(*names)] == [first.id, second.id, first.id, second.id]
    hub.repositories["ada/model"]["main"] = second
    assert [Path(found).name for found in said(*names)] == [second.id, second.id, first.id, second.id]
    assert hub.fetched.count("model.safetensors") == 1  # of the same content
    assert [Path(found).name for found in said(*names, offline=True)][:3] == [second.id, second.id, first.id]


def test_process_asks_the_hub_once_and_reads_one_commit(hub: Hub, said: Said) -> None:
    """A process asks once, so that all files it reads are of one commit."""
    hub.repositories["ada/model"] = {"main": Commit(SMALL)}
    said("ada/model", "ada/model", "ada/model")
    assert hub.asked.count("/api/models/ada/model") == 1


def test_directory_of_that_name_wins_and_a_path_asks_no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory of that name wins, and a path is never looked up."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    Path("ada/model").mkdir(parents=True)
    assert model_directory("ada/model") == Path("ada/model")
    for none_of_the_hub in (Path("ada/other"), "./ada/other", "ada/other/", "/ada/other", "../other", "ada/../other"):
        with pytest.raises(InvalidValueError, match="'owner/name' of the Hugging Face hub"):
            model_directory(none_of_the_hub)


def test_hub_model_without_the_library_names_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the library the error is the command that installs it."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    said = r"model 'ada/none' is no directory here, and looking for it on the Hugging Face hub needs the package"
    with pytest.raises(MissingExtraError, match=rf"{said} 'huggingface_hub': .* -m pip install .*\[hub\]"):
        model_directory("ada/none")


def test_unavailable_hub_model_is_refused_before_any_fetch(hub: Hub, said: Said) -> None:
    """A model that cannot be had is refused in a sentence before anything is fetched."""
    pickled = {"config.json": b"{}", "pytorch_model.bin": b"pickled"}
    hub.gated.add("ada/gated")
    hub.repositories |= {
        "ada/model": {"main": Commit(SMALL)},
        "ada/pickled": {"main": Commit(pickled)},
        "ada/nothing": {"main": Commit({"adapter_model.safetensors": b""})},
        "ada/adapter": {"main": Commit({"adapter_model.safetensors": b"", "adapter_config.json": b"{}", **pickled})},
    }
    expected = {
        "ada/none": "InvalidValueError: model must be a directory, or a repository of the Hugging Face hub that",
        "ada/gated": "InvalidValueError: model must be a repository that you have access to: accept its terms",
        "ada/model@v9": "InvalidValueError: model must be a repository with a branch, a tag or a commit of its own",
        "ada/a--model": "InvalidValueError: model must be a directory, or a repository of the Hugging Face hub",
        "ada/pickled": "ModelFormatError: model 'ada/pickled' has no model.safetensors in its repository",
        "ada/nothing": "ModelFormatError: model 'ada/nothing' has no config.json in its repository",
        "ada/adapter": "ModelFormatError: model 'ada/adapter' is an adapter, no model: name its base model, and",
    }
    for found, name in zip(said(*expected), expected, strict=True):
        assert found.startswith(expected[name])
        assert name in found
        assert "\n" not in found
    assert hub.fetched == []


def test_files_too_large_are_refused_before_they_are_fetched(hub: Hub, said: Said) -> None:
    """Files that are too large are refused before they are fetched."""
    large = {"tokenizer.json": b"{}", **SMALL}
    hub.repositories |= {"ada/large": {"main": Commit(large)}, "ada/huge": {"main": Commit(SMALL)}}
    hub.repositories["ada/files"] = {"main": Commit(GGUF)}
    hub.sizes |= {"tokenizer.json": DATA_BYTES + 1, "model.safetensors": 10**18, "model-Q4_K_M.gguf": 10**18}
    too_large, *too_huge = said("ada/large", "ada/huge", "ada/files")
    assert too_large.startswith("ModelFormatError: model 'ada/large': tokenizer.json has")
    for name, found in zip(("ada/huge", "ada/files"), too_huge, strict=True):
        assert found.startswith(f"FailedError: model {name!r} takes 1000000000.0 GB, and ")
    assert hub.fetched == []


@pytest.mark.parametrize(
    ("name", "files", "broken"),
    [("ada/model", SMALL, "model.safetensors"), ("ada/model:Q8_0", GGUF, "model-Q8_0.gguf")],
)
def test_download_that_breaks_off_fails_and_leaves_no_file(
    hub: Hub, said: Said, monkeypatch: pytest.MonkeyPatch, name: str, files: dict[str, bytes], broken: str
) -> None:
    """A download that breaks off is an error, and its file is never taken for whole."""
    hub.repositories["ada/model"] = {"main": Commit(files)}
    hub.broken.add(broken)
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # it asks again five times, after longer and longer pauses
    (error,) = said(name)
    assert error.startswith(f"FailedError: model {name!r} could not be downloaded whole")
    assert said(name, offline=True)[0].startswith("InvalidValueError: model must be a directory, or")
    hub.broken.clear()
    (found,) = said(name)
    whole = Path(found) / broken if Path(found).is_dir() else Path(found)
    assert whole.read_bytes() == files[broken]


def test_download_shows_progress_on_a_terminal_alone(hub: Hub, run: Run) -> None:
    """A download shows its progress on a terminal alone and leaves nothing of it."""
    hub.repositories["ada/model"] = {"main": Commit(SMALL), "v2": Commit(SMALL | {"config.json": b'{"second": 1}'})}
    code = "import sys; from d3engine.engine.model_directory import model_directory; model_directory(sys.argv[1]);"
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    with open(theirs, "wb") as terminal:
        run("-c", f"{code} print('END', file=sys.stderr)", "ada/model", stderr=terminal)
    with open(ours, "rb") as screen:
        shown = screen.read1(2**20)
    assert b"Fetching 2 files" in shown
    assert shown.endswith(b"END\r\n")  # after which the library would draw some of its bars again
    assert run("-c", code, "ada/model@v2").stderr == ""


def test_unreachable_hub_takes_the_download_with_a_warning(
    hub: Hub, said: Said, caplog: pytest.LogCaptureFixture
) -> None:
    """Without the hub, the files downloaded before are taken with a warning."""
    hub.repositories["ada/model"] = {"main": Commit(SMALL)}
    online = said("ada/model")
    hub.url = NOBODY
    there, other = said("ada/model", "ada/other")
    assert [there] == online
    assert "ada/model is taken as it was downloaded before: the hub gave no answer" in caplog.text
    assert other.startswith("FailedError: model 'ada/other' is no directory here, and the Hugging Face hub could not")
    caplog.clear()
    there, other = said("ada/model", "ada/other", offline=True)
    assert ([there], caplog.text) == (online, "")
    assert other.startswith("InvalidValueError: model must be a directory, or a model downloaded before (HF_HUB_OFFLIN")


def test_hub_gguf_answers_offline_by_quantization_in_any_case(
    hub: Hub, said: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GGUF file of the hub answers offline by its quantization in any case."""
    file = write_gguf(tmp_path / "tiny.gguf", tokenizer=bpe_keys(), **TINY_GGUF)
    hub.repositories["ada/tiny"] = {"main": Commit(GGUF | BESIDE | {"model-Q8_0.gguf": file.read_bytes()})}
    (found,) = said("ada/tiny:q8_0")
    assert Path(found).name == "model-Q8_0.gguf"
    assert hub.fetched == ["model-Q8_0.gguf"]
    hub.url = NOBODY
    assert said("ada/tiny:Q8_0", offline=True) == [found]
    command = ["generate", "ada/tiny:Q8_0", "the", "--depth", "speculative draft-model=ada/tiny:Q8_0"]
    command += ["--max-tokens", "4", "--temperature", "0", "--json", "--kv-cache-memory-bytes", str(2**24)]
    offline = json.loads(CliRunner().invoke(app, command).stdout)
    with Engine(file, kv_cache_memory_bytes=2**24) as engine:
        (output,) = engine.generate("the", SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    assert [token["token_id"] for token in offline["tokens"]] == output.outputs[0].token_ids
    monkeypatch.chdir(tmp_path)
    converted = CliRunner().invoke(app, ["weights", "convert", "gguf", "ada/tiny:Q8_0", "out"])
    assert converted.stdout == "wrote out\n"


def test_quantization_is_of_a_revision_and_defaults_to_q4_k_m(hub: Hub, said: Said, tiny_llama: MakeLlama) -> None:
    """A quantization is of a revision, and without one it is Q4_K_M."""
    first, second = Commit(GGUF | BESIDE), Commit(GGUF | {"model-Q2_K.gguf": b"again"})
    hub.repositories["ada/files"] = {"main": second, "v1.0": first}
    names = ["ada/files@v1.0:Q2_K", f"ada/files@{second.id}:Q2_K", "ada/files:model-F16.gguf", "ada/files"]
    files = ["model-Q2_K.gguf", "model-Q2_K.gguf", "model-F16.gguf", "model-Q4_K_M.gguf"]
    commits = [first.id, second.id, second.id, second.id]
    found = [Path(path) for path in said(*names)]
    assert [(path.parent.name, path.name) for path in found] == list(zip(commits, files, strict=True))
    assert (found[0].read_bytes(), found[1].read_bytes()) == (GGUF["model-Q2_K.gguf"], b"again")
    assert sorted(hub.fetched) == sorted(files)
    assert said(*names, offline=True) == list(map(str, found))
    hub.repositories["ada/both"] = {"main": Commit(SMALL | GGUF)}  # whose name stands for its safetensors, as before
    (both,) = said("ada/both")
    assert sorted(path.name for path in Path(both).iterdir()) == sorted(SMALL)


def test_a_repositorys_one_gguf_needs_no_quantization(hub: Hub, said: Said, caplog: pytest.LogCaptureFixture) -> None:
    """The only GGUF file of a repository is taken, and its name told; another quantization is refused."""
    hub.repositories["ada/one"] = {"main": Commit({"model.Q8_0.gguf": b"8"} | BESIDE)}
    found, other = said("ada/one", "ada/one:Q4_K_M")
    assert Path(found).read_bytes() == b"8"
    assert "ada/one stands for ada/one:Q8_0, its only GGUF file" in caplog.text
    assert "ada/one:NAME with one GGUF file of this repository: Q8_0" in other
    assert said("ada/one:Q8_0", offline=True) == [found]


def test_absent_or_ambiguous_quantization_is_refused_with_list(hub: Hub, said: Said) -> None:
    """A quantization that is absent or ambiguous is refused with a list of the known ones."""
    hub.repositories |= {
        "ada/files": {"main": Commit(GGUF | BESIDE)},
        "ada/two": {"main": Commit({"a-Q4_K_M.gguf": b"a", "b-q4_k_m.gguf": b"b", "b-Q8_0.gguf": b"8"})},
        "ada/model": {"main": Commit(SMALL)},
    }
    expected = {
        "ada/files:Q4_K": "ada/files:NAME with one GGUF file of this repository: F16, Q2_K, Q4_K_M, Q8_0",
        "ada/two": "ada/two:NAME with one GGUF file of this repository: a-Q4_K_M, b-q4_k_m",
        "ada/two:Q4_K_M": "ada/two:NAME with one GGUF file of this repository: a-Q4_K_M, b-q4_k_m",
        "ada/model:Q4_K_M": "ada/model, for this repository has no GGUF files",
    }
    refusals = [f"InvalidValueError: model must be {allowed}; got {name!r}" for name, allowed in expected.items()]
    assert said(*expected) == refusals
    assert hub.fetched == []
    (a,) = said("ada/two:A-Q4_K_M")
    assert Path(a).read_bytes() == b"a"
    said("ada/files:Q8_0")
    others = said("ada/files:Q2_K", "ada/files", "ada/model:Q8_0", offline=True)
    since = "that was downloaded before, since the hub gives no answer: Q8_0"
    assert [other.partition(" with one GGUF file ")[2].partition(";")[0] for other in others[:2]] == [since, since]
    assert others[2].startswith("InvalidValueError: model must be a directory, or a model downloaded before")


def test_all_parts_of_a_gguf_file_are_fetched_under_the_first(hub: Hub, said: Said, tmp_path: Path) -> None:
    """All parts of a GGUF file are fetched, and the first stands for them."""
    folder = tmp_path / "Q8_0"
    folder.mkdir()
    write_gguf(folder / "model-Q8_0.gguf", tokenizer=bpe_keys(), part_tensors=5, **TINY_GGUF)
    parts = {f"Q8_0/{file.name}": file.read_bytes() for file in folder.iterdir()}
    assert len(parts) == 3
    hub.repositories["ada/parts"] = {"main": Commit(parts | GGUF | {"model-Q8_0.gguf": b"whole"})}
    (ambiguous,) = said("ada/parts:Q8_0")
    assert "of this repository: model-Q8_0, model-Q8_0" in ambiguous
    hub.repositories["ada/parts"] = {"main": Commit(parts | {"model-Q4_K_M.gguf": b"4"})}
    (first,) = said("ada/parts:Q8_0")
    assert sorted(hub.fetched) == sorted(parts)
    assert first.endswith("/Q8_0/model-Q8_0-00001-of-00003.gguf")
    assert sorted(path.name for path in Path(first).parent.iterdir()) == sorted(name[5:] for name in parts)
    assert said("ada/parts:q8_0", offline=True) == [first]
    verify_model(Path(first))  # which reads the tensors of all
    Path(first).with_name("model-Q8_0-00002-of-00003.gguf").unlink()
    (lacking,) = said("ada/parts:q8_0", offline=True)
    assert lacking.startswith("ModelFormatError: model 'ada/parts:q8_0' is in several parts, of which there are only")


def test_models_of_the_hubs_cache_are_listed_and_removed(hub: Hub, run: Run, said: Said, tmp_path: Path) -> None:
    """Models of the hub's cache are listed and removed one by one."""
    demo = {file.name: file.read_bytes() for file in model_directory("demo").iterdir() if file.is_file()}
    hub.repositories |= {
        "ada/adder": {"main": Commit(demo)},
        "ada/copy": {"main": Commit(demo)},  # whose commit has the same name
        "ada/files": {"main": Commit(GGUF), "v1.0": Commit(GGUF | {"model-F16.gguf": b"16" * 40})},
        "ada/other": {"main": Commit(SMALL)},
    }

    names = ["ada/adder", "ada/copy", "ada/files:Q8_0", "ada/files:Q4_K_M", "ada/files@v1.0:F16", "ada/other"]
    paths = said(*names)
    kinds = ["bfloat16", "bfloat16", "Q8_0", "Q4_K_M", "F16", "other"]
    sizes = [sum(len(demo[file]) for file in demo if file != "training.json")] * 2
    sizes += [200, 300, 80, sum(map(len, SMALL.values()))]
    there = {row[0]: row[1:] for row in zip(names, kinds, sizes, paths, strict=True)}
    removed = ["ada/copy", "ada/files:q8_0", "ada/files:Q4_K_M", "ada/files@v1.0:F16"]
    first, *after = json.loads(run("-c", REMOVE, *removed, D3ENGINE_CACHE=str(tmp_path)).stdout)
    assert {one["name"]: (one["kind"], one["bytes"], one["path"]) for one in first} == there
    assert {one["source"] for one in first} == {"Hugging Face"}
    for name, (answer, left) in zip(removed, after, strict=True):
        known = next(one for one in there if one.lower() == name.lower())
        assert answer == f"removed {known}: {there.pop(known)[1]:,} bytes are free\n"
        assert {one["name"] for one in left} == there.keys()
    assert said(*there, offline=True) == [path for _, _, path in there.values()]
    cache = tmp_path / "hf" / "hub"
    assert sorted(path.name for path in cache.glob("models--*")) == ["models--ada--adder", "models--ada--other"]


@pytest.mark.parametrize(
    ("file", "quantization"),
    [
        ("qwen2.5-0.5b-instruct-q4_k_m", "Q4_K_M"),
        ("Llama-3.2-3B-Instruct.IQ3_XS", "IQ3_XS"),
        ("Qwen3-8B-UD-Q4_K_XL", "UD-Q4_K_XL"),
        ("model.i1-Q4_K_S", "Q4_K_S"),
        ("gpt-oss-20b-mxfp4", "MXFP4"),
        ("Phi-4-bf16", "BF16"),
        ("TQ1_0/big-TQ1_0", "TQ1_0"),
        ("Q5_K_M/big", "Q5_K_M"),
        ("qwen2.5-0.5b-instruct-fp16", "FP16"),
        ("qwen2", None),
    ],
)
def test_the_quantization_is_read_in_the_name_of_a_file(file: str, quantization: str | None) -> None:
    assert quantization_of(file) == quantization


def test_vllm_revision_is_that_behind_the_at_of_a_hub_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's revision is the one behind the @ and needs a model of the hub."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for model, named in {"ada/model": "ada/model@v1", "ada/model:Q8_0": "ada/model@v1:Q8_0"}.items():
        with pytest.raises(MissingExtraError, match=f"'{named}' is no directory here"):
            LLM(model, revision="v1")
    for model in ("demo", "ada/model@v2", str(model_directory("demo"))):
        with pytest.raises(InvalidValueError, match="revision must be None beside a model that is no 'owner/name'"):
            LLM(model, revision="v1")
