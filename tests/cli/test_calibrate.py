"""`d3engine calibrate`: exit codes, what it writes and what it says, and what other commands say of its setting."""

import json
import shutil
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from invoking import invoke, refused, succeed

from d3engine import Engine, SamplingParams
from d3engine.depth import D3, Width
from d3engine.engine.depth import Certification, resolve_depth
from d3engine.engine.model_directory import model_directory
from d3engine.errors import ModelFormatError
from d3engine.model.config import ModelConfig
from d3engine.model.expected_tensors import fingerprint
from d3engine.model.students import STUDENT_FILE, Student, write_student
from d3engine.model.weights import load_weights
from d3engine.research.calibration.search import ALPHAS, PAPER_ALPHAS, STARTS, make_candidates, window_candidates
from d3engine.research.evaluation.paper_tables import TABLE_5_ALPHAS, TABLE_5_STARTS

# Few problems prove little, so the tolerance is wide: 16 points.
FEW = ("--tolerance", "16", "--limit", "23", "--max-tokens", "64", "--device", "cpu")
SMALL = (*FEW, "--budget", "165")


def run(*arguments: str) -> Any:
    return invoke(["calibrate", *arguments])


def test_the_command_writes_what_it_chose_on_the_bundled_model(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out, plot = tmp_path / "d3.json", tmp_path / "grid.png"
    settings = ("--alpha", "0.9", "--start", "0.2", "--start", "0.7")
    result = succeed(["calibrate", "demo", *SMALL, *settings, "--out", str(out), "--plot", str(plot)])
    written = json.loads(out.read_text())
    assert written["depth"] == D3(alpha=0.9, start=0.7).describe()
    assert written["task"] == "word-problems"
    assert written["fingerprint"] == fingerprint(model_directory("demo"))
    assert 11 < written["evidence"]["test"]["realised_mean_layers"] < 12
    assert plot.read_bytes().startswith(b"\x89PNG")
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["alpha", "\\", "start", "0.2", "0.7"] in rows
    assert any(one.startswith("alpha 0.9, start 0.7") and one.endswith("passed") for one in result.stdout.splitlines())
    assert f"written to {out}" in result.stdout
    assert result.stdout.isascii()


def test_one_given_setting_is_certified_alone_and_written(tmp_path: Path) -> None:
    out = tmp_path / "d3.json"
    result = succeed(["calibrate", "demo", *FEW, "--check", "d3 alpha=0.9 start=0.7", "--out", str(out)])
    written = json.loads(out.read_text())
    assert written["depth"] == D3(alpha=0.9, start=0.7).describe()
    assert written["evidence"]["settings_tried"] == 1
    assert "never certified" not in result.stderr  # which is what it finds out
    assert "Certificates on 23 problems" in result.stdout
    assert "Screening" not in result.stdout
    unsafe = run("demo", *FEW, "--check", "d3 alpha=0.9 start=0.2", "--out", str(out), "--json")
    assert unsafe.exit_code == 3, unsafe.output
    report = json.loads(unsafe.stdout)
    assert (report["settings"], report["depth"], len(report["certificates"])) == ([], None, 1)


def test_the_papers_grid_has_no_0_99_and_ours_has() -> None:
    ours, papers = ({one.policy.alpha for one in make_candidates(32, 1024, alphas=a)} for a in (ALPHAS, PAPER_ALPHAS))
    assert papers == set(TABLE_5_ALPHAS) == ours - {0.99}
    assert set(STARTS) == set(TABLE_5_STARTS)


def test_calibrate_without_a_safe_setting_exits_3_unwritten(tmp_path: Path) -> None:
    """Where no setting is shown to be safe, `calibrate` exits with 3 and writes no file."""
    out = tmp_path / "d3.json"
    result = run("demo", *FEW, "--budget", "110", "--alpha", "0.9", "--start", "0.2", "--out", str(out), "--json")
    assert result.exit_code == 3, result.output
    report = json.loads(result.stdout)
    assert (report["safe"], report["depth"], report["written"]) == (False, None, None)
    assert "None could be shown to be safe" in report["reason"]
    assert not list(tmp_path.iterdir())


def test_calibrate_task_beyond_the_model_exits_4_early(tmp_path: Path) -> None:
    """A task that the model cannot do ends `calibrate` with exit code 4 after a few answers."""
    # It passed there with any setting: who gets nothing right can lose nothing.
    any_setting = ("--alpha", "0.8", "--start", "0.2")
    result = run("demo", *SMALL, *any_setting, "--task", "word-sorting", "--out", str(tmp_path / "d3.json"))
    assert result.exit_code == 4, result.output
    assert "Full depth itself knows too little of this task" in result.stdout
    assert "right on 0 of 3 problems" in result.stdout
    plan, chance = result.stderr.splitlines()[:2]
    assert plan == "1 setting, at most 158 answers: 56 problems to search, 23 others to certify."
    assert chance.startswith("How likely a setting without any loss is certified at a tolerance of 16 points")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo"], "--out"),
        (["demo", "--out", "no-such-directory/d3.json"], "--out"),
        (["demo", "--out", "d3.json", "--tolerance", "0"], "--tolerance"),
        (["demo", "--out", "d3.json", "--limit", "100"], "--limit"),
        (["demo", "--out", "d3.json", "--least-saving", "100"], "--least-saving"),
        (["demo", "--out", "d3.json", "--budget", "3000"], "--budget"),
        (["demo", "--out", "d3.json", "--alpha", "1.5"], "alpha"),
        (["demo", "--out", "d3.json", "--alpha", "1"], "skips something"),
        (["demo", "--out", "d3.json", "--plot", "no-such-directory/a.png"], "--plot"),
        (["demo", "--out", "d3.json", "--plot", "a.foo"], "--plot"),
        (["no-such-model"], "model"),
        (["demo", "--out", "d3.json", "--task", "gsm8k"], "got 'gsm8k'"),
        (["demo", "--out", "d3.json", "--task", "gsm8k", "--data", "nowhere"], "--data"),
        (["demo", "--out", "d3.json", "--num-fewshot", "-1"], "--num-fewshot"),
        (["demo", "--out", "d3.json", "--check", "full"], "--check"),
        (["demo", "--out", "d3.json", "--check", "d3 alpha=1 start=0.5"], "--check"),
        (["demo", "--out", "d3.json", "--check", "d3 alpha=0.9 start=0.5", "--alpha", "0.8"], "--alpha"),
        (["demo", "--out", "d3.json", "--check", "d3 alpha=0.9 start=0.5", "--limit", "100"], "--limit"),
    ],
)
def test_what_cannot_work_is_refused_before_it_begins(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in refused(["calibrate", *arguments]).splitlines()[-1]
    assert not list(tmp_path.iterdir())


def test_a_setting_that_was_downloaded_is_not_written_over(tmp_path: Path) -> None:
    model, fetched = tmp_path / "model", tmp_path / "fetched.json"
    shutil.copytree(model_directory("demo"), model)
    (model / "d3.json").rename(fetched)
    (model / "d3.json").symlink_to(fetched)
    assert "--out must be given as a file to write, since" in refused(["calibrate", str(model)])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["generate", "demo", "Question: 1 + 1?\nAnswer:"], True),
        (["generate", "demo", "Question: 1 + 1?\nAnswer:", "--depth", "full"], False),
        (["eval", "demo", "--limit", "1"], True),
        (["eval", "demo", "--limit", "1", "--depth", "full"], False),
    ],
)
def test_auto_depth_names_its_calibrated_task_on_stderr(arguments: list[str], told: bool) -> None:
    """Commands name on stderr the task for which `--depth auto` was found safe."""
    result = succeed([*arguments, "--max-tokens", "2", "--device", "cpu"])
    assert ("(found safe for word-problems, for no other task)" in result.stderr) == told
    assert "found safe" not in result.stdout


def test_fixed_windows_are_tried_best_first(tmp_path: Path) -> None:
    """Around a quarter of the depth, or as a report of what each costs has them."""
    assert [one.policy.skip_layers for one in window_candidates(24, (1, 3), {}, {})] == [  # type: ignore[attr-defined]
        *((6,), (5,), (7,)),
        *((6, 7, 8), (5, 6, 7), (7, 8, 9)),
    ]
    small = (*FEW, "--budget", "400", "--max-tokens", "8")
    report = tmp_path / "report.json"
    costs = {(2, 3): 0.5, (14, 15): 0.1, (13, 14): 0.2, (1, 2): 0.9}
    described = [{"policy": f"[{first}, {stop})", "all": {"kl": kl}} for (first, stop), kl in costs.items()]
    report.write_text(json.dumps({"policies": described}))
    out = tmp_path / "d3.json"
    words = (*small, "--grid", "windows", "--window-width", "1", "--windows-from", str(report), "--out", str(out))
    result = run("demo", *words, "--json")
    assert result.exit_code in (0, 3, 4), result.output
    assert "3 settings" in result.stderr
    found = json.loads(result.stdout)
    assert [one["depth"]["skip_layers"] for one in found["settings"]] in ([[14], [13], [2]], [])
    wrong = run("demo", *words[:-4], "--windows-from", str(out), "--out", str(out))
    assert "a JSON report of d3engine depth measure" in wrong.stderr.replace("\n", " ")


def test_students_of_a_width_are_certified_and_taken_by_auto(tmp_path: Path) -> None:
    """Each lies beside the weights with its SHA-256, by which a file that was put in its place is refused."""
    directory = shutil.copytree(model_directory("demo"), tmp_path / "model")
    config = ModelConfig.from_directory(directory)
    down = load_weights(directory, config, dtype=torch.float32, device="cpu").layers[9].down
    assert isinstance(down, torch.Tensor)
    files = [tmp_path / "a", tmp_path / "b"]
    for nth, file in enumerate(files):
        layers = {9 + nth: {"down": down if nth == 0 else torch.zeros_like(down)}}
        write_student(Student(fingerprint(directory), config.num_layers, config.hidden_size, (15,), layers), file)
    policy = f"width from-steps=1,60 skip-layers=15 students={files[0]},{files[1]}"
    succeed(["calibrate", str(directory), *FEW, "--check", policy])
    auto = Width(["auto-1", "auto-2"], steps=(1, 60), skip_layers=[15])
    assert resolve_depth("auto", directory) == auto
    assert Certification(directory, config.num_layers).certified == auto
    with Engine(directory, device="cpu") as engine:
        (found,) = engine.generate(["Tom has 5 pens."], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
    assert found.outputs[0].depths == [16, 15, 15]
    copy = directory / "student-2.safetensors"
    assert copy.read_bytes() == files[1].read_bytes() != (directory / "student-1.safetensors").read_bytes()
    copy.write_bytes(files[0].read_bytes())
    with pytest.raises(ModelFormatError, match=r"another student than that in .*student-2"):
        resolve_depth("auto", directory)
    said = refused(["calibrate", str(directory), *FEW, "--check", policy])
    assert "no other student-2.safetensors lies beside it" in said.replace("\n", " ")


def test_a_student_is_certified_and_written_beside_its_setting(tmp_path: Path) -> None:
    directory = model_directory("demo")
    config = ModelConfig.from_directory(directory)
    down = load_weights(directory, config, dtype=torch.float32, device="cpu").layers[9].down
    assert isinstance(down, torch.Tensor)
    student = Student(fingerprint(directory), config.num_layers, config.hidden_size, (15,), {9: {"down": down}})
    write_student(student, tmp_path / "own.safetensors")
    out = tmp_path / "out" / "d3.json"
    out.parent.mkdir()
    policy = f"distilled skip-layers=15 student={tmp_path / 'own.safetensors'}"
    succeed(["calibrate", "demo", *FEW, "--check", policy, "--out", str(out)])
    written = json.loads(out.read_text())
    assert written["depth"] == {"policy": "distilled", "skip_layers": [15], "student": "auto", "on_skip": "none"}
    content = (out.parent / STUDENT_FILE).read_bytes()
    assert content == (tmp_path / "own.safetensors").read_bytes()
    assert written["student"]["sha256"] == sha256(content).hexdigest()
    assert written["evidence"]["activations"] == "float32"
    assert written["evidence"]["kv_cache_dtype"] == written["evidence"]["dtype"] == "float32"
    (out.parent / STUDENT_FILE).write_bytes(b"hours of training")
    said = refused(["calibrate", "demo", *FEW, "--check", policy, "--out", str(out)])
    assert f"--out must be such that no other {STUDENT_FILE} lies beside it" in said
    assert (out.parent / STUDENT_FILE).read_bytes() == b"hours of training"
