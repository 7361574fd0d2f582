"""The benchmarks run, and their figures follow from each other; no time is judged here."""

import itertools
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch
from benchmark_reports import report_of
from transformers import LlamaForCausalLM

from benchmarks import admission, decode, lossless, policies, systems
from benchmarks.report import environment
from d3engine.depth import D3, EarlyExit
from d3engine.engine.engine import Engine
from d3engine.engine.model_directory import model_directory
from d3engine.request.admission import Immediate

TINY = systems.Settings(model="tiny", tokens=8, batch=2, repeats=3, threads=1)


@pytest.fixture(scope="module")
def decoded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    options = ["--model=tiny", "--tokens=8", "--batch=2", "--repeats=3", "--threads=1", "--no-memory"]
    return report_of(decode.main, tmp_path_factory.mktemp("decode"), *options)


def test_decode_generates_the_tokens_of_transformers(decoded: dict[str, Any]) -> None:
    assert decoded["tokens_equal"] is True
    assert decoded["first_difference"] == [None, None]


def test_decode_rates_and_ratios_follow_from_the_seconds(decoded: dict[str, Any]) -> None:
    seconds = {system: row["seconds"]["rounds"] for system, row in decoded["systems"].items()}
    assert list(seconds) == ["full_depth", "d3", "transformers"]
    for system, row in decoded["systems"].items():
        assert len(seconds[system]) == 3
        rates = row["tokens_per_second"]
        assert rates["rounds"] == pytest.approx([2 * 8 / second for second in seconds[system]])
        assert rates["median"] == pytest.approx(median(rates["rounds"]))
        assert (rates["min"], rates["max"]) == (min(rates["rounds"]), max(rates["rounds"]))
    for name, slower, faster in (
        ("full_depth_over_transformers", "transformers", "full_depth"),
        ("d3_over_transformers", "transformers", "d3"),
        ("d3_over_full_depth", "full_depth", "d3"),
    ):
        ratios = [a / b for a, b in zip(seconds[slower], seconds[faster], strict=True)]
        assert decoded[name]["rounds"] == pytest.approx(ratios)
        assert decoded[name]["median"] == pytest.approx(median(ratios))


def test_decode_bounds_the_speed_up_by_the_bytes_moved(decoded: dict[str, Any]) -> None:
    full, d3 = decoded["systems"]["full_depth"], decoded["systems"]["d3"]
    model, depth = decoded["model"], decoded["settings"]["depth"]
    depths = D3(depth["alpha"], depth["start"]).schedule(model["layers"]).depths(8)
    assert d3["mean_layers"] == pytest.approx(depths.mean())
    assert full["mean_layers"] == model["layers"]
    assert d3["weight_bytes_moved"] == depths.sum() * model["layer_bytes"] + 8 * model["head_bytes"]
    assert decoded["layer_bound"] == pytest.approx(full["weight_bytes_moved"] / d3["weight_bytes_moved"])
    speed_up = decoded["d3_over_full_depth"]["median"]
    assert decoded["realisation_ratio"] == pytest.approx(speed_up / decoded["layer_bound"])


def test_decode_counts_the_bytes_of_its_model(decoded: dict[str, Any]) -> None:
    sizes = systems.RANDOM_MODELS["tiny"]
    hidden, intermediate, vocabulary = sizes["hidden_size"], sizes["intermediate_size"], sizes["vocab_size"]
    kv = hidden * sizes["num_key_value_heads"] // sizes["num_attention_heads"]
    layer = hidden * (2 * hidden + 2 * kv + 3 * intermediate) + 2 * hidden
    assert decoded["model"]["layer_bytes"] == 4 * layer
    assert decoded["model"]["head_bytes"] == 4 * (vocabulary + 1) * hidden
    layers = sizes["num_hidden_layers"]
    assert decoded["model"]["parameters"] == layers * layer + (2 * vocabulary + 1) * hidden
    assert decoded["model"]["kv_bytes_per_token"] == layers * 2 * kv * 4


def test_decode_says_where_its_figures_come_from(decoded: dict[str, Any]) -> None:
    found = decoded["environment"]
    assert found["command"].startswith("python -m benchmarks.decode --model=tiny --tokens=8")
    assert found["versions"]["torch"] == torch.__version__
    assert found["cpu"]
    assert decoded["settings"]["threads"] == 1


def test_no_path_of_the_machine_is_written_down(tmp_path: Path) -> None:
    for options in (["--json", str(tmp_path / "a.json")], [f"--json={tmp_path / 'a.json'}"]):
        assert str(tmp_path) not in environment("benchmarks.decode", options)["command"]


@pytest.mark.parametrize(("num_layers", "num_tokens"), [(16, 128), (24, 128), (24, 64)])
def test_the_decay_has_the_mean_depth_asked_for(num_layers: int, num_tokens: int) -> None:
    mean = systems.decay_for(num_layers, num_tokens).schedule(num_layers).depths(num_tokens).mean()
    assert mean == pytest.approx(num_layers / 1.5, rel=0.02)


@pytest.mark.parametrize("system", systems.SYSTEMS)
def test_memory_is_measured_for_each_system(system: str) -> None:
    found = decode.memory(system, replace(TINY, batch=1))
    assert set(found) == {"loaded_bytes", "peak_bytes", "peak_includes_loading"}
    assert found["peak_bytes"] >= (found["loaded_bytes"] or 0) > 0 or found["peak_includes_loading"]


def test_admission_saves_as_its_cells_say(tmp_path: Path) -> None:
    picture = tmp_path / "admission.png"
    sizes = ["--batches", "4", "16", "--waves", "8", "--steps", "450", "--warm-up", "200"]
    report = report_of(admission.main, tmp_path, *sizes, f"--plot={picture}")
    assert picture.stat().st_size > 0
    cells = {(cell["batch"], cell["admit_every"]): cell for cell in report["cells"]}
    assert sorted(cells) == [(4, 1), (4, 8), (16, 1), (16, 8)]
    depths = D3(0.9, 0.6).schedule(32).depths(256)
    assert report["bound"] == pytest.approx(32 / depths.mean())
    assert report["settings"]["arrivals_per_step"] == pytest.approx([0.98 * 4 / 256, 0.98 * 16 / 256])
    for (batch, _), cell in cells.items():
        assert 1 <= cell["layer_steps_saved"] <= 32 / depths.min()
        assert 0 < cell["mean_rows"] <= batch
        assert cell["extra_wait"] == pytest.approx(cell["mean_wait"] - cells[batch, 1]["mean_wait"])


def test_ctrl_c_keeps_finished_rounds_of_the_lossless_benchmark(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Finished rounds are kept where Ctrl-C ends the lossless benchmark."""
    generate, calls = Engine.generate, itertools.count(1)

    def pressed_in_the_third_round(*arguments: Any, **options: Any) -> Any:
        if next(calls) > 3 * 3:  # a warm-up and two rounds of three systems
            raise KeyboardInterrupt
        return generate(*arguments, **options)

    monkeypatch.setattr(Engine, "generate", pressed_in_the_third_round)
    settings = lossless.Settings(drafts=((0.8, 0.4),), lengths=(2,), prompts=1, tokens=6, repeats=5)
    report = lossless.measure(settings)
    assert [len(cell["speedup"]["rounds"]) for cell in report["cells"]] == [2]
    assert "2 of 5 rounds" in capsys.readouterr().err


def test_lossless_benchmark_compares_equal_answers_and_promise(tmp_path: Path) -> None:
    """The lossless benchmark compares equal answers with what their acceptance promises."""
    sizes: dict[str, Any] = {"lengths": (2,), "prompts": 2, "batch": 2, "tokens": 12, "repeats": 1}
    settings = lossless.Settings(drafts=((0.8, 0.4),), windows=((6, 8),), **sizes)
    report = lossless.measure(settings)
    assert [cell["title"] for cell in report["cells"]] == ["alpha 0.8, start 0.4", "without layers 6 to 8"]
    for cell in report["cells"]:
        g, b, c = cell["mean_draft_length"], cell["acceptance"], cell["draft_cost"]
        assert cell["tokens_per_verification"] == pytest.approx(g + 1 if b == 1 else (1 - b ** (g + 1)) / (1 - b))
        assert cell["modelled_speedup"] == pytest.approx(cell["tokens_per_verification"] / (g * c + 1))
    lossless.plot(report, tmp_path / "lossless.png")
    assert (tmp_path / "lossless.png").stat().st_size > 10_000


def test_what_is_accepted_is_counted_without_a_clock(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    some = ["--model=demo", "--without", "8", "8", "--lengths", "2", "--prompts=1", "--tokens=8"]
    report = report_of(lossless.main, tmp_path, *some, "--repeats=0")
    (cell,) = report["cells"]
    assert cell["title"] == "without layer 8"
    assert cell["tokens_per_verification"] == 1 + cell["accepted_over_drafted"] * cell["mean_draft_length"]
    assert not {"best", "full_depth_tokens_per_second"} & report.keys()
    assert "speedup" not in cell
    printed = capsys.readouterr().out
    assert f"{cell['accepted_over_drafted']:.0%}" in printed
    assert "speed-up" not in printed
    with pytest.raises(SystemExit):
        lossless.main([*some, "--repeats=0", "--plot=picture.png"])
    assert "--repeats must be at least 1, not 0" in capsys.readouterr().err


@pytest.mark.parametrize(("b", "g", "c"), [(0.5, 3, 0.25), (0.9, 1, 0.6), (1.0, 4, 0.5), (0.0, 2, 0.5)])
def test_the_break_even_line_is_the_sum_of_its_series(b: float, g: int, c: float) -> None:
    tokens = sum(b**power for power in range(g + 1))
    assert lossless.modelled_speedup(b, c, g) == pytest.approx(tokens / (g * c + 1))
    assert lossless.acceptance_for(tokens, g) == pytest.approx(b, abs=1e-9)


def test_a_lone_answer_saves_what_its_schedule_saves() -> None:
    settings = admission.Settings(tokens=64)
    simulation = admission.Simulation(settings, batch=1, admission=Immediate())
    simulation.arrive(1)
    steps = [simulation.step() for _ in range(65)]
    assert [rows for rows, _, _ in steps] == [1] * 64 + [0]
    assert np.array_equal([layers for _, layers, _ in steps[:64]], settings.schedule.depths(64))
    assert steps[0][2] == [0]


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    sizes = {"problems": 3, "timed": 2, "calibration": 2, "repeats": 1, "batch": 3, "max-tokens": 24, "threads": 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policies, "BISECTIONS", 2)
        arguments = [f"--{name}={size}" for name, size in sizes.items()]
        return report_of(policies.main, tmp_path_factory.mktemp("policies"), *arguments)


def test_policies_are_compared_at_one_depth(compared: dict[str, Any]) -> None:
    rows, target = compared["systems"], compared["target_mean_layers"]
    assert list(rows) == [system.name for system in policies.SYSTEMS]
    assert rows["full depth"]["realised_mean_layers"] == 16
    for name in ("D3", "tail skip", "SkipDecode", "unified skipping"):
        assert rows[name]["realised_mean_layers"] == pytest.approx(target, abs=1), name
        assert rows[name]["kv_bytes_saved_an_answer"] > 0
    for name, row in rows.items():
        if name.startswith("early exit"):
            assert row["realised_mean_layers"] < 16
            assert row["kv_bytes_saved_an_answer"] == 0
            assert row["policy"]["batch"] == ("batch_min" if "batch_min" in name else "per_row")


DRAFTING = ("self-speculative, tail skip", "lossless D3", "speculative, own lowest layers")


def test_drafting_systems_answer_as_full_depth_with_acceptance(compared: dict[str, Any]) -> None:
    """Systems that draft answer as full depth and say what was accepted."""
    rows = compared["systems"]
    for name, row in rows.items():
        assert (row["flops_ratio"] is None) == (name == DRAFTING[2])  # a second model's work is not counted
        assert (row["acceptance_rate"] is None) == (row["tokens_per_verification"] is None) == (name not in DRAFTING)
    for name in DRAFTING:
        row = rows[name]
        assert (row["tokens"], row["exact_match"]) == (rows["full depth"]["tokens"], rows["full depth"]["exact_match"])
        assert 0 < row["acceptance_rate"] <= 1
        assert 1 < row["tokens_per_verification"] <= policies.DRAFT_LENGTH + 1
        assert row["kv_bytes_saved_an_answer"] == 0
    # Where verification resumes, less is run; a second model's layers are not counted at all.
    mine, resumed, second = (rows[name]["realised_mean_layers"] for name in DRAFTING)
    assert mine > resumed > 16
    assert second >= 16
    assert rows[DRAFTING[2]]["policy"]["draft_model"] == "the lowest 11 layers of demo"


def test_the_lowest_layers_of_a_model_are_a_model_of_its_own(tmp_path: Path) -> None:
    directory = policies.save_lowest_layers("demo", 9, tmp_path / "lowest")
    whole = LlamaForCausalLM.from_pretrained(model_directory("demo"), dtype=torch.float32)
    del whole.model.layers[9:]
    tokens = torch.arange(3, 20)[None]
    with torch.inference_mode():
        found = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)(tokens).logits
        torch.testing.assert_close(found, whole(tokens, use_cache=False).logits)


def test_policies_speeds_and_bounds_follow_from_each_other(compared: dict[str, Any]) -> None:
    rows = compared["systems"]
    first = rows["full depth"]["tokens_per_second"]["rounds"]
    for name, row in rows.items():
        rates = row["tokens_per_second"]["rounds"]
        assert len(rates) == compared["settings"]["repeats"]
        assert row["speed_over_first"]["rounds"] == pytest.approx([a / b for a, b in zip(rates, first, strict=True)])
        if name not in DRAFTING:
            assert 0 < row["timed_mean_layers"] <= 16
            assert 0.5 < row["flops_ratio"] <= 16 / row["realised_mean_layers"] + 1e-9
        assert row["interval_95"]["low"] <= row["exact_match"] <= row["interval_95"]["high"]


def test_an_early_exit_is_brought_to_the_depth_asked_for(tmp_path: Path) -> None:
    """The bisection against thresholds whose depth is known: it ends at the one that gives the target."""

    class Known(policies.Budget):
        def depth_of(self, policy: EarlyExit) -> float:
            return 1 + 15 * policy.threshold / 1.2

    budget = Known(engine=None, given=[], params=None, folder=tmp_path, target=8.5)  # type: ignore[arg-type]
    found = budget.early_exit(confidence="cosine")
    assert isinstance(found, EarlyExit)
    assert budget.depth_of(found) == pytest.approx(8.5, abs=0.2)
    assert found.confidence == "cosine"
