"""The rehearsal of the GPU round runs to its end on a CPU, and its file has every figure; no time is judged here.
Nor is any taken: the clock of these tests moves with the work, so that they pass on a machine of any speed and load."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from round_clock import ROOT, set_clock

from benchmarks import gpu_round
from benchmarks.gpu import end_to_end, peers, switches
from benchmarks.gpu import tests as tests_of_the_round
from benchmarks.gpu.common import takes_scales_of_rows
from d3engine.model.quantization_config import QUANTIZATION_SCHEMES
from d3engine.utils.children import python_command

SMALL = (*QUANTIZATION_SCHEMES, "Q4_0")
"""How matrices are stored in a rehearsal, beside floats."""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory, interpreter: None) -> Path:
    """What one rehearsal has written: all parts in this process, whose interpreter of Triton is there already."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton compiles in this process: a rehearsal is for machines without a GPU, or without Triton")
    file = tmp_path_factory.mktemp("round") / "round.json"
    with pytest.MonkeyPatch.context() as patch:
        set_clock(patch)
        # Fewer programs: each takes the interpreter its time.
        patch.setattr("d3engine.kernels.triton.products.MIN_PROGRAMS", 8)
        patch.setattr(gpu_round, "run_apart", gpu_round.run_here)
        patch.setattr(peers, "COMPILE_LIMIT_S", 1e6)
        patch.setattr(tests_of_the_round, "TIMEOUT_S", 1e6)
        assert gpu_round.main(["--smoke", f"--out={file}"]) == 0
    return file


@pytest.fixture(scope="module")
def report(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_every_part_ends(report: dict[str, Any]) -> None:
    statuses = {name: part["status"] for name, part in report["parts"].items()}
    tools = {"sanitized": "compute-sanitizer", "profiled": "ncu"}
    here = [name for name, tool in tools.items() if shutil.which(tool) is None]
    assert statuses == dict.fromkeys(gpu_round.PARTS, "done") | dict.fromkeys(here, "skipped")
    assert not any("stopped" in part or "earlier_modes" in part for part in report["parts"].values())
    assert report["rehearsal"] is True
    assert str(ROOT) not in json.dumps(report)


def test_what_later_parts_launch_is_known_before_them(report: dict[str, Any]) -> None:
    found = report["parts"]["compiled"]
    assert found["launches"] > 100
    assert "not_described" not in found


def test_quantized_models_are_checked_by_what_weights_stand_for(report: dict[str, Any]) -> None:
    """Quantized models are checked against what their weights stand for."""
    models = report["parts"]["quantized"]["models"]
    assert [model["scheme"] for model in models] == list(SMALL)
    for model in models:
        assert model["check"]["tokens"] == 48
        assert model["check"]["largest_gap"] < end_to_end.TIE


def test_ceilings_are_measured_twice(report: dict[str, Any]) -> None:
    ceilings = report["parts"]["device"]["ceilings"]
    assert list(ceilings) == ["copy", "read", "matmul"]
    for row in ceilings.values():
        assert row["rates"] == [row["amount"] / seconds for seconds in row["seconds"]]
        assert len(row["rates"]) == 2


def test_the_trial_of_programmatic_launch_is_rehearsed(report: dict[str, Any]) -> None:
    assert report["parts"]["device"]["programmatic_launch"] == "passed"


def test_every_operation_is_near_float64(report: dict[str, Any]) -> None:
    found = report["parts"]["kernels"]
    assert found["triton"] == "interpreted, not timed"
    operations = {row["operation"] for row in found["rows"]}
    assert all(row["programmatic"] for row in found["rows"])
    assert {"paged_attention 9", "linear_residual down", "sample, cuts and penalties"} <= operations
    assert len(found["rows"]) == 2 * 20 + len(SMALL) * 7
    for row in found["rows"]:
        for implementation in ("reference", "triton"):
            errors = row[implementation].get("relative_error", []) + row[implementation].get("tokens_that_differ", [])
            assert errors
            assert max(errors) < 2e-5, (row["operation"], implementation)
        assert row["bytes_moved"] > 0
        draws = row["operation"].startswith(("sample", "lm_head_sample"))
        assert ("by_torch" in row) is (draws and not row["operation"].endswith(SMALL))


def test_each_choice_runs_every_way_and_every_way_is_right(report: dict[str, Any]) -> None:
    for row in report["parts"]["switches"]["rows"]:
        assert len(row["variants"]) >= 2
        assert row["today"] == next(iter(row["variants"]))
        for name, way in row["variants"].items():
            assert "error" not in way, (row["question"], name)
            assert way["programmatic"] is (name != "PDL off"), (row["question"], name)
            limit = switches.FP8_ROWS_ERROR if name == "8-bit rows" else 2e-5
            assert max(way["relative_error"]) < limit, (row["question"], name)


def test_launching_is_timed_both_ways(report: dict[str, Any]) -> None:
    found = report["parts"]["switches"]["launching"]
    assert found.keys() == {"by_recipe", "anew"}
    assert min(found.values()) > 0


def test_a_switch_changes_what_is_launched(report: dict[str, Any]) -> None:
    rows = report["parts"]["switches"]["rows"]
    ways = {row["question"]: {n: way["grids"] for n, way in row["variants"].items()} for row in rows}
    prompts = ways["qkv fp8, 3 rows: prompts"]
    rounded = {"8-bit rows": 0} if takes_scales_of_rows() else {}
    assert {name: len(grids) for name, grids in prompts.items()} == {"unpacked": 0, **rounded, "own kernel": 1}
    border = ways["qkv int8, 3 rows: border"]
    assert (len(border["own kernel"]), border["cuBLAS"]) == (1, [])
    splits = ways["attention, one long row among short ones: splits"]
    assert [splits[name] for name in ("today", "256 entries a split")] == [[[12]], [[6]]]
    parts = ways["linear_residual o, 3 rows: tile"]
    assert {name: grid for name, (grid, *_) in parts.items() if "outputs" in name} == {"32 outputs": [1, 2, 1]}
    assert [tuple(grid) for grid in parts["today"]] == [(1, 4, 1)]


def test_8_bit_cache_follows_a_wide_one_and_counts_its_bytes(report: dict[str, Any]) -> None:
    """An 8-bit cache is listed with a wide one, and its bytes are counted."""
    found = report["parts"]["cache"]
    wide, narrow = found["models"]
    assert (wide["scheme"], narrow["scheme"]) == ("float32", "float32, fp8 cache")
    entries = [2 * 2 * 16 * 4, 2 * 2 * (16 + 4)]  # keys and values, heads, channels of float32 or of a byte, a scale
    assert [model["kv_bytes_a_token_and_layer"] for model in (wide, narrow)] == entries
    (of_wide,), (of_narrow,) = wide["settings"], narrow["settings"]
    assert [row["depth"] for row in of_narrow["depths"]] == [8, 4]
    for ratio, one, other in zip(found["ratios"], of_wide["depths"], of_narrow["depths"], strict=True):
        assert ratio["over_wide_entries"] == pytest.approx(other["step_s"] / one["step_s"])
        tokens = sum(of_wide["context"] + i for i in range(1, of_wide["tokens"])) / (of_wide["tokens"] - 1)
        saved = one["depth"] * of_wide["batch"] * (entries[0] - entries[1]) * tokens
        assert one["bytes_a_step"] - other["bytes_a_step"] == pytest.approx(saved)
    assert "check" in wide
    assert "check" not in narrow  # which plain PyTorch has no cache for


@pytest.mark.parametrize("part", ["decode", "llama3", "quantized"])
def test_depths_lie_on_a_line_and_d3_is_held_to_its_bound(report: dict[str, Any], part: str) -> None:
    for model in report["parts"][part]["models"]:
        first = model["settings"][0]
        full, *less = first["depths"]
        assert [row["depth"] for row in first["depths"]] == [8, 6, 4]
        kv = sum(2 * 8 * 32 * 4 * (first["context"] + i) for i in range(1, first["tokens"])) / (first["tokens"] - 1)
        assert full["bytes_a_step"] == pytest.approx(8 * model["layer_bytes"] + model["head_bytes"] + kv)
        assert [row["mean_layers"] for row in less] == [6, 4]
        assert set(first["fit"]) == {"layer_s", "fixed_s", "over_the_line", "within_the_gate"}
        assert first["noise"] >= 0
        for row in first["schedules"]:
            assert row["layer_bound"] == pytest.approx(full["bytes_a_step"] / row["bytes_a_step"])
            assert row["layer_bound"] > 1
            assert row["realisation"] == pytest.approx(full["step_s"] / row["step_s"] / row["layer_bound"])
        if "check" in model:
            assert model["check"]["tokens"] == 2 * end_to_end.CHECKED_TOKENS
            assert model["check"]["largest_gap"] < 1e-4


def test_batch_of_two_depths_keeps_uniform_batches_promise(report: dict[str, Any]) -> None:
    """A batch of two depths is held to what uniform batches promise."""
    first, setting = report["parts"]["decode"]["models"][0]["settings"]
    found = setting["mixed"]
    assert "mixed" not in first
    assert (found["rows"], found["depths"]) == ([2, 1], [8, 4])
    assert found["uniform_s"] == [row["step_s"] for row in setting["depths"]]
    assert found["promised_s"] == found["uniform_s"][1] + found["half_s"][0] - found["half_s"][1]
    median = sorted(found["calls_s"])[1]
    assert found["step_s"] == pytest.approx((median - setting["prompt_s"]) / (setting["tokens"] - 1))
    assert found["within_the_gate"] is (found["step_s"] <= end_to_end.GATE * found["promised_s"])


def test_peers_answer_with_the_tokens_of_the_engine(report: dict[str, Any]) -> None:
    found = report["parts"]["peers"]
    assert [(case["batch"], case["context"]) for case in found["cases"]] == [(2, 12)]
    for case in found["cases"]:
        assert len(case["systems"]) == 5
        for name, system in case["systems"].items():
            assert len(system["call_s"]) == 3
            if "D3" not in name:
                assert system["rows_with_equal_tokens"] == case["batch"], name


def test_every_strategy_meets_the_same_arrivals(report: dict[str, Any]) -> None:
    rows = report["parts"]["arrivals"]["rows"]
    assert [(row["admission"], row["policy"]["policy"]) for row in rows] == [
        ("Immediate()", "full"),
        ("Immediate()", "d3"),
        ("IntervalAdmission(steps=4)", "full"),
        ("IntervalAdmission(steps=4)", "d3"),
    ]
    assert len({(row["requests_per_s"], row["arrived"]) for row in rows}) == 1


def test_files_of_several_calls_are_joined(file: Path, report: dict[str, Any], tmp_path: Path) -> None:
    parts = report["parts"]
    halves = [
        report | {"parts": {name: parts[name] for name in ("device", "tests", "decode")}},
        report | {"parts": {"device": parts["device"], "decode": {"status": "skipped"}, "peers": parts["peers"]}},
    ]
    files = [tmp_path / "one.json", tmp_path / "two.json"]
    for half, path in zip(halves, files, strict=True):
        path.write_text(json.dumps(half))
    assert gpu_round.main(["--join", *map(str, files), f"--out={tmp_path / 'joined.json'}"]) == 0
    joined = json.loads((tmp_path / "joined.json").read_text())
    assert list(joined["parts"]) == ["device", "decode", "peers", "tests"]
    assert joined["parts"]["decode"]["models"] == parts["decode"]["models"]
    files[1].write_text(json.dumps(halves[1] | {"environment": report["environment"] | {"commit": "other"}}))
    with pytest.raises(ValueError, match="different commit"):
        gpu_round.join([str(path) for path in files])
    files[1].write_text(json.dumps(halves[1] | {"environment": report["environment"] | {"tree": "other"}}))
    with pytest.raises(ValueError, match="different tree"):
        gpu_round.join([str(path) for path in files])


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what git has of this commit and nothing that is built or installed, as the lent machine gets it."""
    folder = tmp_path_factory.mktemp("bare")
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode:
        pytest.skip("this is no checkout")
    subprocess.run(["tar", "x"], cwd=folder, input=archive.stdout, check=True)
    return folder


@pytest.mark.parametrize("workers", [None, "1"])
def test_the_tests_of_the_round_need_nothing_that_is_built(bare: Path, workers: str | None) -> None:
    command = python_command(*tests_of_the_round.pytest_arguments(on_gpu=True))
    if "-n" in command:
        command[command.index("-n") :] = ["-n", workers] if workers else ["-p", "no:xdist"]
    elif workers:
        pytest.skip("xdist is not installed")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [*command, "--collect-only"], cwd=bare, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "test_programmatic_launch_on_gpu.py" in done.stdout
    assert "test_interleaved.py" not in done.stdout  # of tests/kernels/native


def test_round_runs_in_a_bare_folder_with_a_process_each_part(bare: Path, tmp_path: Path) -> None:
    """The round runs in a bare folder, each part in its own process."""
    arguments = ["-m", "benchmarks.gpu_round", "--smoke", "--parts=device", f"--out={tmp_path / 'round.json'}"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, *arguments], cwd=bare, env=environment, stdout=subprocess.DEVNULL, check=True)
    report = json.loads((tmp_path / "round.json").read_text())
    (part,) = report["parts"].values()
    assert part["status"] == "done"
    assert list(part["ceilings"]) == ["copy", "read", "matmul"]
    assert report["environment"]["commit"] is None
    assert report["environment"]["tree"] == gpu_round.tree_hash(bare)
    assert report["environment"]["versions"]["d3engine"] is not None
    with (bare / "kernels/triton/launches.py").open("a") as file:
        file.write("\n")
    assert report["environment"]["tree"] != gpu_round.tree_hash(bare)
